"""Algorithm 1 over any engine: sample, dispatch, execute, judge, aggregate.

`run` yields after every round the new state and its record, so that whoever drives it can save, show or stop between
two rounds.  The state is all there is to save: randomness is addressed by round and client, never stored.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fedp3.aggregate import EMPTY, Aggregation, Memory, aggregate
from fedp3.cost import Traffic, traffic
from fedp3.errors import RunError
from fedp3.evaluate import Accuracy, accuracy, dispatched_tasks, global_tasks
from fedp3.gate import Verdict, judge
from fedp3.plan import PlanRules, client_plans
from fedp3.prune import dispatch
from fedp3.rng import Use, stream
from fedp3.types import ClientPlan, Execute, LayerMap, Params, Pruning, Task


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


@dataclass(frozen=True, slots=True)
class ServerState:
    """Everything a run is after t rounds."""

    t: int
    W: Params
    memory: Memory = EMPTY
    seen: Mapping[int, int] = field(default_factory=dict)  # client -> last round it was accepted in
    void: int = 0  # void rounds in a row


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


@dataclass(frozen=True, slots=True)
class Final:
    """The three accuracies of the finished model over all clients."""

    G: Accuracy | None
    D: Accuracy | None
    P: Accuracy | None


def plans_for(problem: Problem, t: int) -> tuple[ClientPlan, ...]:
    """The plan of every client in round t."""
    return client_plans(problem.rules, problem.layers, problem.keep, problem.seed, t)


def sample(problem: Problem, t: int) -> list[int]:
    """C_t: participants of round t among the clients that have something to train on (Alg. 1, l. 4)."""
    able = [i for i in range(len(problem.keep)) if problem.examples.get(i, 0) > 0]
    m = problem.clients_per_round or len(able)
    chosen = torch.randperm(len(able), generator=stream(problem.seed, Use.SAMPLE, t))[:m].tolist()
    return sorted(able[j] for j in chosen)


def run_round(problem: Problem, state: ServerState, execute: Execute) -> tuple[ServerState, RoundRecord]:
    """One round of Algorithm 1."""
    began, t = time.perf_counter(), state.t
    plans = plans_for(problem, t)
    clients = sample(problem, t)
    scored = _evaluates(problem, t)
    tasks = _tasks(problem, state, [plans[i] for i in clients], evaluate=scored)  # Alg. 1, ll. 5-6
    replies = list(execute(tasks))  # Alg. 1, ll. 7-13
    verdict = judge(replies, tasks, problem.layers, problem.examples)
    new = _advance(problem, state, verdict)  # Alg. 1, l. 14
    record = _record(problem, t, tasks, verdict, new)
    if scored:
        everyone = plans_for(problem, new.t)
        record = replace(
            record,
            G=accuracy(execute(global_tasks(new.W, everyone, new.t, new.seen))),
            D=accuracy(execute(_dispatched(problem, new, everyone, probe=False))),
            P=accuracy(c.update for c in verdict.accepted),
        )
    return new, replace(record, seconds=time.perf_counter() - began)


def run(problem: Problem, state: ServerState, execute: Execute) -> Iterator[tuple[ServerState, RoundRecord]]:
    """Rounds until T; raises after `max_void` void rounds in a row."""
    while state.t < problem.rounds:
        state, record = run_round(problem, state, execute)
        yield state, record
        if record.void and state.void >= problem.max_void:
            raise RunError(
                f"{state.void} rounds in a row had fewer than {problem.quorum} usable updates; the last reasons: "
                f"{_reasons(record)}"
            )


def finish(problem: Problem, state: ServerState, execute: Execute) -> Final:
    """G, D and P over all clients once training is over."""
    everyone = plans_for(problem, state.t)
    able = [p for p in everyone if problem.examples.get(p.client, 0) > 0]
    return Final(
        G=accuracy(execute(global_tasks(state.W, everyone, state.t, state.seen))),
        D=accuracy(execute(_dispatched(problem, state, everyone, probe=False))),
        P=accuracy(execute(_dispatched(problem, state, able, probe=True))),
    )


def _evaluates(problem: Problem, t: int) -> bool:
    return t + 1 == problem.rounds or (problem.eval_every > 0 and (t + 1) % problem.eval_every == 0)


def _tasks(problem: Problem, state: ServerState, plans: Sequence[ClientPlan], *, evaluate: bool) -> list[Task]:
    sent = dispatch(state.W, plans, problem.layers, problem.pruning, state.t, problem.seed)
    return [
        Task(state.t, plan, weights, masks, "train", evaluate, state.seen.get(plan.client, -1))
        for plan, (weights, masks) in zip(plans, sent, strict=True)
    ]


def _dispatched(problem: Problem, state: ServerState, plans: Sequence[ClientPlan], *, probe: bool) -> list[Task]:
    layers, pruning = problem.layers, problem.pruning
    return dispatched_tasks(state.W, plans, layers, pruning, state.t, problem.seed, state.seen, probe=probe)


def _advance(problem: Problem, state: ServerState, verdict: Verdict) -> ServerState:
    """W_{t+1}, or W_t bit for bit where too few answered."""
    if len(verdict.accepted) < problem.quorum:
        return replace(state, t=state.t + 1, void=state.void + 1)
    W, memory = aggregate(
        state.W,
        verdict.accepted,
        problem.layers,
        problem.pruning.stale,
        problem.aggregation,
        state.memory,
        problem.seed,
    )
    seen = {**state.seen, **{c.client: state.t for c in verdict.accepted}}
    return ServerState(state.t + 1, W, memory, seen, 0)


def _record(problem: Problem, t: int, tasks: Sequence[Task], verdict: Verdict, new: ServerState) -> RoundRecord:
    def bytes_of(plan: ClientPlan) -> Traffic:
        return traffic(plan, problem.layers, problem.pruning)

    def mean(metric: str) -> float | None:
        values = [c.update.metrics[metric] for c in verdict.accepted if metric in c.update.metrics]
        return math.fsum(values) / len(values) if values else None

    extra = sum(w.numel() * w.element_size() for c in verdict.accepted for w in c.update.extra.values())
    return RoundRecord(
        t=t,
        sampled=tuple(task.plan.client for task in tasks),
        accepted=tuple(c.client for c in verdict.accepted),
        late=verdict.late,
        rejected=verdict.rejected,
        bytes_down=sum(bytes_of(task.plan).down for task in tasks),
        bytes_up=sum(bytes_of(c.plan).up for c in verdict.accepted) + extra,
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
