"""Adapters: a pretrained network is frozen, and small matrices beside its weights are trained."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass as plain_dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn

from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.registry import NameIn, Registry
from fedp3.core.settings import STRICT
from fedp3.models.frozen import COUNTER, freeze, freeze_one, tensors_named
from fedp3.models.layer_map import found_layers
from fedp3.models.lora import LoRALinear, is_linear, linear_sizes, lora_modules, put_module

NONE = "none"
HEAD = "head"  # stands for the last layer of any network
# The projections of queries and values, as common networks name them, or the module of all three.
QUERIES_AND_VALUES = (
    "query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "qkv", "c_attn", "query_key_value",
)  # fmt: skip


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRule:
    """How adapters of several clients become one.

    Args:
        freezes_a: A stays as the seed draws it, and only B is trained and exchanged.
        combines: the server combines products B A and not the matrices themselves.
        folds: it adds them to a matrix that is sent beside the adapter, which begins anew.
    """

    freezes_a: bool = False
    combines: bool = False
    folds: bool = False


ADAPTER_RULES: Registry[AdapterRule] = Registry("rule for adapters")
ADAPTER_RULES.add("freeze_a", AdapterRule(freezes_a=True))
ADAPTER_RULES.add("factors", AdapterRule())
ADAPTER_RULES.add("product", AdapterRule(combines=True))
ADAPTER_RULES.add("stack", AdapterRule(combines=True, folds=True))
# (network, settings, tensors that stay frozen, seed) -> the network with adapters
Attach = Callable[[nn.Module, "AdapterSettings", Iterable[str], int], nn.Module]
ADAPTERS: Registry[Attach | None] = Registry("adapter")


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Small matrices that are trained beside the weights of a frozen network."""

    kind: Annotated[str, NameIn(ADAPTERS)] = Field(
        default=NONE,
        description="none, the network itself is trained; lora, every client has the network and "
        "keeps it, and products of two thin matrices are trained and sent",
    )
    rank: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="columns of the thin matrices; prune.keep is then a share of them, so that a "
        "device of keep = 0.25 has rank 2 of 8",
    )
    targets: tuple[str, ...] = Field(
        default=(),
        description="linear modules that get an adapter: their names, ends of names or patterns "
        "such as '*.fc?'; [] means the projections of queries and values",
    )
    rule: Annotated[str, NameIn(ADAPTER_RULES)] = Field(
        default="freeze_a",
        description="freeze_a, A stays as the seed draws it and B is averaged, which is exact; "
        "factors, A and B are averaged separately; product, the products B A are averaged, and "
        "the mean is cut back to the rank by a singular value decomposition; stack, the mean of "
        "the products is added to the weights as it is, and A and B begin anew",
    )
    scale: float = Field(
        default=2.0, gt=0, description="factor of the product B A, often written as alpha / rank"
    )
    train: tuple[str, ...] = Field(
        default=(HEAD,),
        description="layers or modules that are trained themselves beside the adapters; 'head' is "
        "the last layer",
    )


NO_ADAPTER = AdapterSettings()


def with_adapters(
    net: nn.Module, settings: AdapterSettings, frozen: Iterable[str], seed: int
) -> nn.Module:
    """Return the network that clients train.

    Args:
        net: the network, which is not changed; the result shares what is frozen with it.
        settings: the adapters.
        frozen: the tensors that the user wants frozen in any case.
        seed: of the run, which determines the initial matrices.
    """
    attach = ADAPTERS.pick(settings.kind)
    return freeze(net, frozen) if attach is None else attach(net, settings, frozen, seed)


def _with_lora(
    net: nn.Module, settings: AdapterSettings, frozen: Iterable[str], seed: int
) -> nn.Module:
    layers, rule = found_layers(net), ADAPTER_RULES.pick(settings.rule)
    head = list(layers)[-1]
    named = [head if name == HEAD and HEAD not in layers else name for name in settings.train]
    trained = set(tensors_named(net, layers, named, "[adapter] train")) - set(frozen)
    targets = _targets(net, settings)
    for path in targets:
        _check_target(path, net.get_submodule(path), settings.rank, trained)
    names = [n for n in net.state_dict(keep_vars=True) if not n.endswith(COUNTER)]
    adapted = freeze(net, [n for n in names if n not in trained])
    for j, path in enumerate(targets):
        with layers_draw_from(stream(seed, Stream.ADAPTER, j)):
            base = adapted.get_submodule(path)
            adapter = LoRALinear(base, settings.rank, settings.scale, folds=rule.folds)
        put_module(adapted, path, adapter)
        if rule.freezes_a:
            freeze_one(adapter.a, "weight")
    return adapted


ADAPTERS.add(NONE, None)
ADAPTERS.add("lora", _with_lora)


def _targets(net: nn.Module, settings: AdapterSettings) -> list[str]:
    """The paths of the modules that get an adapter, in order."""
    if lora_modules(net):
        raise InputError("[adapter] kind: the network has adapters already; pass a plain one")
    linear = [path for path, m in net.named_modules() if path and is_linear(m)]
    patterns = settings.targets or QUERIES_AND_VALUES
    unused = [p for p in settings.targets if not any(_matches(path, p) for path in linear)]
    chosen = [path for path in linear if any(_matches(path, p) for p in patterns)]
    if unused or not chosen:
        wanted = ", ".join(map(repr, unused)) or "like a projection of queries or values"
        raise InputError(
            f"[adapter] targets: no linear module is named {wanted}; the network has "
            f"{_summary(linear)}"
        )
    return chosen


def _matches(path: str, pattern: str) -> bool:
    return path == pattern or path.endswith(f".{pattern}") or fnmatchcase(path, pattern)


def _summary(paths: Sequence[str]) -> str:
    """The names of modules without the numbers of their blocks, which may be many."""
    names = []
    for *blocks, last in (path.split(".") for path in paths):
        names.append(".".join(["*" if part.isdigit() else part for part in blocks] + [last]))
    return ", ".join(dict.fromkeys(names)) or "none"


def _check_target(path: str, m: nn.Module, rank: int, trained: set[str]) -> None:
    inputs, outputs = linear_sizes(m)
    if rank > min(inputs, outputs):
        raise InputError(
            f"[adapter] rank: {rank} is above the width of {path}, which has {inputs} inputs and "
            f"{outputs} outputs; use at most {min(inputs, outputs)}, or other targets"
        )
    if f"{path}.weight" in trained:
        raise InputError(
            f"[adapter] targets: {path} is trained itself ([adapter] train), and needs no adapter; "
            "leave it out of one of them"
        )
