"""From any `nn.Module` to named layers and the units that connect them.

The network is traced once (`unit_tracing`), which finds its layers and units.  A network that
cannot be traced still gets layers, in order of registration, and a note with the reason.  The
layers of a transformer are its blocks (`transformer_blocks`).  What is frozen belongs to no layer,
but the others are found as if it did, so that layers have the same names whatever is frozen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedp3.core.errors import InputError
from fedp3.core.types import FrozenTensor, Layer, LayerMap
from fedp3.models.block_kinds import kind_of, known_units
from fedp3.models.buffers import record_initial_values
from fedp3.models.frozen import COUNTER, frozen_tensors, own_weights
from fedp3.models.lora import FOLDED, LoRALinear, folded_apart, lora_modules, rank_units
from fedp3.models.transformer_blocks import block_layers, find_blocks
from fedp3.models.unit_tracing import LAYER_NORMS, ROOT, Trace, trace_units


def layer_map(
    net: nn.Module,
    layers: Mapping[Layer, Sequence[str]] | None = None,
    *,
    sublayers: bool = False,
    heads: bool = False,
) -> LayerMap:
    """Group the tensors of any network into ordered layers.

    Args:
        net: the network; the initial values of its non-persistent buffers are recorded in it.
        layers: the names of the tensors of each layer, instead of the layers that tracing finds.
        sublayers: attention and MLP of a transformer's block are two layers.
        heads: attention heads are units, which structured selectors prune.
    """
    tensors, buffers, aliases = _tensors(net)
    frozen = frozen_tensors(net)
    record_initial_values(net)
    trace, note = trace_units(net)
    _fix_tied(trace, aliases)
    _fix_frozen(trace, frozen)
    blocks = _blocks(net)
    everything = tensors
    if frozen:
        everything = {n: w for n, w in _in_order(net) if n in tensors or n in frozen}
    if layers is not None:
        found = _check_layers(layers, everything, aliases)
    else:
        found = _found(net, everything, trace, sublayers=sublayers)
    found = folded_apart(found, net)
    named = _without(found, frozen)
    axes, units = dict(trace.axes), dict(trace.groups)
    for path, block in blocks.items():
        if any(n.startswith(f"{path}.") for n in frozen):
            continue  # what is frozen is not cut
        known = known_units(path, block, heads=heads)
        if known.groups and all(n in tensors for n in known.axes):
            axes |= known.axes
            units |= known.groups
            note = ""
    layer_of = {name: l for l, names in named.items() for name in names}
    groups = {
        g: replace(group, layer=layer_of[f"{g}.weight"])
        for g, group in units.items()
        if f"{g}.weight" in layer_of and not _in_adapter(net, g)
    }
    axes = {
        name: tuple(axis if axis and axis.group in groups else None for axis in of_tensor)
        for name, of_tensor in axes.items()
        if name in tensors
    }
    rank_groups, rank_axes = rank_units(net, layer_of)
    if rank_groups:
        groups, axes, note = {**groups, **rank_groups}, {**axes, **rank_axes}, ""
    matrices = frozenset(name for name, w in tensors.items() if w.dim() >= 2)
    return LayerMap(
        layers=named,
        shapes={name: tuple(w.shape) for name, w in tensors.items()},
        axes=axes,
        groups=groups,
        prunable=matrices - buffers - _layer_norm_parameters(net),
        buffers=buffers,
        note=note,
        chain=trace.chain,
        aliases=aliases,
        residual=_residual(blocks, named),
        frozen=_places(found, frozen),
        constant=frozenset({FOLDED} & found.keys()) if rank_groups else frozenset(),
    )


def found_layers(net: nn.Module) -> dict[Layer, tuple[str, ...]]:
    """The layers of a network as `layer_map` finds them, but of any network: nothing is refused."""
    tensors = {n: w for n, w in net.state_dict(keep_vars=True).items() if not n.endswith(COUNTER)}
    return _found(net, tensors, trace_units(net)[0])


# --------------------------------------------------------------------------- tensors and layers


def _tensors(net: nn.Module) -> tuple[dict[str, Tensor], frozenset[str], dict[str, str]]:
    """Every tensor of the network that is exchanged, which are buffers, and second names.

    A parameter that is used in two places (tied weights) is one tensor, under the name of the place
    that is registered first.  So an embedding that is also the head belongs to the embedding.
    """
    parameters = dict(net.named_parameters())
    first = {id(w): name for name, w in parameters.items()}
    everywhere = net.named_parameters(remove_duplicate=False)
    aliases = {name: first[id(w)] for name, w in everywhere if name not in parameters}
    tensors = {
        name: w
        for name, w in net.state_dict().items()
        if not name.endswith(COUNTER) and name not in aliases
    }
    _refuse(
        [name for name, w in parameters.items() if is_lazy(w)],
        "have no shape yet; run one batch through the network",
    )
    _refuse(
        _tied(net, tensors),
        "share storage with others of the network and are not the same parameter; assign one "
        "nn.Parameter to both places, or untie them",
    )
    _refuse(
        [name for name, w in tensors.items() if w.dtype != torch.float32],
        "are not float32, the only type that can be averaged here; call net.float() first",
    )
    _refuse(
        [name for name, w in tensors.items() if _has_values(w) and not bool(w.isfinite().all())],
        "contain NaN or infinity, and every update with them would be rejected; to exclude a "
        "constant, such as a mask of -inf, from updates, use "
        "register_buffer(..., persistent=False)",
    )
    if not parameters:
        raise InputError("the network has no parameters to train")
    return tensors, frozenset(name for name in tensors if name not in parameters), aliases


def _in_order(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors by name, module by module, as the state dict of a network has them."""
    for path, module in net.named_modules():
        for table in (module._parameters, module._buffers):
            for name, w in table.items():
                if w is not None:
                    yield f"{path}.{name}" if path else name, w


def _without(
    layers: Mapping[Layer, Sequence[str]], frozen: Mapping[str, Tensor]
) -> dict[Layer, tuple[str, ...]]:
    """The layers that have tensors which are not frozen, with those."""
    left = {l: tuple(n for n in names if n not in frozen) for l, names in layers.items()}
    return {l: names for l, names in left.items() if names}


def _places(
    layers: Mapping[Layer, Sequence[str]], frozen: Mapping[str, Tensor]
) -> dict[str, FrozenTensor]:
    """Where each frozen tensor is among the layers.

    Args:
        layers: the layers in order of execution, frozen tensors included.
        frozen: the frozen tensors.
    """
    places, begun, seen = {}, 0, set()
    for l, names in layers.items():
        trained = [n for n in names if n not in frozen]
        first = names.index(trained[0]) if trained else len(names)
        for j, n in enumerate(names):
            if n in frozen:
                w, after = frozen[n], begun + (j > first)
                layer = l if trained else ""
                places[n] = FrozenTensor(
                    shape=tuple(w.shape), layer=layer, after=after, tied=id(w) in seen
                )
                seen.add(id(w))
        begun += bool(trained)
    return places


def _fix_frozen(trace: Trace, frozen: Mapping[str, Tensor]) -> None:
    """Fix the units that a frozen tensor has: networks without some of them would need copies."""
    for name in trace.axes.keys() & frozen.keys():
        for axis in trace.axes[name]:
            if axis is not None:
                trace.fix_group(axis.group, f"{name} is frozen")


def _refuse(names: Sequence[str], reason: str) -> None:
    if names:
        raise InputError(f"tensors {sorted(names)} {reason}")


def _has_values(w: Tensor) -> bool:
    return not is_lazy(w) and w.device.type != "meta"


def _tied(net: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensors that are another tensor of the network under a second name."""
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    tied = set(tensors) - parameters.keys() - buffers.keys()
    places = set()
    for name, w in tensors.items():
        if _has_values(w) and w.numel():
            place = (w.untyped_storage().data_ptr(), w.storage_offset())
            if place in places:
                tied.add(name)
            places.add(place)
    return sorted(tied)


def _fix_tied(trace: Trace, aliases: Mapping[str, str]) -> None:
    """Fix the units around a tensor that is used in two places, which would need two masks."""
    for pair in aliases.items():
        for name in pair:
            for axis in trace.axes.get(name, ()):
                if axis is not None:
                    trace.fix_group(axis.group, f"{pair[1]} is used in two places")


def _residual(
    blocks: Mapping[str, nn.Module], named: Mapping[Layer, Sequence[str]]
) -> dict[str, tuple[Layer, ...]]:
    """The blocks of known kinds, all of which are residual, with their layers.

    A block is among them if layers do not extend beyond it.
    """
    residual = {}
    for path, block in blocks.items():
        inside = tuple(
            l for l, names in named.items() if any(n.startswith(f"{path}.") for n in names)
        )
        entirely = all(n.startswith(f"{path}.") for l in inside for n in named[l])
        if kind_of(block) is not None and inside and entirely:
            residual[path] = inside
    return residual


def _check_layers(
    layers: Mapping[Layer, Sequence[str]],
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> dict[Layer, tuple[str, ...]]:
    """The user's layers, if they name every tensor exactly once."""
    # A second name may be left out or named, in the layer of the first or elsewhere.
    layers = {l: [n for n in names if n not in aliases] for l, names in layers.items()}
    given = [name for names in layers.values() for name in names]
    problems = {
        "missing": set(tensors) - set(given),
        "not in the network": set(given) - set(tensors),
        "given twice": {name for name in given if given.count(name) > 1},
        "layers without tensors": {l for l, names in layers.items() if not names},
    }
    for problem, names in problems.items():
        if names:
            listed = ", ".join(sorted(names))
            raise InputError(f"layers must name every tensor once; {problem}: {listed}")
    return {l: tuple(names) for l, names in layers.items()}


def _layer_norm_parameters(net: nn.Module) -> set[str]:
    """Scales and shifts of layer norms, which look like weights if they have several dimensions."""
    names: set[str] = set()
    for path, module in net.named_modules():
        if isinstance(module, LAYER_NORMS):
            names.update(f"{path}.{name}" if path else name for name in own_weights(module))
    return names


def _blocks(net: nn.Module) -> dict[str, nn.Module]:
    return {path: net.get_submodule(path) for path in find_blocks(net)}


def _found(
    net: nn.Module, tensors: Mapping[str, Tensor], trace: Trace, *, sublayers: bool = False
) -> dict[Layer, tuple[str, ...]]:
    """The layers of a network: blocks of a transformer, otherwise as traced."""
    blocks = _blocks(net)
    if blocks:
        return block_layers(tensors, blocks, sublayers=sublayers)
    return _group(net, tensors, trace)


def _in_adapter(net: nn.Module, path: str) -> bool:
    return isinstance(net.get_submodule(path.rpartition(".")[0]), LoRALinear)


def _whole_adapters(net: nn.Module, trace: Trace) -> Callable[[Layer], Layer]:
    """Let an adapter and the module beside it be one layer; return how their layers are renamed."""
    paths = list(lora_modules(net))

    def whole(layer: Layer) -> Layer:
        return next((p for p in paths if layer.startswith(f"{p}.")), layer)

    trace.layer_of.update({path: whole(layer) for path, layer in trace.layer_of.items()})
    return whole


def _group(
    net: nn.Module, tensors: Mapping[str, Tensor], trace: Trace
) -> dict[Layer, tuple[str, ...]]:
    """Group tensors into layers in order of execution, so that the head is last.

    Layers that the trace did not see come first.
    """
    parameters = dict(net.named_parameters()).keys() | frozen_tensors(net)
    matrices = {name for name, w in tensors.items() if name in parameters and w.dim() >= 2}
    weights = matrices - _layer_norm_parameters(net)
    whole = _whole_adapters(net, trace)
    begins_layer = {name.rpartition(".")[0] for name in weights}
    seen: dict[Layer, list[str]] = {l: [] for l in trace.layer_of.values()}
    unseen: dict[Layer, list[str]] = {}
    last = next(iter(seen), "")
    for name in tensors:
        path = name.rpartition(".")[0]
        layer = trace.layer_of.get(path)
        if not layer:
            layer = whole(path or ROOT) if path in begins_layer or not last else last
        if layer in seen:
            seen[layer].append(name)
        else:
            unseen.setdefault(layer, []).append(name)
        last = layer
    return {l: tuple(names) for l, names in (unseen | seen).items() if names}
