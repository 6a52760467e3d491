"""Try a network out on made-up records: does it treat each record by itself, and keep nothing?

Types of layers say little about a user's network, so its behaviour is looked at before training.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedp3.client.context import ClientContext
from fedp3.client.objectives import SHIPPED
from fedp3.core.errors import InputError, first_line
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.data.inputs import Inputs, call, chunks, combine, to_device
from fedp3.data.shards import Shard
from fedp3.models.buffers import restored_buffers
from fedp3.privacy.clipping import func_pieces, ghost_agrees
from fedp3.privacy.made_up import made_up_records
from fedp3.privacy.per_record import DROPOUTS, per_record_graph

TRIAL_RECORDS = 3  # made-up records on which a proven network is tried out
TRIAL_SIZES = (2, 3, 4, 5, 8, 13)  # batches on which others are tried out; then each is 1.6 larger
TRIAL_DRAWS = 32  # times that a network which draws at random is tried out on a small batch
TRIAL_SPLITS = 3  # ways in which a batch is cut into changed and unchanged records

Shards = Mapping[int, Shard]


def kept_state(context: ClientContext, shards: Shards) -> Iterator[str]:
    """What a network remembers of one batch reaches the next gradients past clip and noise."""
    net, rng = context.net.train(), stream(context.seed, Stream.LAYER)
    x = _made_up(context, TRIAL_RECORDS)
    with restored_buffers(net), torch.no_grad(), layers_draw_from(rng):
        before = dict(_state(net))
        call(net, x)
        after = dict(_state(net))
    names = sorted(n for n in before.keys() | after if not _same(before.get(n), after.get(n)))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"the network changes its attribute {names[0]}{more} when it computes a batch, and so "
            "can carry records past clip and noise into later steps; let forward store nothing"
        )


def mixed_records(context: ClientContext, shards: Shards) -> Iterator[str]:
    """Records that influence each other have no gradients of their own, so no clip bounds them.

    Some records of a batch are replaced by others, which must not change the outputs of the rest.
    This is repeated for batches of many sizes, up to the largest that a step can compute at once.
    A network that draws at random is tried out under many draws, most of them on small batches.
    """
    net = context.net.train()
    example = _made_up(context, 1)
    proven = isinstance(example, Tensor) and per_record_graph(net, example) is not None
    for size in (TRIAL_RECORDS,) if proven else _trial_sizes(_largest_batch(context, shards)):
        reason = _mixing(context, net, size)
        if reason:
            yield reason
            return


def uses_ghost(context: ClientContext) -> bool:
    """Whether ghost clipping covers every way in which this network uses its tensors in training.

    Ghost clipping shows whole batches to the network, `torch.func` shows single records.  So only
    a network whose graph provably computes record by record may use ghost clipping, and only with
    losses that are known to do so too.
    """
    net = context.net
    x = _made_up(context, TRIAL_RECORDS)
    # Targets of the data: made-up ones might be padding only, or no class at all.
    data, loss = context.data, context.objective.loss
    y = data.y[torch.arange(TRIAL_RECORDS) % len(data.y)].to(context.device)
    W = dict(net.named_parameters())
    required_grad = {n: p.requires_grad for n, p in W.items()}
    net.train().requires_grad_(True)
    try:
        with layers_draw_from(stream(context.seed, Stream.LAYER)):
            with _without_dropout(net):
                if context.objective in SHIPPED and ghost_agrees(net, x, y, W, loss):
                    return True
            func_pieces(net, x, y, W, {}, loss)
    except Exception as error:  # torch.func raises many kinds
        reason = (
            "torch.func cannot compute per-example gradients of this network: "
            f"{type(error).__name__}: {first_line(error)}; models of transformers are computed so "
            "if they are read from a folder with model.name = 'hf'"
        )
        raise InputError(f"LDP refused: {reason}") from None
    finally:
        for n, p in W.items():
            p.requires_grad_(required_grad[n])
    return False


def _mixing(context: ClientContext, net: nn.Module, size: int) -> str:
    """Why the network does not compute batches of this size record by record; empty if it does."""
    x, others = chunks(_made_up(context, 2 * size), 2)

    def outputs(records: Inputs, draw: int) -> Tensor:
        with torch.no_grad(), layers_draw_from(stream(context.seed, Stream.LAYER, draw)):
            return _by_record(call(net, records), size)

    draws = max(1, TRIAL_DRAWS * TRIAL_SIZES[0] ** 2 // size**2) if _draws(net, x) else 1
    for draw in range(draws):
        before = outputs(x, draw)
        if not _close(outputs(x, draw), before):
            return (
                "the network computes the same records twice with different results: it draws "
                "random numbers from elsewhere than torch's generator, or remembers earlier "
                "batches, so its treatment of single records cannot be checked"
            )
        for unchanged in _splits(size):
            mixed = combine(partial(_where_rows, unchanged), x, others)
            if not _close(outputs(mixed, draw)[unchanged], before[unchanged]):
                return (
                    "the network's output for one record depends on the others in its batch (of "
                    f"{size} records), so clipping cannot bound the influence of a record"
                )
    return ""


def _where_rows(chosen: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The chosen rows of a, and the others of b."""
    return a.where(chosen.view(-1, *[1] * (a.dim() - 1)), b)


def _by_record(outputs: object, records: int) -> Tensor:
    """All numbers that a network returns, (records, numbers)."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    rows = [w.reshape(records, -1).float() for w in tensors if w.dim() and len(w) == records]
    if not rows:
        raise InputError("it returns no tensor with one row for each record")
    return torch.cat(rows, 1)


def _largest_batch(context: ClientContext, shards: Shards) -> int:
    """The most records that a step of any client computes at once.

    A server that does not know its clients' records assumes that there are enough.
    """
    limit = context.local.batch
    most = max((len(s.train) for s in shards.values()), default=0)
    return min(limit, most or limit)


def _trial_sizes(largest: int) -> list[int]:
    """Batch sizes up to the largest, by Fibonacci's rule in the end; 2 and 3 at least."""
    sizes = list(TRIAL_SIZES)
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + sizes[-2])
    return sorted({2, 3, max(3, largest)} | {n for n in sizes if n <= largest})


def _splits(size: int) -> Iterator[Tensor]:
    """Masks of unchanged records; up to 8 records, each record changes without each other one."""
    positions = torch.arange(size)
    for bit in range(min(TRIAL_SPLITS, (size - 1).bit_length())):
        half = (positions >> bit) % 2 == 0
        yield half
        yield ~half


def _made_up(context: ClientContext, records: int) -> Any:
    rng = stream(context.seed, Stream.INIT)
    return to_device(made_up_records(context.data, records, rng), context.device)


def _state(value: object, path: str = "", seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Everything that a module's attributes hold, as pairs of a path and a value.

    Tensors are copied.  Containers and modules are entered; other objects count by identity.
    """
    inner: Mapping[Any, object]
    if isinstance(value, nn.Module):
        inner = vars(value)
    elif isinstance(value, Mapping):
        inner = value
    elif isinstance(value, list | tuple | deque):
        inner = dict(enumerate(value))
    else:
        plain = value is None or isinstance(value, str | int | float)
        copied = value.detach().clone() if isinstance(value, Tensor) else value
        yield path, copied if plain or isinstance(value, Tensor) else id(value)
        return
    if id(value) not in seen:
        for name, part in inner.items():
            yield from _state(part, f"{path}.{name}" if path else str(name), seen | {id(value)})


def _same(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _draws(net: nn.Module, x: Inputs) -> bool:
    """Whether the network, in its current mode, takes anything from torch's generator."""
    with torch.no_grad(), layers_draw_from(stream(0, Stream.LAYER)):
        before = torch.random.get_rng_state()
        call(net, x)
        return not torch.equal(before, torch.random.get_rng_state())


@contextmanager
def _without_dropout(net: nn.Module) -> Iterator[None]:
    """Inside, the Dropout layers of a network in training mode do nothing."""
    layers = [m for m in net.modules() if type(m) in DROPOUTS]
    for m in layers:
        m.eval()
    try:
        yield
    finally:
        for m in layers:
            m.train()
