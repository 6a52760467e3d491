"""One row per method: what its name sets in the sections of a config.

These are defaults: a config file or an override wins over them.  `docs/methods/` has a card for
each method.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedp3.client.hooks import Hooks
from fedp3.core.registry import Registry
from fedp3.methods.hook_settings import HookSettings

Settings = Mapping[str, Mapping[str, object]]  # section -> key -> value


@dataclass(frozen=True, slots=True)
class Method:
    """A method that a config can name.

    Args:
        about: a description of one line.
        settings: the defaults that its name sets, section by section; a config file or an override
            wins over them.
        hooks: makes its hooks from the [hooks] section; None makes those that the section names.
    """

    about: str
    settings: Settings = field(default_factory=dict)
    hooks: Callable[[HookSettings], Hooks] | None = None


METHODS: Registry[Method] = Registry("method")


def _with(base: Settings, **sections: Mapping[str, object]) -> Settings:
    """The base settings with these on top."""
    merged = {section: dict(keys) for section, keys in base.items()}
    for section, keys in sections.items():
        merged[section] = {**merged.get(section, {}), **keys}
    return merged


# every client receives, trains and uploads the full model
FULL: Settings = {
    "plan": {"layers": "full"},
    "prune": {"keep": 1.0},
    "aggregate": {"rule": "examples"},
}
PERSONAL_HEAD = _with(FULL, plan={"head": "personal"})
# every layer but the head is pruned to the device's capacity, and what it retained is uploaded
SUBMODELS: Settings = {
    "plan": {"layers": "prune-all", "upload": "retained"},
    "aggregate": {"rule": "simple"},
}
WIDTHS = [1.0, 0.5, 0.25, 0.125, 0.0625]  # HeteroFL's levels a to e
HETEROFL = _with(
    SUBMODELS,
    hooks={"loss": "present", "scale": True, "static_norm": True},
    local={"clip_norm": 1.0},
)
FJORD = _with(
    SUBMODELS,
    prune={
        "keep": [1.0, 0.8, 0.6, 0.4, 0.2],
        "selector": "ordered",
        "local_pruner": "ordered_dropout",
        "q": [0.2, 0.4, 0.6, 0.8, 1.0],
        "q_relative_to": "layer",
    },
    aggregate={"rule": "examples"},
)
FIARSE = _with(
    SUBMODELS, prune={"keep": [1.0, 0.25, 0.0625, 0.015625], "selector": "magnitude_all"}
)
FEDCR = _with(
    PERSONAL_HEAD,
    aggregate={"rule": "simple"},
    hooks={
        "passes": "head-last",
        "loss": "code",
        "exchange": "gaussians",
        "code": 256,
        "finetune_factor": 1.0,
    },
)


RANKS = [1.0, 0.5, 0.25]  # of a device, as shares of [adapter] rank


def _lora(rule: str, **sections: Mapping[str, object]) -> Settings:
    """Adapters, trained by all clients."""
    return _with(FULL, adapter={"kind": "lora", "rule": rule}, **sections)


def _ranks(rule: str, **sections: Mapping[str, object]) -> Settings:
    """Adapters of different ranks: a weak device has the leading pairs of each."""
    return _with(
        SUBMODELS,
        adapter={"kind": "lora", "rule": rule},
        prune={"keep": RANKS, "selector": "ordered"},
        **sections,
    )


def _coded(layers: str) -> Settings:
    """FedCR under FedP3's layer plan: windows over the layers before the code.

    The layer of the code is in every L_i.
    """
    return _with(FEDCR, plan={"layers": layers}, prune={"keep": 0.9})


def _add(name: str, about: str, settings: Settings | None = None) -> None:
    METHODS.add(name, Method(about, settings or {}))


_add(
    "fedp3", "a few layers in full, the others pruned; only the few are uploaded (Yi et al., 2024)"
)
_add(
    "fedp3-lowerb",
    "FedP3, one hidden layer and the head per client",
    {"plan": {"layers": "lowerb"}},
)
_add(
    "fedp3-opu2",
    "FedP3, two hidden layers and the head per client",
    {"plan": {"layers": "opu2"}},
)
_add(
    "fedp3-opu3",
    "FedP3, three hidden layers and the head per client",
    {"plan": {"layers": "opu3"}},
)
_add(
    "fedp3-paced",
    "FedP3 over time: small layers in every round, large ones in turn; coded changes both ways",
    {
        "plan": {"layers": "full", "schedule": "paced", "others": "freeze"},
        "prune": {"keep": 1.0},
        "upload": {"compress": "ternary", "entropy": True},
        "download": {"compress": "ternary", "entropy": True},
    },
)
_add("fedavg", "the full model down and up, weighted by examples (McMahan et al., 2017)", FULL)
_add(
    "fedavg-ft",
    "FedAvg; P after five times the local steps: fine-tuning",
    _with(FULL, hooks={"finetune_factor": 5.0}),
)
_add(
    "local",
    "nothing is sent: every client trains alone",
    {
        "plan": {"layers": "prune-all", "head": "personal", "others": "personal"},
        "prune": {"keep": 1.0},
    },
)
_add(
    "fedprox",
    "FedAvg with a proximal term towards what was sent (Li et al., 2020)",
    _with(FULL, hooks={"mu": 0.01}),
)
_add(
    "fedper",
    "shared body, personal head, trained together (Arivazhagan et al., 2019)",
    PERSONAL_HEAD,
)
_add(
    "fedrep",
    "shared body, personal head: the head trains first, then the body (Collins et al., 2021)",
    _with(PERSONAL_HEAD, hooks={"passes": "head-body"}),
)
_add(
    "fedbabu",
    "only the body is trained and exchanged; a client fine-tunes the head too (Oh et al., 2022)",
    _with(PERSONAL_HEAD, hooks={"passes": "body", "finetune_factor": 5.0}),
)
_add(
    "ditto",
    "FedAvg, and a personal model at every client, with a proximal term (Li et al., 2021)",
    _with(FULL, hooks={"passes": "own", "mu": 0.1}),
)
_add(
    "fedrop",
    "Federated Dropout: random units for every client and round (Caldas et al., 2018)",
    _with(SUBMODELS, prune={"keep": 0.75, "selector": "neuron"}),
)
_add(
    "heterofl",
    "leading units by capacity; scaler, masked cross-entropy, static norm (Diao et al., 2021)",
    _with(HETEROFL, prune={"keep": WIDTHS, "selector": "ordered"}),
)
_add(
    "fjord",
    "nested widths, one drawn for every batch up to the client's capacity (Horváth et al., 2021)",
    FJORD,
)
_add(
    "fedrolex",
    "a window of units that moves every round; HeteroFL's aids (Alam et al., 2022)",
    _with(HETEROFL, prune={"keep": WIDTHS, "selector": "rolling"}),
)
_add(
    "fiarse",
    "the largest weights of the full model, as many as the capacity (Wu et al., 2024)",
    FIARSE,
)
_add(
    "fiarse-threshold",
    "FIARSE with the gradient through the threshold of its mask (Wu et al., 2024)",
    _with(FIARSE, hooks={"through_threshold": True}),
)
_add(
    "ist",
    "disjoint sets of units for the clients of a round (Yuan et al., 2022)",
    _with(SUBMODELS, prune={"keep": 0.1, "selector": "dealt"}),
)
_add(
    "resist",
    "disjoint sets of residual blocks, others are skipped; needs resnet18 (Dun et al., 2022)",
    {
        "plan": {"layers": "blocks-2", "redraw": True, "others": "skip"},
        "prune": {"keep": 1.0},
    },
)
_add(
    "fedcr",
    "stochastic code, personal head, class Gaussians exchanged (Zhang et al., 2023)",
    FEDCR,
)
_add("fedcr-opu2", "FedCR under FedP3's plan of two hidden layers", _coded("opu2+1"))
_add("fedcr-opu3", "FedCR under FedP3's plan of three hidden layers", _coded("opu3+1"))
_add(
    "fedavg-fp16",
    "FedAvg, uploads in half precision",
    _with(FULL, upload={"compress": "fp16"}),
)
_add(
    "fedavg-int8",
    "FedAvg, uploads in 8 bits with random rounding",
    _with(FULL, upload={"compress": "int8"}),
)
_add(
    "fedavg-topk",
    "FedAvg, the largest hundredth of every upload, with error feedback (Stich et al., 2018)",
    _with(FULL, upload={"compress": "topk"}),
)
_add(
    "fedavg-layer",
    "FedAvg, but each client uploads the head and one layer, drawn every round",
    _with(FULL, plan={"layers": "random-1", "redraw": True}),
)
_add(
    "fedpart",
    "one layer after the other, the same for all clients, between rounds of all (Wang et al., "
    "2024)",
    _with(FULL, plan={"schedule": "cycle", "others": "freeze"}),
)
_add(
    "fedlp",
    "FedAvg, but each client uploads each layer with a probability (Zhu et al., 2023)",
    _with(FULL, plan={"schedule": "random"}),
)
_add(
    "fedluar",
    "FedAvg, but some layers are not uploaded and repeat their last change (Kim et al., 2025)",
    _with(FULL, aggregate={"recycle": 0.5}),
)
_add(
    "fedlama",
    "FedAvg, but layers on which clients agree are averaged less often (Lee et al., 2023)",
    _with(FULL, aggregate={"interval": 4}),
)
_add(
    "cocofl",
    "a window of layers per client and round, the rest frozen; damped mean (Pfeiffer et al., 2023)",
    {
        "plan": {"layers": "opu1-2-3", "redraw": True, "others": "freeze"},
        "prune": {"keep": 1.0},
        "aggregate": {"rule": "simple", "damp": 1.0},
    },
)
_add(
    "fedavgm",
    "FedAvg with momentum on the server (Hsu et al., 2019)",
    _with(FULL, aggregate={"server": "momentum"}),
)
_add(
    "fedadam",
    "FedAvg with Adam on the server (Reddi et al., 2021)",
    _with(FULL, aggregate={"server": "adam", "server_lr": 0.01}),
)
_add(
    "scaffold",
    "control variates against client drift, twice the bytes (Karimireddy et al., 2020)",
    _with(FULL, aggregate={"rule": "simple"}, hooks={"exchange": "scaffold"}),
)
_add(
    "fedit",
    "LoRA, both matrices averaged separately; needs attention, or targets (Zhang et al., 2024)",
    _lora("factors"),
)
_add(
    "ffa-lora",
    "LoRA whose matrix A stays as it was drawn, so that means are exact (Sun et al., 2024)",
    _lora("freeze_a"),
)
_add(
    "hetlora",
    "LoRA of a rank by capacity, padded with zeros, weighed by norms (Cho et al., 2024)",
    _ranks("factors", plan={"upload": "zeros"}, aggregate={"rule": "product_norm"}),
)
_add(
    "flexlora",
    "LoRA of a rank by capacity; products are averaged and cut to each rank (Bai et al., 2024)",
    _ranks("product", aggregate={"rule": "examples"}),
)
_add(
    "flora",
    "LoRA of a rank by capacity; products are added to the weights in full (Wang et al., 2024)",
    _ranks("stack", aggregate={"rule": "examples"}),
)
_add(
    "fedra",
    "LoRA in a few blocks per client and round, the others are skipped (Su et al., 2024)",
    _lora("factors", plan={"layers": "blocks-2", "redraw": True, "others": "skip"}),
)
