"""Published weights: what clients hold copies of, so that only coded changes are sent down.

The server publishes weights R.  A layer whose weights W changed gets a new version: for each of its
tensors the coded change c of W - R is published, and R <- R + c.  What the code lost stays in W - R
and is sent with the next change, so that errors do not pile up.  Every client that knows R, by the
copy that it holds and the changes since, knows it to the bit; it starts training there, and uploads
its change against it.

A client that missed several changes of a tensor is sent all of them, or a copy, whichever is
shorter.  A client that holds only some coordinates of a tensor is sent their changes, and the
weights of coordinates that it did not hold before.  R has only values that the type of a copy can
hold, so that a copy is exact.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.randomness import Stream, stream
from fedp3.core.types import (
    ClientPlan,
    Download,
    Layer,
    LayerMap,
    Mask,
    Masks,
    Params,
    TensorDownload,
)
from fedp3.messages import tensor_code
from fedp3.messages.compression import DownloadSettings, compressor_of
from fedp3.messages.compressors import pack_tensor, value_of
from fedp3.messages.framing import Reader

COPY_TYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}
HALF_MOST = torch.finfo(torch.float16).max
Changes = Mapping[str, Tensor]  # tensor -> the bytes of its coded change, as uint8


@dataclass(frozen=True, slots=True)
class Holding:
    """What one client holds of the published weights.

    Args:
        versions: of each layer.
        masks: for each tensor that it holds, which coordinates.
    """

    versions: Mapping[Layer, int]
    masks: Mapping[str, Mask]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """All that the server has published, and who holds what of it.

    Args:
        R: the published weights.
        versions: the number of changes of each layer.
        changes: the newest changes of each layer, oldest first; together they are at most as long
            as a copy, because beyond that a copy is sent.
        held: what each client holds; a client that is not named holds `initial`.
        initial: what a client holds that never took part; None if it holds nothing.
    """

    R: Params
    versions: Mapping[Layer, int]
    changes: Mapping[Layer, tuple[Changes, ...]]
    held: Mapping[int, Holding | None] = field(default_factory=dict)
    initial: Holding | None = None

    def holding(self, client: int) -> Holding | None:
        """What a client holds; None if it holds nothing."""
        return self.held.get(client, self.initial)


def is_coded(settings: DownloadSettings) -> bool:
    """Whether changes of published weights are sent, instead of weights in every round."""
    return settings.compress != "none"


def begin(W: Params, layers: LayerMap, settings: DownloadSettings, *, known: bool) -> Published:
    """The published weights before the first round: W_0.

    Args:
        W: W_0.
        layers: the model's layers.
        settings: the run's `[download]`.
        known: every client can make W_0 itself, from the config and its seed.
    """
    versions = dict.fromkeys(layers.layers, 0)
    initial = Holding(versions, dict.fromkeys(layers.shapes)) if known else None
    return Published(
        R=published_values(W, layers, settings),
        versions=versions,
        changes=dict.fromkeys(layers.layers, ()),
        initial=initial,
    )


def published_values(W: Params, layers: LayerMap, settings: DownloadSettings) -> Params:
    """The nearest weights that a copy can hold; running statistics stay as they are."""
    return {n: w if n in layers.buffers else _as_copied(w, settings) for n, w in W.items()}


def _as_copied(w: Tensor, settings: DownloadSettings) -> Tensor:
    if settings.copy == "fp16":
        w = w.clamp(-HALF_MOST, HALF_MOST).half().float()
    return w + 0.0  # turns -0.0 into 0.0, which is all that a scattered value can become


def apply_change(r: Tensor, change: Tensor, settings: DownloadSettings) -> Tensor:
    """The next version of published weights; server and clients compute it alike, to the bit."""
    return _as_copied(r + change, settings)


# --------------------------------------------------------------------------- the server publishes


def publish(
    published: Published,
    W: Params,
    changed: Collection[Layer],
    layers: LayerMap,
    settings: DownloadSettings,
    seed: int,
    t: int,
) -> Published:
    """Publish new versions of layers.

    Args:
        published: what was published before.
        W: the server's weights.
        changed: the layers whose weights changed.
        layers: the model's layers.
        settings: the run's `[download]`.
        seed: the run's seed.
        t: the round after which they are published, from 0.
    """
    R, versions, changes = dict(published.R), dict(published.versions), dict(published.changes)
    rng = stream(seed, Stream.PUBLISH, t)
    for l in layers.layers:
        if l not in changed:
            continue
        new: dict[str, Tensor] = {}
        for n in layers.layers[l]:
            compressor = compressor_of(n, layers, settings)
            if compressor is None:
                R[n] = W[n]
                continue
            sent, scale = pack_tensor(W[n] - R[n], None, compressor, settings.share, rng)
            R[n] = apply_change(R[n], value_of(sent, scale), settings)
            data = tensor_code.encode(sent, scale, None, compressor, settings)
            new[n] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        versions[l] += 1
        changes[l] = _newest((*changes[l], new), copy_bytes_of(layers.layers[l], layers, settings))
    return replace(published, R=R, versions=versions, changes=changes)


def _newest(changes: Sequence[Changes], limit: int) -> tuple[Changes, ...]:
    """The newest changes that together are at most as long as a copy."""
    total, first = 0, len(changes)
    while first > 0:
        total += sum(data.numel() for data in changes[first - 1].values())
        if total > limit:
            break
        first -= 1
    return tuple(changes[first:])


def copy_bytes_of(names: Sequence[str], layers: LayerMap, settings: DownloadSettings) -> int:
    """Bytes of a copy of these tensors, dense."""
    return sum(copy_bytes(n, torch.Size(layers.shapes[n]).numel(), layers, settings) for n in names)


def copy_bytes(name: str, count: int, layers: LayerMap, settings: DownloadSettings) -> int:
    """Bytes of a copy of this many coordinates of one tensor."""
    return copy_type(name, layers, settings).itemsize * count


def copy_type(name: str, layers: LayerMap, settings: DownloadSettings) -> torch.dtype:
    """The type of a tensor's values in a copy; running statistics are never rounded."""
    return torch.float32 if name in layers.buffers else COPY_TYPES[settings.copy]


# --------------------------------------------------------------------------- what a client is sent


def download_of(
    published: Published,
    plan: ClientPlan,
    masks: Masks,
    layers: LayerMap,
    unfed_columns: str,
    settings: DownloadSettings,
    mask_bytes: int,
) -> Download:
    """How one client is sent the published weights that its plan needs.

    Args:
        published: what was published, with what the client holds.
        plan: the client's plan.
        masks: its masks.
        layers: the model's layers.
        unfed_columns: the run's `prune.unfed_columns`.
        settings: the run's `[download]`.
        mask_bytes: of the masks that it cannot derive.
    """
    holding = published.holding(plan.client)
    tensors: dict[str, TensorDownload] = {}
    total = mask_bytes
    for n, (l, needed) in sent_masks(plan, masks, layers, unfed_columns).items():
        size = copy_bytes(n, M.count(needed, layers.shapes[n]), layers, settings)
        tensors[n] = TensorDownload(copied=True)
        part = _missed_changes(published, holding, n, l, needed, layers)
        if part is not None and (changed := _changes_bytes(part, n, layers, settings)) <= size:
            tensors[n], size = part, changed
        total += size
    return Download(tensors, total)


def sent_masks(
    plan: ClientPlan, masks: Masks, layers: LayerMap, unfed_columns: str
) -> dict[str, tuple[Layer, Mask]]:
    """The tensors that a client needs, each with its layer and the coordinates."""
    return {
        n: (l, M.sent(n, l, plan, masks, layers, unfed_columns))
        for l, p in plan.layers.items()
        if p.send in ("dense", "pruned")
        for n in layers.layers[l]
    }


def _missed_changes(
    published: Published,
    holding: Holding | None,
    n: str,
    l: Layer,
    needed: Mask,
    layers: LayerMap,
) -> TensorDownload | None:
    """The changes of a tensor that a client missed; None if it cannot be sent changes."""
    if holding is None or n not in holding.masks:
        return None
    missed = published.versions[l] - holding.versions[l]
    recent = published.changes[l]
    if missed > len(recent) or (missed and n not in recent[-1]):
        return None
    common, fresh = overlap(needed, holding.masks[n], layers.shapes[n])
    changes = tuple(change[n] for change in recent[len(recent) - missed :])
    return TensorDownload(copied=False, changes=changes, common=common, fresh=fresh)


def overlap(needed: Mask, held: Mask, shape: tuple[int, ...]) -> tuple[Mask, Tensor | None]:
    """The needed coordinates that are held, and those that are not; None if there are none."""
    if held is None or M.same(needed, held, shape):
        return needed, None
    all_needed, all_held = M.as_bool(needed, shape), M.as_bool(held, shape)
    return all_needed & all_held, all_needed & ~all_held


def _changes_bytes(
    part: TensorDownload, n: str, layers: LayerMap, settings: DownloadSettings
) -> int:
    """Bytes of missed changes and fresh coordinates of one tensor."""
    fresh = 0
    if part.fresh is not None:
        fresh = copy_bytes(n, int(part.fresh.count_nonzero()), layers, settings)
    if part.common is None:
        return fresh + sum(change.numel() for change in part.changes)
    compressor, shape = compressor_of(n, layers, settings), layers.shapes[n]
    if settings.entropy and compressor is not None and compressor.packing is not None:
        written = (restricted(data, part.common, n, layers, settings) for data in part.changes)
        return fresh + sum(map(len, written))
    count, rows = M.count(part.common, shape), tensor_code.exchanged_rows(part.common, shape)
    return fresh + len(part.changes) * tensor_code.size(count, rows, compressor, settings)


def restricted(
    data: Tensor, mask: Mask, n: str, layers: LayerMap, settings: DownloadSettings
) -> bytes:
    """The bytes of a published change for some coordinates of a tensor."""
    if mask is None:
        return data.numpy().tobytes()
    compressor = compressor_of(n, layers, settings)
    reader = Reader(memoryview(data.numpy().tobytes()))
    sent, scale = tensor_code.decode(reader, None, layers.shapes[n], compressor, settings)
    return tensor_code.encode(sent, scale, mask, compressor, settings)


# --------------------------------------------------------------------------- who holds what


def with_holders(
    published: Published,
    accepted: Mapping[int, tuple[ClientPlan, Masks]],
    layers: LayerMap,
    unfed_columns: str,
) -> Published:
    """Who holds what after a round, in which these weights were sent.

    Only a client whose update was accepted is known to hold the current version.  The next task of
    another one refers to its last accepted round, whose copy it still has.

    Args:
        published: what was sent in the round.
        accepted: for each client whose update was accepted, its plan and masks.
        layers: the model's layers.
        unfed_columns: the run's `prune.unfed_columns`.
    """
    held = dict(published.held)
    for i, (plan, masks) in accepted.items():
        needed = sent_masks(plan, masks, layers, unfed_columns)
        held[i] = Holding(published.versions, {n: mask for n, (_, mask) in needed.items()})
    return replace(published, held=held)


# --------------------------------------------------------------------------- the client receives


def read_tensor(
    reader: Reader,
    missed: int,
    needed: Mask,
    held: tuple[Tensor, Mask] | None,
    n: str,
    layers: LayerMap,
    settings: DownloadSettings,
) -> Tensor:
    """The weights of one tensor that a client needs, full-shaped and zero elsewhere.

    Args:
        reader: at the tensor's part of the payload.
        missed: the number of changes in it; -1 if it is a copy.
        needed: the coordinates that the client needs.
        held: the values that the client holds, and their coordinates; None if it holds none.
        n: the tensor.
        layers: the model's layers.
        settings: the run's `[download]`.
    """
    shape, dtype = layers.shapes[n], copy_type(n, layers, settings)
    if missed < 0 or held is None:
        values = reader.values(M.count(needed, shape), dtype).float()
        return tensor_code.full_shaped(values, needed, shape)
    r, mask = held
    compressor = compressor_of(n, layers, settings)
    common, fresh = overlap(needed, mask, shape)
    for _ in range(missed):
        sent, scale = tensor_code.decode(reader, common, shape, compressor, settings)
        r = apply_change(r, value_of(sent, scale), settings)
    r = M.zero_pruned(r, common)
    if fresh is None:
        return r
    values = reader.values(int(fresh.count_nonzero()), dtype).float()
    return r + M.put(values, fresh, shape)
