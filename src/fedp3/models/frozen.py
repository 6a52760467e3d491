"""The frozen part of a network: it is never trained, sent, averaged, coded or counted in traffic.

A frozen tensor is no parameter any more, but a buffer that is not in the state dict.  So it is no
tensor of the layer map, and whatever handles those ignores it.  Memory and FLOPs count it, and its
hash tells whether two sides of a run have the same one.  It is stored once per process: copies of a
network share it, because nothing writes to it.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from fedp3.core.errors import InputError
from fedp3.core.hashing import model_sha256
from fedp3.core.types import Layer

# An attribute of modules: the names of their frozen tensors, and whether these were parameters.
MARK = "_frozen_tensors"
COUNTER = "num_batches_tracked"  # of BatchNorm: no part of a model


def freeze(net: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a copy of the network in which these tensors are frozen.

    It shares frozen parameters with `net`.  Buffers are copied, because trying out a network in
    training mode writes to them.

    Args:
        net: the network, which is not changed.
        names: of parameters and persistent buffers; a tied tensor is frozen under all its names.
    """
    wanted = set(names)
    chosen = {id(w): w for n, w in _tensors(net) if n in wanted}
    if not chosen:
        return net
    # One buffer for each tensor, so that what was tied stays tied.
    buffers = {
        key: w.detach() if isinstance(w, nn.Parameter) else w.clone() for key, w in chosen.items()
    }
    copied = copy.deepcopy(net, {**chosen, **_shared(net)})
    for module in copied.modules():
        _freeze_own(module, buffers)
    return copied


def _freeze_own(module: nn.Module, buffers: Mapping[int, Tensor]) -> None:
    """Freeze the tensors of a module itself that are among these, by identity."""
    own: list[tuple[str, Tensor | None, bool]] = []
    own += [(name, w, True) for name, w in module._parameters.items()]
    own += [(name, w, False) for name, w in module._buffers.items()]
    for name, w, was_parameter in own:
        if id(w) in buffers:
            (module._parameters if was_parameter else module._buffers).pop(name)
            _keep(module, name, buffers[id(w)], was_parameter=was_parameter)


def _tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters(remove_duplicate=False)
    yield from net.named_buffers(remove_duplicate=False)


def freeze_one(module: nn.Module, name: str) -> None:
    """Freeze one parameter of a module, in place."""
    w = module._parameters.pop(name)
    assert w is not None
    _keep(module, name, w.detach(), was_parameter=True)


def _keep(module: nn.Module, name: str, w: Tensor, *, was_parameter: bool) -> None:
    module.register_buffer(name, w, persistent=False)
    setattr(module, MARK, {**frozen_in(module), name: was_parameter})


def frozen_in(module: nn.Module) -> Mapping[str, bool]:
    """The frozen tensors of a module itself, and whether each was a parameter."""
    marked: Mapping[str, bool] = getattr(module, MARK, {})
    return marked


def has_frozen_statistics(module: nn.Module) -> bool:
    """Whether a module has frozen buffers, which it must not update in training."""
    return not all(frozen_in(module).values())


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module itself, frozen ones included."""
    parameters = dict(module.named_parameters(recurse=False))
    frozen = {name: getattr(module, name) for name, was in frozen_in(module).items() if was}
    return {**parameters, **frozen}


def frozen_tensors(net: nn.Module) -> dict[str, Tensor]:
    """The frozen tensors of a network by name; a tied one has several."""
    return {
        f"{path}.{name}" if path else name: getattr(module, name)
        for path, module in net.named_modules()
        for name in frozen_in(module)
    }


def frozen_sha256(net: nn.Module) -> str:
    """The hash of a network's frozen part; empty if it has none."""
    tensors = frozen_tensors(net)
    return model_sha256(tensors) if tensors else ""


def copy_network(net: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy of a network that shares its frozen part, and these tensors, with it."""
    return copy.deepcopy(net, {**_shared(net), **{id(w): w for w in shared}})


def _shared(net: nn.Module) -> dict[int, Tensor]:
    return {id(w): w for w in frozen_tensors(net).values()}


def thaw(net: nn.Module) -> None:
    """Make all frozen tensors parameters and persistent buffers again, in place, as copies."""
    copies: dict[int, Tensor] = {}
    for module in net.modules():
        for name, was_parameter in frozen_in(module).items():
            w = module._buffers.pop(name)
            assert w is not None
            module._non_persistent_buffers_set.discard(name)
            if id(w) not in copies:
                copies[id(w)] = nn.Parameter(w.clone()) if was_parameter else w.clone()
            if was_parameter:
                module.register_parameter(name, copies[id(w)])  # type: ignore[arg-type]
            else:
                module.register_buffer(name, copies[id(w)])
        if frozen_in(module):
            delattr(module, MARK)


# --------------------------------------------------------------------------- names in a config


def tensors_named(
    net: nn.Module, layers: Mapping[Layer, Sequence[str]], names: Iterable[str], where: str
) -> list[str]:
    """The tensors of these layers, modules or single tensors.

    Args:
        net: the network.
        layers: the tensors of each of its layers.
        names: what the user wrote.
        where: the setting, for the error.
    """
    tensors = [n for n in net.state_dict(keep_vars=True) if not n.endswith(COUNTER)]
    roles = _roles(net, layers)
    chosen: dict[str, None] = {}
    for name in names:
        inside = (
            layers.get(name)
            or [n for n in tensors if n == name or n.startswith(f"{name}.")]
            or layers.get(roles.get(name, ""))
        )
        if not inside:
            raise InputError(
                f"{where}: the network has no layer, module or tensor {name!r}; its layers are "
                f"{', '.join(layers)}"
            )
        chosen.update(dict.fromkeys(inside))
    return list(chosen)


def _roles(net: nn.Module, layers: Mapping[Layer, Sequence[str]]) -> dict[str, Layer]:
    """The layers that any network may be asked for: "head", and "embedding" if it has a table."""
    tables = {f"{path}.weight" for path, m in net.named_modules() if isinstance(m, nn.Embedding)}
    embedding = next((l for l, inside in layers.items() if tables & set(inside)), None)
    roles = {"head": list(layers)[-1]} if layers else {}
    return roles | ({"embedding": embedding} if embedding is not None else {})
