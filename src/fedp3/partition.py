"""Which sample belongs to which client: the paper's two non-iid splits, iid, and a user's own file.

    iid        a random share each
    classes    S1, class-wise: client i owns c neighbouring classes, {i, ..., i+c-1} mod C, and has equally many of each
    dirichlet  S2: p_i ~ Dir(alpha 1_C); client i draws classes by p_i until it is full

No sample is given twice; with sizes "equal" or "lognormal" none is left over.  Every split is a function of
the labels, the seed and its parameters alone.  Client i then cuts its own samples 70/30 (`split`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedp3.errors import InputError
from fedp3.lookup import pick
from fedp3.rng import Use, numpy_stream

Ints = npt.NDArray[np.int64]
Rng = np.random.Generator

SPREAD = 0.5  # standard deviation of the logarithm of lognormal sizes


def partition(
    kind: str,
    y: npt.NDArray[Any],
    clients: int,
    *,
    seed: int,
    classes: int = 5,
    alpha: float = 0.5,
    sizes: str | int | Sequence[int] = "equal",
) -> tuple[Ints, ...]:
    """The samples of each client, as ascending indices into `y`.

    Args:
        kind: a key of `PARTITIONS`.
        y: the labels, integers from 0.
        clients: how many clients share the samples.
        seed: of the run.
        classes: classes per client, for "classes".
        alpha: concentration, for "dirichlet"; the smaller, the fewer classes a client has.
        sizes: "equal" or "lognormal" give out all samples; one number is for every client, a list one for each.
    """
    deal = pick(PARTITIONS, kind, "partition")
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels.size and labels.min() < 0):
        raise InputError(
            f"cannot partition by labels of {labels.dtype}{list(labels.shape)}: want a list of integers >= 0"
        )
    m = client_sizes(sizes, len(labels), clients, seed=seed)
    dealt = deal(labels.astype(np.int64), m, numpy_stream(seed, Use.PARTITION), classes=classes, alpha=alpha)
    return tuple(np.sort(part) for part in np.split(dealt, np.cumsum(m)[:-1]))


def client_sizes(sizes: str | int | Sequence[int], samples: int, clients: int, *, seed: int) -> Ints:
    """How many samples each client gets."""
    if not 1 <= clients <= samples:
        raise InputError(f"cannot share {samples} samples among {clients} clients: want 1..{samples} clients")
    if isinstance(sizes, str):
        return pick(SIZES, sizes, "partition sizes")(samples, clients, numpy_stream(seed, Use.SIZES))
    m = np.full(clients, sizes) if isinstance(sizes, int | np.integer) else np.asarray(sizes)
    if m.shape != (clients,) or m.dtype.kind not in "iu" or m.min() < 1:
        raise InputError(
            f"sizes {sizes!r} do not fit: want one whole number >= 1, or one for each of {clients} clients"
        )
    if m.sum() > samples:
        raise InputError(f"sizes ask for {m.sum()} samples in all, but there are {samples}: ask for less")
    return m.astype(np.int64)


def _equal(samples: int, clients: int, rng: Rng) -> Ints:
    return np.diff(np.arange(clients + 1) * samples // clients)


def _lognormal(samples: int, clients: int, rng: Rng) -> Ints:
    floor = min(2, samples // clients)  # one to train on and one to test on
    rest = samples - clients * floor
    w = np.cumsum(rng.lognormal(0.0, SPREAD, clients))
    m: Ints = np.diff(np.floor(w / w[-1] * rest).astype(np.int64), prepend=0) + floor
    return m


SIZES: Mapping[str, Callable[[int, int, Rng], Ints]] = {"equal": _equal, "lognormal": _lognormal}


def iid(y: Ints, m: Ints, rng: Rng, *, classes: int, alpha: float) -> Ints:
    """A random share each, whatever the labels."""
    return rng.permutation(len(y))[: m.sum()]


def by_classes(y: Ints, m: Ints, rng: Rng, *, classes: int, alpha: float) -> Ints:
    """Client i has m_i / c samples of each of the classes {i, ..., i+c-1} mod C.

    Fewer clients than classes begin C / n apart instead, so that together they have seen as many classes as can be.
    Where a class runs out, its owners fill up with their other classes, if need be after swapping with clients
    that share a class with them: as few samples as possible go to a client that does not own their class.
    The authors' code does this one sample at a time by random theft; for balanced labels both end at m_i / c.
    """
    C = int(y.max()) + 1
    if not 1 <= classes <= C:
        raise InputError(
            f"[partition] classes, a client's, is {classes}: want 1..{C}, the number of classes in the data"
        )
    # Clients i and i + C own the same classes, so it is enough to share out between C kinds of client.
    n = len(m)
    kind = np.arange(n) % C if n >= C else np.arange(n) * C // n
    owns = (np.arange(C) - np.arange(C)[:, None]) % C < classes  # (kind, class)
    flow = _share_out(np.bincount(kind, m, C).astype(np.int64), np.bincount(y), owns)
    # The classes of a kind are interleaved as evenly as can be, then cut to its clients in turn.
    cell = np.repeat(np.arange(C * C), flow.ravel())
    place = (_rank(cell) + 0.5) / flow.ravel()[cell]
    wanted = (cell % C)[np.lexsort((place, cell // C))]
    order = np.argsort(kind, kind="stable")
    client = np.repeat(order, m[order])
    return _take(y, wanted[np.argsort(client, kind="stable")], rng)


def _share_out(need: Ints, stock: Ints, owns: npt.NDArray[np.bool_]) -> Ints:
    """Samples of class k for clients of kind t, (kinds, classes): own classes evenly, others only if need be."""
    flow = np.zeros(owns.shape, np.int64)
    for allowed in (owns, np.ones_like(owns)):
        while True:
            wish = _apportion(need - flow.sum(1), allowed & (stock > flow.sum(0)))
            if not wish.any():
                break
            # Each turn satisfies everybody or empties a class, so there are at most C of them.
            left = stock - flow.sum(0)
            flow += _apportion(np.minimum(left, wish.sum(0)), wish.T).T
        for t in np.flatnonzero(need > flow.sum(1)):
            while need[t] > flow[t].sum() and _swap(int(t), need, stock, allowed, flow):
                pass
    return flow


def _apportion(total: Ints, weight: npt.NDArray[Any]) -> Ints:
    """Row by row, `total` as whole numbers in proportion to `weight`; nothing where all weights are 0."""
    edges = np.cumsum(weight, axis=1, dtype=np.int64)
    return np.diff(edges * total[:, None] // np.maximum(edges[:, -1:], 1), axis=1, prepend=0)


def _swap(t: int, need: Ints, stock: Ints, owns: npt.NDArray[np.bool_], flow: Ints) -> bool:
    """Let kind t take one of its classes from a kind that can replace it, directly or down a chain; in place.

    This is one augmenting path of a maximum flow, found breadth first; False if there is none.
    """
    left = stock - flow.sum(0)
    taker: dict[int, int] = {}  # class -> the kind that would take it
    giver: dict[int, int] = {}  # kind -> the class it would give up
    queue, reached = deque([t]), {t}
    end = None
    while queue and end is None:
        u = queue.popleft()
        for k in (int(k) for k in np.flatnonzero(owns[u]) if int(k) not in taker):
            taker[k] = u
            if left[k] > 0:
                end = k
                break
            for v in (int(v) for v in np.flatnonzero(flow[:, k]) if int(v) not in reached):
                giver[v] = k
                reached.add(v)
                queue.append(v)
    if end is None:
        return False
    chain, k = [], end
    while taker[k] != t:
        chain.append((taker[k], giver[taker[k]], k))
        k = giver[taker[k]]
    amount = min(int(need[t] - flow[t].sum()), int(left[end]), *(int(flow[u, old]) for u, old, _ in chain))
    flow[t, k] += amount
    for u, old, new in chain:
        flow[u, old] -= amount
        flow[u, new] += amount
    return True


def dirichlet(y: Ints, m: Ints, rng: Rng, *, classes: int, alpha: float) -> Ints:
    """Client i draws classes by p_i ~ Dir(alpha 1_C), renormalised over the classes that still have samples.

    As in the authors' code, a random client that is not yet full draws next, so that leftovers go to all alike;
    a client whose remaining mass is 0 draws uniformly, where their code would draw for ever.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha is {alpha}: want a finite number > 0")
    C = int(y.max()) + 1
    p = rng.dirichlet(np.full(C, alpha), len(m))  # (clients, classes)
    client = np.repeat(np.arange(len(m)), m)
    # Independent clocks of equal rate: whichever rings next is uniform among the clients not yet full.
    time = np.cumsum(rng.exponential(size=len(client)))
    time -= time[np.cumsum(m) - m][client]
    turn = np.argsort(time, kind="stable")
    wanted = np.empty_like(client)
    wanted[turn] = _draw_classes(p, client[turn], np.bincount(y), rng)
    return _take(y, wanted, rng)


def _draw_classes(p: npt.NDArray[np.float64], client: Ints, stock: Ints, rng: Rng) -> Ints:
    """A class for every turn: `client[j]` draws by its row of p over what the turns before j have left.

    All remaining turns are drawn at once, and those up to the first that empties a class stand: at most C times.
    """
    n, C = p.shape
    drawn: list[Ints] = []
    while len(client):
        mass = p * (stock > 0)
        mass[mass.sum(1) == 0] = stock > 0
        edges = np.cumsum(mass, axis=1)
        edges = edges / edges[:, -1:] + np.arange(n)[:, None]  # client i draws in [i, i + 1)
        u = np.minimum(client + rng.random(len(client)), np.nextafter(client + 1.0, 0))
        z = np.searchsorted(edges.ravel(), u, side="right") - client * C
        ends = np.flatnonzero(_rank(z) + 1 == stock[z])
        stand = int(ends[0]) + 1 if len(ends) else len(z)
        drawn.append(z[:stand])
        stock = stock - np.bincount(z[:stand], minlength=C)
        client = client[stand:]
    return np.concatenate(drawn)


PARTITIONS: Mapping[str, Callable[..., Ints]] = {"iid": iid, "classes": by_classes, "dirichlet": dirichlet}


def _take(y: Ints, wanted: Ints, rng: Rng) -> Ints:
    """For each wanted class a random sample of it, none twice."""
    shuffled = rng.permutation(len(y))
    pool = shuffled[np.argsort(y[shuffled], kind="stable")]
    count = np.bincount(y)
    taken: Ints = pool[(np.cumsum(count) - count)[wanted] + _rank(wanted)]
    return taken


def _rank(values: Ints) -> Ints:
    """How many equal values come before each."""
    order = np.argsort(values, kind="stable")
    count = np.bincount(values) if len(values) else np.zeros(0, np.int64)
    rank = np.empty_like(values)
    rank[order] = np.arange(len(values)) - np.repeat(np.cumsum(count) - count, count)
    return rank


def split(indices: Ints, *, seed: int, client: int, share: float = 0.7) -> tuple[Ints, Ints]:
    """A client's train and test samples: shuffled, then cut; one of each at least, given two."""
    if not 0 < share < 1:
        raise InputError(f"share of training samples is {share}: want a number between 0 and 1")
    n = len(indices)
    shuffled = numpy_stream(seed, Use.SPLIT, client).permutation(indices)
    train = int(share * n + 1e-9)  # 0.7 * 700 is 489.99999999999994
    train = min(max(train, 1), n - 1) if n >= 2 else n
    return shuffled[:train], shuffled[train:]


def histogram(y: npt.NDArray[Any], parts: Iterable[Ints], classes: int) -> Ints:
    """Samples per client and class, (clients, classes)."""
    labels = np.asarray(y)
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
