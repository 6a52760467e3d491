"""What a round is recorded as: who took part, what was exchanged, and what went wrong."""

import math
from collections.abc import Sequence

from fedp3.core.memo import once_per_plan
from fedp3.core.types import Task
from fedp3.costs.traffic import exchange_bytes, traffic
from fedp3.server.context import RoundRecord, ServerContext, ServerState
from fedp3.server.gate import GateResult


def record_of(
    context: ServerContext, t: int, tasks: Sequence[Task], result: GateResult, new: ServerState
) -> RoundRecord:
    """The record of round t, before anything is measured.

    Args:
        context: the run.
        t: the round.
        tasks: what was sent.
        result: how the gate judged what came back.
        new: the state after the round.
    """
    spec = context.spec
    bytes_of = once_per_plan(
        lambda plan: traffic(plan, spec.layers, spec.pruning, spec.compression, spec.download)
    )

    def down_bytes(task: Task) -> int:
        return bytes_of(task.plan).down if task.download is None else task.download.bytes

    def mean(metric: str) -> float | None:
        values = [u.update.metrics[metric] for u in result.accepted if metric in u.update.metrics]
        return math.fsum(values) / len(values) if values else None

    extra = exchange_bytes(new.extra)
    return RoundRecord(
        t=t,
        sampled=tuple(task.plan.client for task in tasks),
        accepted=tuple(u.client for u in result.accepted),
        late=tuple(result.late),
        rejected=result.rejected,
        bytes_down=sum(down_bytes(task) + extra for task in tasks),
        bytes_up=sum((u.update.bytes or bytes_of(u.plan).up) + extra for u in result.accepted),
        loss=mean("loss"),
        density=mean("density"),
        void=new.void > 0,
        seconds=0.0,
        aggregator=context.aggregator.report(new.aggregator),
    )


def reasons_of(record: RoundRecord) -> str:
    """Why updates of this round were not used, for the first few clients."""
    reasons = [f"client {i}: {r.text}" for i, r in list(record.rejected.items())[:3]]
    if record.late:
        reasons.append(f"{len(record.late)} late")
    return "; ".join(reasons) or "nobody answered"
