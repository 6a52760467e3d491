"""Which sample belongs to which client: iid, and the paper's two non-iid partitions.

    iid        each client has a random share
    classes    S1, by classes: client i has equally many samples of each of c consecutive classes,
               {i, ..., i+c-1} mod C
    dirichlet  S2: p_i ~ Dir(alpha 1_C), and client i draws classes from p_i until it is full
    roles      client i has what the role with the i-th most samples says

No sample is given to two clients; with sizes "equal" or "lognormal" every sample is given to one.
Every partition is a function of the labels, the seed and its parameters alone.  Each client's
samples are then split into a training and a test part (`split`).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, numpy_stream
from fedp3.core.registry import NameIn, Registry, pick
from fedp3.core.settings import OWN, STRICT

Ints = npt.NDArray[np.int64]
Rng = np.random.Generator

# Functions of (labels, sizes m_i, generator, classes=, alpha=) that return the samples of the first
# client, then those of the second, and so on.
PARTITIONS: Registry[Callable[..., Ints]] = Registry("partition")

ROLES = "roles"  # the partition by speakers, which needs no labels
BY_LABELS = ("classes", "dirichlet")  # partitions that need labels
SPREAD = 0.5  # standard deviation of the logarithm of lognormal sizes


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class PartitionSettings:
    """Which samples each client has."""

    kind: Annotated[str, NameIn(PARTITIONS, also=(OWN, ROLES))] = Field(
        default="classes",
        description="classes: client i has the classes i, i+1, ..., i+c-1 (mod C); "
        "dirichlet: each client draws its class mix from Dir(alpha); "
        "iid: each client has a random share; "
        "roles: each client is one of the roles of a play that say most",
    )
    clients: int = Field(default=20, ge=1, description="number of clients, n")
    classes: int = Field(
        default=5, ge=1, description="with kind = 'classes': number of classes per client, c"
    )
    alpha: float = Field(
        default=0.5,
        gt=0,
        description="with kind = 'dirichlet': concentration; smaller is more uneven",
    )
    sizes: Literal["equal", "lognormal"] | int | tuple[int, ...] = Field(
        default="equal",
        description="samples per client: equal, lognormal, one number for all clients, "
        "or a list with one number per client",
    )
    file: str = Field(
        default="",
        description="read the partition from this file instead: "
        "JSON {client: [indices]} or CSV client,index",
    )
    train_share: float = Field(
        default=0.7, gt=0, lt=1, description="share of a client's samples on which it trains"
    )


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
    """Return the samples of each client, as ascending indices into `y`.

    Args:
        kind: a key of `PARTITIONS`.
        y: the labels, integers from 0.
        clients: the number of clients that share the samples.
        seed: the seed of the run.
        classes: for "classes", the number of classes per client.
        alpha: for "dirichlet", the concentration; smaller means fewer classes per client.
        sizes: "equal" and "lognormal" distribute all samples; a number is the size of every client;
            a list has the size of each client.
    """
    deal = PARTITIONS.pick(kind)
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels.size and labels.min() < 0):
        raise InputError(
            f"cannot partition by labels of {labels.dtype}{list(labels.shape)}: "
            "want a list of integers >= 0"
        )
    m = client_sizes(sizes, len(labels), clients, seed=seed)
    dealt = deal(
        labels.astype(np.int64),
        m,
        numpy_stream(seed, Stream.PARTITION),
        classes=classes,
        alpha=alpha,
    )
    return tuple(np.sort(part) for part in np.split(dealt, np.cumsum(m)[:-1]))


def by_roles(roles: npt.NDArray[Any], clients: int) -> tuple[Ints, ...]:
    """Return the samples of each client: those of the roles with the most samples.

    Roles beyond the number of clients are left out, and so are their samples.

    Args:
        roles: the role of each sample, integers from 0.
        clients: the number of clients.
    """
    counts = np.bincount(roles)
    named = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
    if clients > len(named):
        raise InputError(
            f"[partition] clients: {clients} for the {len(named)} roles of this text; each client "
            f"is one role: set 1..{len(named)}"
        )
    return tuple(np.flatnonzero(roles == role).astype(np.int64) for role in named[:clients])


def client_sizes(
    sizes: str | int | Sequence[int], samples: int, clients: int, *, seed: int
) -> Ints:
    """Return how many samples each client gets.

    Args:
        sizes: "equal", "lognormal", a number for all clients, or a list with one per client.
        samples: the number of samples.
        clients: the number of clients.
        seed: the seed of the run.
    """
    if not 1 <= clients <= samples:
        raise InputError(
            f"cannot share {samples} samples among {clients} clients: want 1..{samples} clients"
        )
    if isinstance(sizes, str):
        draw = pick(SIZES, sizes, "partition sizes")
        return draw(samples, clients, numpy_stream(seed, Stream.SIZES))
    m = np.full(clients, sizes) if isinstance(sizes, int | np.integer) else np.asarray(sizes)
    if m.shape != (clients,) or m.dtype.kind not in "iu" or m.min() < 1:
        raise InputError(
            f"sizes {sizes!r} do not fit: want one integer >= 1, or one for each of "
            f"{clients} clients"
        )
    if m.sum() > samples:
        raise InputError(
            f"sizes require {m.sum()} samples in total, but there are {samples}: "
            "choose smaller sizes"
        )
    return m.astype(np.int64)


def _equal(samples: int, clients: int, rng: Rng) -> Ints:
    return np.diff(np.arange(clients + 1) * samples // clients)


def _lognormal(samples: int, clients: int, rng: Rng) -> Ints:
    floor = min(2, samples // clients)  # one to train on and one to test on
    remaining = samples - clients * floor
    w = np.cumsum(rng.lognormal(0.0, SPREAD, clients))
    m: Ints = np.diff(np.floor(w / w[-1] * remaining).astype(np.int64), prepend=0) + floor
    return m


SIZES: Mapping[str, Callable[[int, int, Rng], Ints]] = {"equal": _equal, "lognormal": _lognormal}


# --------------------------------------------------------------------------- iid


def iid(y: Ints, m: Ints, rng: Rng, *, classes: int, alpha: float) -> Ints:
    """Give each client a random share, whatever the labels."""
    return rng.permutation(len(y))[: m.sum()]


# --------------------------------------------------------------------------- classes


def by_classes(y: Ints, m: Ints, rng: Rng, *, classes: int, alpha: float) -> Ints:
    """Give client i m_i / c samples of each of the classes {i, ..., i+c-1} mod C.

    Fewer clients than classes start C / n classes apart instead, so that together they cover as
    many classes as possible.  Where a class runs out, its clients fill up with their other classes,
    if necessary after an exchange with clients that share a class with them.  As few samples as
    possible go to a client that does not have their class.  The authors' code fills a client up
    by taking single samples from random other clients; for balanced labels both end at m_i / c.
    """
    C = int(y.max()) + 1
    if not 1 <= classes <= C:
        raise InputError(
            f"[partition] classes, the number of classes per client, is {classes}: "
            f"want 1..{C}, the number of classes in the data"
        )
    # Clients i and i + C have the same classes, so it suffices to divide samples between C kinds of
    # clients.
    n = len(m)
    kind = np.arange(n) % C if n >= C else np.arange(n) * C // n
    has = (np.arange(C) - np.arange(C)[:, None]) % C < classes  # (kind, class)
    flow = _divide(np.bincount(kind, m, C).astype(np.int64), np.bincount(y), has)
    # Interleave the classes of a kind as evenly as possible, then divide them among its clients.
    cell = np.repeat(np.arange(C * C), flow.ravel())
    place = (_rank(cell) + 0.5) / flow.ravel()[cell]
    wanted = (cell % C)[np.lexsort((place, cell // C))]
    order = np.argsort(kind, kind="stable")
    client = np.repeat(order, m[order])
    return _take(y, wanted[np.argsort(client, kind="stable")], rng)


def _divide(need: Ints, stock: Ints, has: npt.NDArray[np.bool_]) -> Ints:
    """Return how many samples of each class go to each kind of client, (kinds, classes).

    A kind gets samples of its classes evenly, and samples of other classes only if necessary.

    Args:
        need: the number of samples that each kind needs.
        stock: the number of samples of each class.
        has: the classes of each kind, (kinds, classes).
    """
    flow = np.zeros(has.shape, np.int64)
    for allowed in (has, np.ones_like(has)):
        while True:
            wish = _apportion(need - flow.sum(1), allowed & (stock > flow.sum(0)))
            if not wish.any():
                break
            # Each turn satisfies every kind or empties a class, so there are at most C turns.
            left = stock - flow.sum(0)
            flow += _apportion(np.minimum(left, wish.sum(0)), wish.T).T
        for t in np.flatnonzero(need > flow.sum(1)):
            while need[t] > flow[t].sum() and _swap(int(t), need, stock, allowed, flow):
                pass
    return flow


def _apportion(total: Ints, weight: npt.NDArray[Any]) -> Ints:
    """Split each row's total into integers in proportion to its weights; zeros if all are 0."""
    edges = np.cumsum(weight, axis=1, dtype=np.int64)
    return np.diff(edges * total[:, None] // np.maximum(edges[:, -1:], 1), axis=1, prepend=0)


def _swap(t: int, need: Ints, stock: Ints, allowed: npt.NDArray[np.bool_], flow: Ints) -> bool:
    """Let kind t take samples from a kind that can replace them, directly or along a chain.

    This is one augmenting path of a maximum flow, by breadth-first search.  It changes `flow` in
    place, and returns False if there is no such path.
    """
    left = stock - flow.sum(0)
    taker: dict[int, int] = {}  # class -> the kind that would take it
    giver: dict[int, int] = {}  # kind -> the class that it would give up
    queue, reached = deque([t]), {t}
    end = None
    while queue and end is None:
        u = queue.popleft()
        for k in map(int, np.flatnonzero(allowed[u])):
            if k in taker:
                continue
            taker[k] = u
            if left[k] > 0:
                end = k
                break
            for v in map(int, np.flatnonzero(flow[:, k])):
                if v not in reached:
                    giver[v] = k
                    reached.add(v)
                    queue.append(v)
    if end is None:
        return False
    chain, k = [], end
    while taker[k] != t:
        u = taker[k]
        chain.append((u, giver[u], k))
        k = giver[u]
    spare = [int(flow[u, old]) for u, old, _ in chain]
    amount = min(int(need[t] - flow[t].sum()), int(left[end]), *spare)
    flow[t, k] += amount
    for u, old, new in chain:
        flow[u, old] -= amount
        flow[u, new] += amount
    return True


# --------------------------------------------------------------------------- dirichlet


def dirichlet(y: Ints, m: Ints, rng: Rng, *, classes: int, alpha: float) -> Ints:
    """Let client i draw classes from p_i ~ Dir(alpha 1_C) until it has m_i samples.

    p_i is renormalised over the classes that still have samples.  As in the authors' code, a random
    client that is not yet full draws next, so that no client is favoured when classes run out.  A
    client whose remaining mass is 0 draws uniformly, where their code would never terminate.
    """
    if not (math.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha is {alpha}: want a finite number > 0")
    C = int(y.max()) + 1
    p = rng.dirichlet(np.full(C, alpha), len(m))  # (clients, classes)
    client = np.repeat(np.arange(len(m)), m)
    # Independent clocks of equal rate: the next to ring is uniform among clients not yet full.
    time = np.cumsum(rng.exponential(size=len(client)))
    time -= time[np.cumsum(m) - m][client]
    turn = np.argsort(time, kind="stable")
    wanted = np.empty_like(client)
    wanted[turn] = _draw_classes(p, client[turn], np.bincount(y), rng)
    return _take(y, wanted, rng)


def _draw_classes(p: npt.NDArray[np.float64], client: Ints, stock: Ints, rng: Rng) -> Ints:
    """Draw a class for every turn j: `client[j]` draws from its row of p over remaining samples.

    All remaining turns are drawn at once, and those up to the first that empties a class are
    accepted.  This takes at most C iterations.
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
        accepted = int(ends[0]) + 1 if len(ends) else len(z)
        drawn.append(z[:accepted])
        stock = stock - np.bincount(z[:accepted], minlength=C)
        client = client[accepted:]
    return np.concatenate(drawn)


PARTITIONS.add("iid", iid)
PARTITIONS.add("classes", by_classes)
PARTITIONS.add("dirichlet", dirichlet)


# --------------------------------------------------------------------------- helpers


def _take(y: Ints, wanted: Ints, rng: Rng) -> Ints:
    """A random sample of each wanted class, none of them twice."""
    shuffled = rng.permutation(len(y))
    pool = shuffled[np.argsort(y[shuffled], kind="stable")]
    count = np.bincount(y)
    taken: Ints = pool[(np.cumsum(count) - count)[wanted] + _rank(wanted)]
    return taken


def _rank(values: Ints) -> Ints:
    """How many equal values precede each value."""
    order = np.argsort(values, kind="stable")
    count = np.bincount(values) if len(values) else np.zeros(0, np.int64)
    rank = np.empty_like(values)
    rank[order] = np.arange(len(values)) - np.repeat(np.cumsum(count) - count, count)
    return rank


def split(indices: Ints, *, seed: int, client: int, share: float = 0.7) -> tuple[Ints, Ints]:
    """Split a client's samples at random into train and test samples.

    A client with two or more samples gets at least one of each.

    Args:
        indices: the client's samples.
        seed: the seed of the run.
        client: the number of the client.
        share: the share of train samples.
    """
    if not 0 < share < 1:
        raise InputError(f"share of training samples is {share}: want a number between 0 and 1")
    n = len(indices)
    shuffled = numpy_stream(seed, Stream.SPLIT, client).permutation(indices)
    train = int(share * n + 1e-9)  # 0.7 * 700 is 489.99999999999994
    train = min(max(train, 1), n - 1) if n >= 2 else n
    return shuffled[:train], shuffled[train:]


def histogram(y: npt.NDArray[Any], parts: Iterable[Ints], classes: int) -> Ints:
    """Return the samples per client and class, (clients, classes).

    Args:
        y: the labels of all samples.
        parts: the samples of each client.
        classes: the number of classes.
    """
    labels = np.asarray(y)
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
