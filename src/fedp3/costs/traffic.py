"""Parameters and bytes of a plan, before anything is trained.

Bytes are exact: they equal the payload that `fedp3.messages.codec` writes.  With an entropy code
they are an upper bound.  Where coded changes are sent down, they depend on what a client holds:
`Traffic.down` is for a client that missed one change of every layer, `Traffic.copy` for one that
holds nothing; no client is ever sent more than a copy.

Parameters are counted in one of two conventions.  `true` counts everything that is trained.
`paper` counts convolutions with their biases and fully connected layers without them; it yields
the paper's tables and its 10815.25 %, 57.93 % and 74.73 %.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedp3.core.registry import pick
from fedp3.core.types import ClientPlan, Group, Layer, LayerMap, LayerPlan, Params
from fedp3.messages import tensor_code
from fedp3.messages.compression import (
    PLAIN_DOWNLOAD,
    UNCOMPRESSED,
    DownloadSettings,
    UploadSettings,
    coding_of,
    compressor_of,
)
from fedp3.messages.mask_code import mask_bytes
from fedp3.messages.versions import copy_bytes, is_coded
from fedp3.planning.prune_settings import SELECTORS, PruneSettings
from fedp3.planning.pruning import pruned_tensors, retained_across_tensors, units_left
from fedp3.planning.selectors import retained_weights

VALUE = 4  # bytes of a float32

# --------------------------------------------------------------------------- parameters


def _is_trained(name: str, layers: LayerMap) -> bool:
    return name not in layers.buffers


def _is_counted_by_paper(name: str, layers: LayerMap) -> bool:
    weight_shape = layers.shapes.get(name.removesuffix("bias") + "weight", ())
    is_linear_bias = name.endswith("bias") and len(weight_shape) == 2
    return name not in layers.buffers and not is_linear_bias


# Convention -> whether a tensor counts.
CONVENTIONS: Mapping[str, Callable[[str, LayerMap], bool]] = {
    "true": _is_trained,
    "paper": _is_counted_by_paper,
}


def sizes(layers: LayerMap, convention: str = "true") -> dict[Layer, int]:
    """The number of parameters of each layer."""
    counts = pick(CONVENTIONS, convention, "convention")
    return {
        l: sum(math.prod(layers.shapes[n]) for n in names if counts(n, layers))
        for l, names in layers.layers.items()
    }


def spread(values: Sequence[float]) -> float:
    """How much larger the largest value is than the smallest, in percent: the paper's "ratio"."""
    return 100 * (max(values) - min(values)) / min(values)


def communication_by_layer(layers: LayerMap, convention: str = "paper") -> dict[Layer, int]:
    """For each hidden layer: the parameters uploaded by a client that trains it and the head."""
    size = sizes(layers, convention)
    return {l: size[l] + size[layers.head] for l in layers.hidden}


def deployed_by_layer(
    layers: LayerMap, keep: float, convention: str = "paper"
) -> dict[Layer, float]:
    """For each hidden layer: the parameters stored by a client that trains it and the head.

    The client's other layers are pruned to the share `keep`.
    """
    total = sum(sizes(layers, convention).values())
    dense = communication_by_layer(layers, convention)
    return {l: count + keep * (total - count) for l, count in dense.items()}


def reductions(
    plans: Sequence[ClientPlan], layers: LayerMap, convention: str = "true"
) -> dict[str, float]:
    """Communication saved against dense FedAvg, in percent, counted in four ways.

    The keys are layers_up, layers_up_down, parameters_up and parameters_up_down: what is counted,
    and in which directions.
    """
    weights: Mapping[str, Mapping[Layer, int]] = {
        "layers": dict.fromkeys(layers.layers, 1),
        "parameters": sizes(layers, convention),
    }
    saved = {}
    for unit, size in weights.items():
        total = sum(size.values()) * len(plans)
        up = sum(size[l] * share_up(p) for plan in plans for l, p in plan.layers.items())
        down = sum(size[l] * share_down(p) for plan in plans for l, p in plan.layers.items())
        saved[f"{unit}_up"] = 100 * (1 - up / total)
        saved[f"{unit}_up_down"] = 100 * (1 - (up + down) / (2 * total))
    return saved


def share_up(p: LayerPlan) -> float:
    """The share of a layer that a client uploads."""
    return {"all": 1.0, "zeros": 1.0, "retained": p.keep, "none": 0.0}[p.upload]


def share_down(p: LayerPlan) -> float:
    """The share of a layer that a client is sent."""
    return {"dense": 1.0, "pruned": p.keep, "none": 0.0, "skip": 0.0}[p.send]


# --------------------------------------------------------------------------- bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Payload bytes of one client in one round, without framing and evaluation."""

    down: int
    up: int
    masks: int  # the part of `down` that is masks
    copy: int  # what a client is sent that holds nothing; as `down` where no changes are sent


def traffic(
    plan: ClientPlan,
    layers: LayerMap,
    pruning: PruneSettings,
    compression: UploadSettings = UNCOMPRESSED,
    download: DownloadSettings = PLAIN_DOWNLOAD,
) -> Traffic:
    """Bytes of a plan, equal to what the codec writes; a method's tensors are not counted."""
    by_layer = traffic_by_layer(plan, layers, pruning, compression, download).values()
    return Traffic(
        down=sum(t.down for t in by_layer),
        up=sum(t.up for t in by_layer),
        masks=sum(t.masks for t in by_layer),
        copy=sum(t.copy for t in by_layer),
    )


def exchange_bytes(extra: Params) -> int:
    """Bytes of a method's own tensors, which have the same shapes in both directions."""
    return VALUE * sum(w.numel() for w in extra.values())


def traffic_by_layer(
    plan: ClientPlan,
    layers: LayerMap,
    pruning: PruneSettings,
    compression: UploadSettings = UNCOMPRESSED,
    download: DownloadSettings = PLAIN_DOWNLOAD,
) -> dict[Layer, Traffic]:
    """The bytes of each layer; a mask over units counts for the layer whose outputs they are.

    Where weights are chosen across tensors, only the sum over the layers is exact.
    """
    compression = coding_of(plan, compression)
    units = unit_counts(plan, layers, pruning)
    weights, weight_mask_bytes = weight_counts(plan, layers, pruning)
    unit_mask_bytes = _unit_mask_bytes(units, layers, pruning)
    by_layer = {}
    for l, p in plan.layers.items():
        down = up = copy = 0
        masks = unit_mask_bytes.get(l, 0)
        for n in layers.layers[l]:
            everything, retained = _extents(n, units, weights.get(n), layers)
            dense = everything if pruning.unfed_columns == "vote" else retained
            if p.send in ("dense", "pruned"):
                sent = {"dense": dense, "pruned": retained}[p.send]
                down += _down_bytes(n, sent, layers, download)
                copy += _copy_bytes(n, sent, layers, download)
            if p.upload != "none":
                uploaded = {"all": dense, "retained": retained, "zeros": everything}[p.upload]
                compressor = compressor_of(n, layers, compression)
                up += tensor_code.size(uploaded.count, uploaded.rows, compressor, compression)
            masks += weight_mask_bytes.get(n, 0)
        by_layer[l] = Traffic(down=down + masks, up=up, masks=masks, copy=copy + masks)
    return by_layer


@dataclass(frozen=True, slots=True)
class _Extent:
    """How many coordinates of a tensor are exchanged, and over how many rows they lie."""

    count: int
    rows: int


def _extents(
    n: str, units: Mapping[Group, int], weights: int | None, layers: LayerMap
) -> tuple[_Extent, _Extent]:
    """A tensor in full, and what is retained of it."""
    shape = layers.shapes[n]
    rows = tensor_code.exchanged_rows(None, shape)
    everything = _Extent(math.prod(shape), rows)
    if not units:
        return everything, _Extent(everything.count if weights is None else weights, rows)
    axes = layers.axes.get(n, ())
    if rows > 1 and axes and axes[0] is not None and axes[0].group in units:
        rows = rows // layers.groups[axes[0].group].units * units[axes[0].group]
    return everything, _Extent(round(everything.count * block_share(n, units, layers)), rows)


def _down_bytes(n: str, sent: _Extent, layers: LayerMap, download: DownloadSettings) -> int:
    """Bytes of a tensor for a client that missed one change of it."""
    if not is_coded(download):
        return VALUE * sent.count
    changed = tensor_code.size(sent.count, sent.rows, compressor_of(n, layers, download), download)
    return min(changed, _copy_bytes(n, sent, layers, download))


def _copy_bytes(n: str, sent: _Extent, layers: LayerMap, download: DownloadSettings) -> int:
    return copy_bytes(n, sent.count, layers, download) if is_coded(download) else VALUE * sent.count


def _unit_mask_bytes(
    units: Mapping[Group, int], layers: LayerMap, pruning: PruneSettings
) -> dict[Layer, int]:
    """The bytes of each layer's masks over units; none where clients derive them."""
    masks: dict[Layer, int] = {}
    if SELECTORS.pick(pruning.selector).derivable:
        return masks
    for g, count in units.items():
        group = layers.groups[g]
        masks[group.layer] = masks.get(group.layer, 0) + mask_bytes(group.units, count)
    return masks


def weight_counts(
    plan: ClientPlan, layers: LayerMap, pruning: PruneSettings
) -> tuple[dict[str, int], dict[str, int]]:
    """Retained weights and mask bytes of each tensor that an unstructured selector prunes."""
    selector = SELECTORS.pick(pruning.selector)
    shares = pruned_tensors(plan, layers) if selector.weights is not None else {}
    numels = {n: math.prod(layers.shapes[n]) for n in shares}
    if selector.across_tensors and shares:
        retained = retained_across_tensors(shares, numels)
        counts = _in_proportion(retained, numels)
        masks = _in_proportion(mask_bytes(sum(numels.values()), retained), numels)
    else:
        counts = {n: retained_weights(share, numels[n]) for n, share in shares.items()}
        masks = {n: mask_bytes(numels[n], count) for n, count in counts.items()}
    return counts, {} if selector.derivable else masks


def _in_proportion(total: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Integers that add up to `total`, as near to the proportions of `sizes` as possible."""
    everything = sum(sizes.values())
    portions = {}
    begin = 0
    for n, size in sizes.items():
        end = begin + size
        portions[n] = total * end // everything - total * begin // everything
        begin = end
    return portions


def unit_counts(plan: ClientPlan, layers: LayerMap, pruning: PruneSettings) -> dict[Group, int]:
    """How many units a structured selector retains in each group that it prunes."""
    selector = SELECTORS.pick(pruning.selector)
    if selector.units is None:
        return {}
    counts = {}
    for g, group in layers.groups.items():
        p = plan.layers[group.layer]
        if p.send == "pruned" and p.keep < 1 and not group.fixed:
            counts[g] = units_left(selector, plan, group)
    return counts


def block_share(name: str, units: Mapping[Group, int], layers: LayerMap) -> float:
    """The share of a tensor that remains with these numbers of units."""
    share = 1.0
    for axis in layers.axes.get(name, ()):
        if axis is not None and axis.group in units:
            share *= units[axis.group] / layers.groups[axis.group].units
    return share


def retained_parameters(plan: ClientPlan, layers: LayerMap, pruning: PruneSettings) -> int:
    """The number of parameters that a client's model has after pruning."""
    units = unit_counts(plan, layers, pruning)
    weights, _ = weight_counts(plan, layers, pruning)
    total = 0
    for l, p in plan.layers.items():
        if p.send == "skip":
            continue
        dense = p.send == "dense" and pruning.unfed_columns == "vote"
        for n in layers.layers[l]:
            if n in layers.buffers:
                continue
            numel = math.prod(layers.shapes[n])
            share = 1.0 if dense else block_share(n, units, layers)
            total += weights.get(n, round(numel * share))
    return total
