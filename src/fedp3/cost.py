"""What a plan costs, before anything is trained: parameters, FLOPs, memory, bytes.

Bytes are exact: they equal the payload that `codec` writes.  Two conventions of counting parameters: `true`
(everything that is trained) and `paper` (convolutions with bias, fully connected layers without), under which the
paper's tables and its 10815.25 %, 57.93 % and 74.73 % come out.
"""

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedp3 import submodel
from fedp3.codec import mask_bytes, wire_bytes
from fedp3.errors import InputError
from fedp3.lookup import pick
from fedp3.prune import SELECTORS, cut_weights, kept_together, kept_weights, units_left
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.types import AS_IS, ClientPlan, Compression, Group, Layer, LayerMap, LayerPlan, Pruning

VALUE = 4  # bytes of a float32

# --------------------------------------------------------------------------- parameters


def _true(name: str, layers: LayerMap) -> bool:
    return name not in layers.buffers


def _paper(name: str, layers: LayerMap) -> bool:
    weight = layers.shapes.get(name.removesuffix("bias") + "weight", ())
    return name not in layers.buffers and not (name.endswith("bias") and len(weight) == 2)


CONVENTIONS: Mapping[str, Callable[[str, LayerMap], bool]] = {"true": _true, "paper": _paper}


def sizes(layers: LayerMap, convention: str = "true") -> dict[Layer, int]:
    """Parameters of each layer."""
    counts = pick(CONVENTIONS, convention, "convention")
    return {
        l: sum(math.prod(layers.shapes[n]) for n in names if counts(n, layers)) for l, names in layers.layers.items()
    }


def spread(values: Sequence[float]) -> float:
    """How much larger the largest is than the smallest, in percent: the paper's "ratio" of costs."""
    return 100 * (max(values) - min(values)) / min(values)


def communication_by_layer(layers: LayerMap, convention: str = "paper") -> dict[Layer, int]:
    """Parameters uploaded by a client that trains one hidden layer and the head."""
    size = sizes(layers, convention)
    return {l: size[l] + size[layers.head] for l in layers.hidden}


def deployed_by_layer(layers: LayerMap, keep: float, convention: str = "paper") -> dict[Layer, float]:
    """Parameters held by a client that trains one hidden layer and the head, the rest pruned to `keep`."""
    size = sizes(layers, convention)
    whole = {l: size[l] + size[layers.head] for l in layers.hidden}
    return {l: w + keep * (sum(size.values()) - w) for l, w in whole.items()}


def reductions(plans: Sequence[ClientPlan], layers: LayerMap, convention: str = "true") -> dict[str, float]:
    """Communication saved against dense FedAvg, in percent, four ways: {layers, parameters} x {up, up+down}."""
    out = {}
    for unit, size in (("layers", dict.fromkeys(layers.layers, 1)), ("parameters", sizes(layers, convention))):
        total = sum(size.values()) * len(plans)
        up = sum(size[l] * _part_up(p) for plan in plans for l, p in plan.layers.items())
        down = sum(size[l] * _part_down(p) for plan in plans for l, p in plan.layers.items())
        out[f"{unit}_up"] = 100 * (1 - up / total)
        out[f"{unit}_up_down"] = 100 * (1 - (up + down) / (2 * total))
    return out


def _part_up(p: LayerPlan) -> float:
    return {"all": 1.0, "zeros": 1.0, "kept": p.keep, "none": 0.0}[p.upload]


def _part_down(p: LayerPlan) -> float:
    return {"dense": 1.0, "pruned": p.keep, "none": 0.0, "skip": 0.0}[p.send]


# --------------------------------------------------------------------------- bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Payload bytes of one client in one round; framing and evaluation are not in it."""

    down: int
    up: int
    masks: int  # the part of `down` that is masks


def traffic(plan: ClientPlan, layers: LayerMap, pruning: Pruning, compression: Compression = AS_IS) -> Traffic:
    """Bytes from the plan alone, equal to what `codec` writes; a method's own tensors are not in it."""
    each = traffic_by_layer(plan, layers, pruning, compression).values()
    return Traffic(sum(t.down for t in each), sum(t.up for t in each), sum(t.masks for t in each))


def traffic_by_layer(
    plan: ClientPlan, layers: LayerMap, pruning: Pruning, compression: Compression = AS_IS
) -> dict[Layer, Traffic]:
    """The same layer by layer; a mask over units counts where they are written.

    Where weights are chosen among all tensors at once, only the sum over layers is exact.
    """
    selector = pick(SELECTORS, pruning.selector, "selector")
    units = unit_counts(plan, layers, pruning)
    chosen, mask_of = weight_counts(plan, layers, pruning)
    out = {}
    for l, p in plan.layers.items():
        down = up = masks = 0
        for n in layers.layers[l]:
            numel = math.prod(layers.shapes[n])
            kept = chosen.get(n, numel)
            masks += mask_of.get(n, 0)
            if units:
                kept = round(numel * _block_share(n, units, layers))
            whole = numel if pruning.stale == "vote" else kept
            down += VALUE * {"dense": whole, "pruned": kept, "none": 0, "skip": 0}[p.send]
            if p.upload != "none":
                count = {"all": whole, "kept": kept, "zeros": numel}[p.upload]
                up += wire_bytes(n, count, layers, compression)
        if not selector.derivable:
            masks += sum(mask_bytes(u.units, units[g]) for g, u in layers.groups.items() if u.layer == l and g in units)
        out[l] = Traffic(down + masks, up, masks)
    return out


def _cut(p: LayerPlan) -> bool:
    return p.send == "pruned" and p.keep < 1


def weight_counts(plan: ClientPlan, layers: LayerMap, pruning: Pruning) -> tuple[dict[str, int], dict[str, int]]:
    """How many weights an unstructured selector leaves in each tensor it cuts, and what their masks weigh."""
    selector = pick(SELECTORS, pruning.selector, "selector")
    cut = cut_weights(plan, layers) if selector.weights is not None else {}
    sizes = {n: math.prod(layers.shapes[n]) for n in cut}
    if not (selector.together and cut):
        counts = {n: kept_weights(r, sizes[n]) for n, r in cut.items()}
        masks = {n: 0 if selector.derivable else mask_bytes(sizes[n], k) for n, k in counts.items()}
        return counts, masks
    n, k = sum(sizes.values()), kept_together(cut, sizes)
    return _in_proportion(k, sizes), _in_proportion(mask_bytes(n, k), sizes)


def _in_proportion(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Whole numbers that add up to `total`, as near to the proportions of `sizes` as they can be."""
    whole, begin, out = sum(sizes.values()), 0, {}
    for n, size in sizes.items():
        out[n] = total * (begin + size) // whole - total * begin // whole
        begin += size
    return out


def unit_counts(plan: ClientPlan, layers: LayerMap, pruning: Pruning) -> dict[Group, int]:
    """How many units a structured selector leaves in each group it cuts."""
    selector = pick(SELECTORS, pruning.selector, "selector")
    if selector.units is None:
        return {}
    owned = {g: u for g, u in layers.groups.items() if not u.fixed and _cut(plan.layers[u.layer])}
    return {g: units_left(selector, plan, u) for g, u in owned.items()}


def _block_share(name: str, units: Mapping[Group, int], layers: LayerMap) -> float:
    """The share of a tensor that these unit counts leave."""
    share = 1.0
    for axis in layers.axes.get(name, ()):
        if axis is not None and axis.group in units:
            share *= units[axis.group] / layers.groups[axis.group].units
    return share


def held_parameters(plan: ClientPlan, layers: LayerMap, pruning: Pruning) -> int:
    """Parameters of the model a client holds that are not pruned away."""
    units = unit_counts(plan, layers, pruning)
    chosen, _ = weight_counts(plan, layers, pruning)
    total = 0
    for l, p in plan.layers.items():
        for n in layers.layers[l] if p.send != "skip" else ():
            numel = math.prod(layers.shapes[n])
            if n not in layers.buffers:
                whole = p.send == "dense" and pruning.stale == "vote"
                share = 1.0 if whole else _block_share(n, units, layers)
                total += chosen[n] if n in chosen else round(numel * share)
    return total


# --------------------------------------------------------------------------- work and memory


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
                total += work.forward[n] * _block_share(n, units, layers) * (1 + train + passes)
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
