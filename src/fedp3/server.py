"""Algorithm 1 over any engine: sample, dispatch, execute, judge, aggregate.

`run` yields after every round the new state and its record, so that whoever drives it can save, show or stop between
two rounds.  The state is all there is to save: randomness is addressed by round and client, never stored.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fedp3.aggregate import EMPTY, Aggregation, Memory, aggregate
from fedp3.compress import unpack
from fedp3.cost import traffic
from fedp3.errors import RunError
from fedp3.evaluate import Accuracy, accuracy, dispatched_tasks, global_tasks
from fedp3.gate import NOT_FINITE, Brought, Verdict, sift
from fedp3.hooks import NONE, Hooks
from fedp3.plan import PlanRules, client_plans, per_layers
from fedp3.privacy.ledger import Budget, Ledger
from fedp3.prune import dealt_out, dispatch
from fedp3.rng import Use, stream
from fedp3.types import (
    AS_IS,
    ClientPlan,
    ClientUpdate,
    Compression,
    Contribution,
    Execute,
    LayerMap,
    Params,
    Pruning,
    Reply,
    Task,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One run, as the server knows it."""

    layers: LayerMap
    rules: PlanRules
    pruning: Pruning
    aggregation: Aggregation
    keep: tuple[float, ...]  # one share per client
    examples: Mapping[int, int]  # training samples each client registered
    rounds: int = 30
    clients_per_round: int = 0  # 0: all
    quorum: int = 1
    max_void: int = 5
    eval_every: int = 10
    seed: int = 0
    budget: Budget | None = None  # under LDP
    hooks: Hooks = NONE  # what the method adds
    compression: Compression = AS_IS

    @property
    def participants(self) -> int:
        """How many clients a round asks, if all are able."""
        return self.clients_per_round or len(self.keep)


@dataclass(frozen=True, slots=True)
class ServerState:
    """Everything a run is after t rounds."""

    t: int
    W: Params
    memory: Memory = EMPTY
    seen: Mapping[int, int] = field(default_factory=dict)  # client -> last round it was accepted in
    void: int = 0  # void rounds in a row
    extra: Params = field(default_factory=dict)  # what the method's exchange holds


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What happened in one round."""

    t: int
    sampled: tuple[int, ...]
    accepted: tuple[int, ...]
    late: tuple[int, ...]
    rejected: Mapping[int, str]
    bytes_down: int
    bytes_up: int
    loss: float | None  # mean training loss of the accepted
    density: float | None  # realised density of local pruning
    void: bool
    seconds: float
    G: Accuracy | None = None
    D: Accuracy | None = None
    P: Accuracy | None = None  # of this round's participants
    memory: Mapping[int, float] = field(default_factory=dict)  # attention's logits
    epsilon: float | None = None  # under LDP, the largest any client has spent


@dataclass(frozen=True, slots=True)
class Final:
    """The three accuracies of the finished model over all clients."""

    G: Accuracy | None
    D: Accuracy | None
    P: Accuracy | None


def plans_for(problem: Problem, t: int) -> tuple[ClientPlan, ...]:
    """The plan of every client in round t."""
    return tuple(dealt_out(_plans(problem, t), problem.pruning.selector, problem.participants))


def _plans(problem: Problem, t: int, clients: Sequence[int] | None = None) -> tuple[ClientPlan, ...]:
    return client_plans(problem.rules, problem.layers, problem.keep, problem.seed, t, clients)


def able(problem: Problem, t: int, ledger: Ledger | None = None) -> list[int]:
    """Clients that have something to train on and, under LDP, budget for one more task."""
    some = [i for i in range(len(problem.keep)) if problem.examples.get(i, 0) > 0]
    return some if ledger is None else [i for i in some if ledger.can_pay(i, t)]


def sample(problem: Problem, t: int, ledger: Ledger | None = None) -> list[int]:
    """C_t: participants of round t (Alg. 1, l. 4)."""
    clients = able(problem, t, ledger)
    m = problem.clients_per_round or len(clients)
    chosen = torch.randperm(len(clients), generator=stream(problem.seed, Use.SAMPLE, t))[:m].tolist()
    return sorted(clients[j] for j in chosen)


def rehearse(problem: Problem, ledger: Ledger | None = None) -> Counter[int]:
    """How many training tasks each client will get, the last probe included, if nothing fails; charges the ledger."""
    tasks: Counter[int] = Counter()
    for t in range(problem.rounds + 1):
        clients = sample(problem, t, ledger) if t < problem.rounds else able(problem, t, ledger)
        tasks.update(clients)
        if ledger is not None:
            ledger.charge(clients, t)
    return tasks


def run_round(
    problem: Problem,
    state: ServerState,
    execute: Execute,
    ledger: Ledger | None = None,
    fleet: Sequence[ClientPlan] | None = None,
) -> tuple[ServerState, RoundRecord]:
    """One round of Algorithm 1; `fleet` are everybody's plans, where they do not change from round to round."""
    began, t = time.perf_counter(), state.t
    clients = sample(problem, t, ledger)
    scored = _evaluates(problem, t)
    plans = [fleet[i] for i in clients] if fleet is not None else _plans(problem, t, clients)
    asked = dealt_out(plans, problem.pruning.selector, len(clients))
    tasks = _tasks(problem, state, asked, evaluate=scored)  # Alg. 1, ll. 5-6
    if ledger is not None:
        ledger.charge(clients, t)  # before anything leaves
    new, verdict = _advance(problem, state, tasks, execute(tasks))  # Alg. 1, ll. 7-14
    record = _record(problem, t, tasks, verdict, new)
    if scored:
        G, D = _measured(problem, new, execute, plans_for(problem, new.t))
        record = replace(record, G=G, D=D, P=accuracy(c.update for c in verdict.accepted))
    if ledger is not None:
        record = replace(record, epsilon=ledger.epsilon_max())
    return new, replace(record, seconds=time.perf_counter() - began)


def run(
    problem: Problem, state: ServerState, execute: Execute, ledger: Ledger | None = None
) -> Iterator[tuple[ServerState, RoundRecord]]:
    """Rounds until T, or until no client has budget left; raises after `max_void` void rounds in a row."""
    fleet = None if problem.rules.redraw else _plans(problem, 0)
    while state.t < problem.rounds and (ledger is None or able(problem, state.t, ledger)):
        state, record = run_round(problem, state, execute, ledger, fleet)
        yield state, record
        if record.void and state.void >= problem.max_void:
            raise RunError(
                f"{state.void} rounds in a row had fewer than {problem.quorum} usable updates; the last reasons: "
                f"{_reasons(record)}"
            )


def finish(
    problem: Problem,
    state: ServerState,
    execute: Execute,
    ledger: Ledger | None = None,
    last: RoundRecord | None = None,
) -> Final:
    """G, D and P over all clients once training is over; P trains, so under LDP it is charged like a round.

    `last` is the record of the round that led here: what it measured is not measured again.
    """
    everyone = plans_for(problem, state.t)
    measured = last and last.t + 1 == state.t and last.G and last.D and (last.G, last.D)
    G, D = measured or _measured(problem, state, execute, everyone)
    clients = able(problem, state.t, ledger)
    if ledger is not None:
        ledger.charge(clients, state.t)
    probed = [everyone[i] for i in clients]
    return Final(G, D, P=accuracy(execute(_dispatched(problem, state, probed, probe=True))))


def _measured(
    problem: Problem, state: ServerState, execute: Execute, everyone: Sequence[ClientPlan]
) -> tuple[Accuracy | None, Accuracy | None]:
    """G and D; where everything is sent whole, what a device holds is the server's model."""
    G = accuracy(execute(global_tasks(state.W, everyone, state.t, state.seen)))
    whole = all(p.send == "dense" for plan in everyone for p in plan.layers.values())
    return G, G if whole else accuracy(execute(_dispatched(problem, state, everyone, probe=False)))


def _evaluates(problem: Problem, t: int) -> bool:
    return t + 1 == problem.rounds or (problem.eval_every > 0 and (t + 1) % problem.eval_every == 0)


def _tasks(problem: Problem, state: ServerState, plans: Sequence[ClientPlan], *, evaluate: bool) -> list[Task]:
    sent = dispatch(state.W, plans, problem.layers, problem.pruning, state.t, problem.seed)
    return [
        Task(state.t, plan, weights, masks, "train", evaluate, state.seen.get(plan.client, -1), state.extra)
        for plan, (weights, masks) in zip(plans, sent, strict=True)
    ]


def _dispatched(problem: Problem, state: ServerState, plans: Sequence[ClientPlan], *, probe: bool) -> list[Task]:
    layers, pruning = problem.layers, problem.pruning
    tasks = dispatched_tasks(state.W, plans, layers, pruning, state.t, problem.seed, state.seen, probe=probe)
    return [replace(task, extra=state.extra) for task in tasks] if probe else tasks


def _advance(
    problem: Problem, state: ServerState, tasks: Sequence[Task], replies: Iterable[Reply]
) -> tuple[ServerState, Verdict]:
    """W_{t+1}, or W_t bit for bit where too few answered or it would overflow; an added update is let go."""
    accepted: list[Contribution] = []
    rejected: dict[int, str] = {}
    late: list[int] = []
    stale, how, compression = problem.pruning.stale, problem.aggregation, problem.compression
    brought = Brought({n: tuple(w.shape) for n, w in state.extra.items()}, compression)
    asked = {task.plan.client: task for task in tasks}

    def counted() -> Iterator[Contribution]:
        for c in sift(replies, tasks, problem.layers, problem.examples, rejected, late, brought):
            u = c.update
            whole = unpack(u.tensors, u.extra, asked[c.client], problem.layers, stale, compression)
            if whole is not u.tensors and not _finite(whole):  # of whole numbers and a scale both can be finite
                rejected[c.client] = f"what its compressed upload stands for {NOT_FINITE[0]}"
                continue
            told = ClientUpdate(u.client, u.t, {}, u.examples, u.metrics, {n: u.extra[n] for n in state.extra})
            accepted.append(Contribution(told, c.plan, c.masks))
            yield c if whole is u.tensors else replace(c, update=replace(u, tensors=whole))

    W, memory = aggregate(state.W, counted(), problem.layers, stale, how, state.memory, problem.seed)
    verdict = Verdict(tuple(accepted), rejected, tuple(sorted(late)))
    if len(accepted) < problem.quorum or not _finite(W):  # sums of finite numbers can be infinite
        return replace(state, t=state.t + 1, void=state.void + 1), verdict
    seen = {**state.seen, **{c.client: state.t for c in accepted}}
    extra, exchange = state.extra, problem.hooks.exchange
    if exchange is not None:
        combined = exchange.combine(extra, [c.update.extra for c in accepted], len(problem.keep))
        extra = combined if _finite(combined) else extra
    return ServerState(state.t + 1, W, memory, seen, 0, extra), verdict


def _finite(tensors: Params) -> bool:
    return all(bool(w.isfinite().all()) for w in tensors.values())


def _record(problem: Problem, t: int, tasks: Sequence[Task], verdict: Verdict, new: ServerState) -> RoundRecord:
    bytes_of = per_layers(lambda plan: traffic(plan, problem.layers, problem.pruning, problem.compression))

    def mean(metric: str) -> float | None:
        values = [c.update.metrics[metric] for c in verdict.accepted if metric in c.update.metrics]
        return math.fsum(values) / len(values) if values else None

    extra = 4 * sum(w.numel() for w in new.extra.values())  # a method's tensors, of the same shapes either way
    return RoundRecord(
        t=t,
        sampled=tuple(task.plan.client for task in tasks),
        accepted=tuple(c.client for c in verdict.accepted),
        late=verdict.late,
        rejected=verdict.rejected,
        bytes_down=sum(bytes_of(task.plan).down + extra for task in tasks),
        bytes_up=sum(bytes_of(c.plan).up + extra for c in verdict.accepted),
        loss=mean("loss"),
        density=mean("density"),
        void=new.void > 0,
        seconds=0.0,
        memory=new.memory.logits,
    )


def _reasons(record: RoundRecord) -> str:
    shown = [f"client {i}: {why}" for i, why in list(record.rejected.items())[:3]]
    shown += [f"{len(record.late)} late"] if record.late else []
    return "; ".join(shown) or "nobody answered"
