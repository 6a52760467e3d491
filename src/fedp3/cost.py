"""What a plan costs, before anything is trained: parameters and bytes; `work` has FLOPs and memory.

Bytes are exact: they equal the payload that `codec` writes.  Two conventions of counting parameters: `true`
(everything that is trained) and `paper` (convolutions with bias, fully connected layers without), under which the
paper's tables and its 10815.25 %, 57.93 % and 74.73 % come out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedp3.codec import mask_bytes, wire_bytes
from fedp3.lookup import pick
from fedp3.prune import SELECTORS, cut_weights, kept_together, kept_weights, units_left
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
                kept = round(numel * block_share(n, units, layers))
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


def block_share(name: str, units: Mapping[Group, int], layers: LayerMap) -> float:
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
                share = 1.0 if whole else block_share(n, units, layers)
                total += chosen[n] if n in chosen else round(numel * share)
    return total
