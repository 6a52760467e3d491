"""From any `nn.Module` to named layers and the units that connect them.

The net is traced once (`wiring.py`), which finds layers and units.  A net that cannot be traced still gets layers, in
order of registration, and a note.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedp3.errors import InputError
from fedp3.types import Layer, LayerMap
from fedp3.unsaved import remember
from fedp3.wiring import LAYER_NORMS, ROOT, Trace, follow


def layer_map(net: nn.Module, layers: Mapping[Layer, Sequence[str]] | None = None) -> LayerMap:
    """Group the tensors of any net into ordered layers; `layers` (name -> tensors) overrides the grouping."""
    tensors, buffers = _tensors(net)
    remember(net)
    trace, note = follow(net)
    named = _group(net, tensors, trace) if layers is None else _checked(layers, tensors)
    owner = {n: l for l, names in named.items() for n in names}
    groups = {g: replace(u, layer=owner[f"{g}.weight"]) for g, u in trace.groups.items() if f"{g}.weight" in owner}
    return LayerMap(
        layers=named,
        shapes={n: tuple(w.shape) for n, w in tensors.items()},
        axes={n: a for n, a in trace.axes.items() if n in tensors},
        groups=groups,
        prunable=frozenset(n for n, w in tensors.items() if w.dim() >= 2) - buffers - _scales(net),
        buffers=buffers,
        note=note,
    )


# --------------------------------------------------------------------------- tensors and layers


def _tensors(net: nn.Module) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Every tensor of the net that travels, and which of them are buffers."""
    parameters = dict(net.named_parameters())
    tensors = {n: w for n, w in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    for wrong, text in (
        (sorted(n for n, w in parameters.items() if is_lazy(w)), "have no shape yet; run one batch through the net"),
        (_tied(net, tensors), "share storage with others of the net; untie them, or wrap the net"),
        (
            sorted(n for n, w in tensors.items() if w.dtype != torch.float32),
            "are not float32, the only type that can be averaged here",
        ),
        (
            sorted(n for n, w in tensors.items() if _has_values(w) and not bool(w.isfinite().all())),
            "hold NaN or infinity, and every update with them would be refused; a constant, such as a mask of -inf, is "
            "kept out of updates by register_buffer(..., persistent=False)",
        ),
    ):
        if wrong:
            raise InputError(f"tensors {wrong} {text}")
    if not parameters:
        raise InputError("the net has no parameters to train")
    return tensors, frozenset(n for n in tensors if n not in parameters)


def _has_values(w: Tensor) -> bool:
    return not is_lazy(w) and w.device.type != "meta"


def _tied(net: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that are another one of the net under a second name."""
    known = {n for n, _ in net.named_parameters()} | {n for n, _ in net.named_buffers()}
    tied, seen = set(tensors) - known, set()
    for n, w in tensors.items():
        if _has_values(w) and w.numel():
            at = (w.untyped_storage().data_ptr(), w.storage_offset())
            if at in seen:
                tied.add(n)
            seen.add(at)
    return sorted(tied)


def _checked(layers: Mapping[Layer, Sequence[str]], tensors: Mapping[str, Tensor]) -> dict[Layer, tuple[str, ...]]:
    given = [n for names in layers.values() for n in names]
    missing, unknown = sorted(set(tensors) - set(given)), sorted(set(given) - set(tensors))
    twice = sorted({n for n in given if given.count(n) > 1})
    empty = sorted(l for l, names in layers.items() if not names)
    for what, names in (
        ("missing", missing),
        ("not in the net", unknown),
        ("given twice", twice),
        ("layers without tensors", empty),
    ):
        if names:
            raise InputError(f"layers must name every tensor once; {what}: {', '.join(names)}")
    return {l: tuple(names) for l, names in layers.items()}


def _scales(net: nn.Module) -> set[str]:
    """Scales and shifts that may look like weights: those of a LayerNorm over several sides."""
    norms = [(path, m) for path, m in net.named_modules() if isinstance(m, LAYER_NORMS)]
    return {n for path, m in norms for n, _ in m.named_parameters(path, recurse=False)}


def _group(net: nn.Module, tensors: Mapping[str, Tensor], trace: Trace) -> dict[Layer, tuple[str, ...]]:
    """Layer -> tensors: first what the trace did not see, then in order of execution, so that the head is last."""
    weighted = {n for n, w in net.named_parameters() if w.dim() >= 2} - _scales(net)
    begins = {n.rpartition(".")[0] for n in weighted}
    seen: dict[Layer, list[str]] = {l: [] for l in trace.layer_of.values()}
    unseen: dict[Layer, list[str]] = {}
    last = next(iter(seen), "")
    for name in tensors:
        path = name.rpartition(".")[0]
        layer = trace.layer_of.get(path) or (path or ROOT if path in begins or not last else last)
        (seen if layer in seen else unseen).setdefault(layer, []).append(name)
        last = layer
    return {l: tuple(names) for l, names in (unseen | seen).items() if names}
