"""One row per method: what its name sets, in the sections of a config.

Settings are defaults: a file or an override wins over them.  `docs/methods/` has a card for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = Mapping[str, Mapping[str, object]]  # section -> key -> value


@dataclass(frozen=True, slots=True)
class Method:
    """A method's name for people, and its settings."""

    about: str
    settings: Settings = field(default_factory=dict)


def _with(base: Settings, **sections: Mapping[str, object]) -> Settings:
    """These settings with more on top."""
    return {s: {**base.get(s, {}), **sections.get(s, {})} for s in (*base, *(s for s in sections if s not in base))}


WHOLE: Settings = {"plan": {"layers": "full"}, "prune": {"keep": 1.0}, "aggregate": {"rule": "examples"}}
OWN_HEAD = _with(WHOLE, plan={"head": "personal"})
# every layer but the head cut to what the device can carry, and what it kept comes back
SLICED: Settings = {"plan": {"layers": "prune-all"}, "prune": {"upload": "kept"}, "aggregate": {"rule": "simple"}}
WIDTHS = [1.0, 0.5, 0.25, 0.125, 0.0625]  # HeteroFL's levels a to e
HETEROFL: Settings = _with(
    SLICED, hooks={"loss": "present", "scale": True, "static_norm": True}, local={"clip_norm": 1.0}
)
CODED = {"passes": "head-last", "loss": "code", "exchange": "gaussians", "code": 256, "tune": 1.0}
FEDCR = _with(OWN_HEAD, aggregate={"rule": "simple"}, hooks=CODED)


def _coded(layers: str) -> Settings:
    """FedCR under FedP3's layer plan: windows over the layers before the code, which is in every L_i."""
    return _with(FEDCR, plan={"layers": layers}, prune={"keep": 0.9})


METHODS: Mapping[str, Method] = {
    "fedp3": Method("a few layers whole, the rest pruned, only the few come back (Yi et al., ICLR 2024)"),
    "fedp3-lowerb": Method("FedP3, one hidden layer and the head per client", {"plan": {"layers": "lowerb"}}),
    "fedp3-opu2": Method("FedP3, two hidden layers and the head per client", {"plan": {"layers": "opu2"}}),
    "fedp3-opu3": Method("FedP3, three hidden layers and the head per client", {"plan": {"layers": "opu3"}}),
    "fedavg": Method("the whole model down and up, weighted by examples (McMahan et al., 2017)", WHOLE),
    "fedavg-ft": Method("FedAvg; P after five times the local steps: fine-tuning", _with(WHOLE, hooks={"tune": 5.0})),
    "local": Method(
        "nothing is sent: every client trains alone",
        {"plan": {"layers": "head", "head": "personal", "others": "personal"}, "prune": {"keep": 1.0}},
    ),
    "fedprox": Method("FedAvg with a pull towards what was sent (Li et al., 2020)", _with(WHOLE, hooks={"mu": 0.01})),
    "fedper": Method("shared body, own head, trained together (Arivazhagan et al., 2019)", OWN_HEAD),
    "fedrep": Method(
        "shared body, own head: first the head trains, then the body (Collins et al., 2021)",
        _with(OWN_HEAD, hooks={"passes": "head-body"}),
    ),
    "fedbabu": Method(
        "only the body trains and travels; the head when a client fine-tunes (Oh et al., 2022)",
        _with(OWN_HEAD, hooks={"passes": "body", "tune": 5.0}),
    ),
    "ditto": Method(
        "FedAvg, and a model of its own at every client, pulled towards it (Li et al., 2021)",
        _with(WHOLE, hooks={"passes": "own", "mu": 0.1}),
    ),
    "fedrop": Method(
        "Federated Dropout: random units for every client and round (Caldas et al., 2018)",
        _with(SLICED, prune={"keep": 0.75, "selector": "neuron"}),
    ),
    "heterofl": Method(
        "leading units by capacity; scaler, masked cross-entropy, static batch norm (Diao et al., 2021)",
        _with(HETEROFL, prune={"keep": WIDTHS, "selector": "ordered"}),
    ),
    "fjord": Method(
        "nested widths, one drawn for every batch up to the client's capacity (Horváth et al., 2021)",
        _with(
            SLICED,
            prune={"keep": [1.0, 0.8, 0.6, 0.4, 0.2], "selector": "ordered", "local": "ordered_dropout",
                   "q": [0.2, 0.4, 0.6, 0.8, 1.0], "q_of": "whole"},
            aggregate={"rule": "examples"},
        ),
    ),
    "fedrolex": Method(
        "a window of units that moves on every round; HeteroFL's aids (Alam et al., 2022)",
        _with(HETEROFL, prune={"keep": WIDTHS, "selector": "rolling"}),
    ),
    "fiarse": Method(
        "the largest weights of the whole model, as many as the capacity (Wu et al., 2024)",
        _with(SLICED, prune={"keep": [1.0, 0.25, 0.0625, 0.015625], "selector": "magnitude_all"}),
    ),
    "ist": Method(
        "units dealt out: disjoint parts for the clients of a round (Yuan et al., 2022)",
        _with(SLICED, prune={"keep": 0.1, "selector": "dealt"}),
    ),
    "resist": Method(
        "residual blocks dealt out, absent ones are skipped; needs resnet18 (Dun et al., 2022)",
        {"plan": {"layers": "blocks-2", "redraw": True, "others": "skip"}, "prune": {"keep": 1.0}},
    ),
    "fedcr": Method("stochastic code, own head, class Gaussians exchanged (Zhang et al., ICML 2023)", FEDCR),
    "fedcr-opu2": Method("FedCR under FedP3's plan of two hidden layers", _coded("opu2+1")),
    "fedcr-opu3": Method("FedCR under FedP3's plan of three hidden layers", _coded("opu3+1")),
    "fedavg-fp16": Method("FedAvg, uploads in half precision", _with(WHOLE, upload={"compress": "fp16"})),
    "fedavg-int8": Method("FedAvg, uploads in 8 bits, rounded by chance", _with(WHOLE, upload={"compress": "int8"})),
    "fedavg-topk": Method(
        "FedAvg, the largest hundredth of every upload, the rest remembered (Stich et al., 2018)",
        _with(WHOLE, upload={"compress": "topk"}),
    ),
    "fedavg-layer": Method(
        "FedAvg, but a random layer of each client and round comes back, with the head",
        _with(WHOLE, plan={"layers": "random-1", "redraw": True}),
    ),
    "fedavgm": Method(
        "FedAvg with momentum on the server (Hsu et al., 2019)", _with(WHOLE, aggregate={"server": "momentum"})
    ),
    "fedadam": Method(
        "FedAvg with Adam on the server (Reddi et al., 2021)",
        _with(WHOLE, aggregate={"server": "adam", "server_lr": 0.01}),
    ),
    "scaffold": Method(
        "control variates against client drift, twice the bytes (Karimireddy et al., 2020)",
        _with(WHOLE, aggregate={"rule": "simple"}, hooks={"exchange": "scaffold"}),
    ),
}  # fmt: skip
