"""What a plan costs to compute: FLOPs and peak memory of a client's step, counted without computing anything."""

import copy
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedp3 import submodel
from fedp3.cost import VALUE, block_share, unit_counts
from fedp3.errors import InputError
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.types import ClientPlan, Group, Layer, LayerMap, Pruning


@dataclass(frozen=True, slots=True)
class Work:
    """What one net costs to run, measured once: on torch's meta device, which computes nothing, where the net can."""

    forward: Mapping[str, int]  # weight tensor -> FLOPs of one example's forward pass
    net: nn.Module  # a copy of its own
    shape: tuple[int, ...]
    device: str = "meta"


def measure(net: nn.Module, shape: tuple[int, ...]) -> Work:
    """Count a forward pass of one example, module by module."""
    why = ""
    for device in ("meta", "cpu"):  # a net that looks at values (data-dependent steps) needs real ones
        bench = copy.deepcopy(net).to(device).eval()
        counter = FlopCounterMode(display=False)
        try:
            with counter, torch.no_grad(), layers_draw_from(stream(0, Use.LAYER)):
                bench(torch.zeros(1, *shape, device=device))
        except Exception as error:  # whatever the user's own forward pass raises
            why = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        return Work(_by_weight(bench, counter), bench, shape, device)
    raise InputError(f"the net does not take one example of shape {shape}: {why}")


def _by_weight(net: nn.Module, counter: FlopCounterMode) -> dict[str, int]:
    """FLOPs of each weight: those of the module that ran it, without its children, shared out by size."""
    total = {path.partition(".")[2]: sum(ops.values()) for path, ops in counter.get_flop_counts().items()}

    def ran(path: str) -> str:
        while path and path not in total:  # a child whose weights its parent uses does not run itself
            path = path.rpartition(".")[0]
        return path

    own = dict(total)
    for path, count in total.items():
        if path:
            own[ran(path.rpartition(".")[0])] -= count
    at = {n: ran(n.rpartition(".")[0]) for n, w in net.named_parameters() if w.dim() >= 2}
    numel = {n: w.numel() for n, w in net.named_parameters() if n in at}
    size = {path: sum(numel[n] for n in at if at[n] == path) for path in at.values()}
    return {n: round(own.get(path, 0) * numel[n] / size[path]) for n, path in at.items()}


def flops(
    work: Work, plan: ClientPlan, layers: LayerMap, pruning: Pruning, left: Mapping[Group, int] | None = None
) -> int:
    """FLOPs of one example's forward and backward pass at this client; `left`: units that local pruning leaves.

    Each weight costs its forward pass, once more for its own gradient if it trains, and once more to pass the
    gradient on if anything below it trains: an earlier layer, or in a layer of several steps an earlier step.
    Units that are cut cost nothing; weights and units that are only masked cost as much as before.
    """
    units = {**unit_counts(plan, layers, pruning), **(left or {})} if submodel.physical(pruning) else {}
    total, below = 0.0, False
    for l in layers.layers:
        if plan.layers[l].send == "skip":
            continue
        train = plan.layers[l].train
        for n in layers.layers[l]:
            if n in work.forward:
                passes = below or (train and l == _reads_from(n, layers))
                total += work.forward[n] * block_share(n, units, layers) * (1 + train + passes)
        below = below or train
    return round(total)


def _reads_from(name: str, layers: LayerMap) -> Layer | None:
    """The layer whose units this weight reads, where that is known."""
    reads = (*layers.axes.get(name, ()), None, None)[1]
    return layers.groups[reads.group].layer if reads is not None and reads.group in layers.groups else None


def peak_bytes(work: Work, plan: ClientPlan, layers: LayerMap, pruning: Pruning, batch: int, momentum: bool) -> int:
    """Memory of a training step at its fullest: weights, momentum, and all that forward and backward keep alive."""
    units = unit_counts(plan, layers, pruning)
    if units and submodel.physical(pruning):  # what is trained is the smaller net
        work = replace(work, net=submodel.shrink_net(work.net, layers, units))
        layers = submodel.shrink_map(layers, units)
    train = {n for l, p in plan.layers.items() if p.train for n in layers.layers[l]} - layers.buffers
    held = sum(math.prod(s) for s in layers.shapes.values())
    trained = sum(math.prod(layers.shapes[n]) for n in train)
    return VALUE * (held + (trained if momentum else 0)) + _alive(work, train, batch)


def _alive(work: Work, train: set[str], batch: int) -> int:
    """The most bytes that are alive at once in a forward and backward pass, the net's own tensors not counted."""
    for n, w in work.net.named_parameters():
        w.requires_grad_(n in train)
    trained = [w for w in work.net.parameters() if w.requires_grad]
    work.net.train()
    alive = _Alive(work.net)
    with layers_draw_from(stream(0, Use.LAYER)), alive:
        logits = work.net(torch.zeros(batch, *work.shape, device=work.device))
        loss = F.cross_entropy(logits, torch.zeros(batch, dtype=torch.int64, device=work.device))
        del logits
        grads = torch.autograd.grad(loss, trained, allow_unused=True) if loss.requires_grad else ()
    work.net.eval()
    del grads  # they are alive to the end
    return alive.most


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the tensors that operations make until they are gone (torch asks for a class here)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = [*net.parameters(), *net.buffers()]
        self.sizes = {w.untyped_storage()._cdata: 0 for w in own}  # storage -> bytes
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.sizes:
                storage = t.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage._cdata)
        return out

    def gone(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)
