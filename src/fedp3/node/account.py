"""Charges in the node's own ledger: updates under LDP, and scores.

Every charge is on disk before anything is computed for it.  Ledger and marks change together under
one lock, since a machine may handle several messages at once.
"""

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import replace

from fedp3.client.objectives import TESTED
from fedp3.core.errors import RunError
from fedp3.core.files import finite_or_none, locked
from fedp3.core.types import Task
from fedp3.data import Dataset
from fedp3.data.record_ids import record_ids
from fedp3.data.shards import Shard
from fedp3.node.folder import LOCK, NodeSettings, memory, remember
from fedp3.node.records import FILE, Marks, read_marks, without_marked, write_marks
from fedp3.node.refusal import RefusalCode, Refused
from fedp3.privacy import accountant
from fedp3.privacy.ledger import TEST, TRAINING, Charge, append, composed, new_charge, read
from fedp3.privacy.settings import Mechanism, PrivacySettings

ROUNDING = 1.001  # by how much two versions of an accountant may differ
TRAINED = ("loss", "density")  # metrics of training, which are no sums over test records
SCORES = Mechanism(noise_multiplier=0.0, sample_rate=1.0)  # every test record is in every score


def charge_update(
    node: NodeSettings,
    run: str,
    task: Task,
    mechanism: Mechanism,
    steps: int,
    settings: PrivacySettings,
    data: Dataset,
    shard: Shard,
) -> None:
    """Charge an update, or the update that is discarded after P is measured, and mark its records.

    Args:
        node: the node.
        run: the name of the run.
        task: what the server requests.
        mechanism: what is drawn for it.
        steps: the number of private steps.
        settings: the run's promise: its epsilon and delta must hold on this node as well.
        data: the data set.
        shard: the node's records.

    Raises:
        Refused: the charge would exceed the policy or the run's own epsilon; nothing is charged.
    """
    policy = node.policy.privacy
    new = new_charge(
        mechanism,
        client=node.client,
        t=task.t,
        steps=steps,
        run=run,
        released="probe" if task.kind == "probe" else "update",
    )
    with locked(node.folder, LOCK, wait=True):
        marks, charges = _read(node)
        earlier = [c for c in charges if c.account == TRAINING]
        of_run = [c for c in earlier if c.run == run]
        drawn = {(c.noise_multiplier, c.sample_rate) for c in of_run}
        if drawn - {(new.noise_multiplier, new.sample_rate)}:
            raise Refused(RefusalCode.PRIVACY, "the noise of a run changed after it was begun")
        promised = accountant.epsilon(composed([*of_run, new]), settings.delta)
        if not promised <= settings.epsilon * ROUNDING:
            raise Refused(
                RefusalCode.BUDGET,
                f"with this task the run would have cost epsilon {promised:.3f} at delta "
                f"{settings.delta:g}, and it promises {settings.epsilon:g}",
            )
        after = accountant.epsilon(composed([*earlier, new]), policy.delta)
        if not after <= policy.epsilon:
            raise Refused(
                RefusalCode.BUDGET,
                f"epsilon would be {after:.3f} at delta {policy.delta:g} over all runs; the policy "
                f"allows {policy.epsilon:g}",
            )
        trained = marks.ids | set(record_ids(data, shard.train))
        _write(node, replace(new, epsilon=finite_or_none(after)), marks, trained)


def allowed_scores(
    node: NodeSettings, run: str, task: Task, private: bool, data: Dataset, shard: Shard
) -> Shard | None:
    """The records that this task may be scored on, and the charge for it; None if on none.

    Args:
        node: the node.
        run: the name of the run.
        task: what the server requests.
        private: whether the run is under LDP.
        data: the data set.
        shard: the node's records.
    """
    policy = node.policy.scores
    enabled = policy.enabled
    if enabled == "auto":
        enabled = not (private or node.policy.privacy.needs_ldp)
    if not (enabled and task.evaluate):
        return None
    mechanism = replace(SCORES, noise_multiplier=policy.noise_multiplier)
    new = new_charge(
        mechanism,
        client=node.client,
        t=task.t,
        steps=1,
        run=run,
        released="scores",
        account=TEST,
    )
    with locked(node.folder, LOCK, wait=True):
        marks, charges = _read(node)
        earlier = [c for c in charges if c.account == TEST]
        after = accountant.epsilon(composed([*earlier, new]), node.policy.privacy.delta)
        if len(earlier) >= policy.limit or not after <= policy.epsilon:
            return None
        _write(node, replace(new, epsilon=finite_or_none(after)), marks, marks.ids)
    return without_marked(data, shard, marks.ids)


def noisy_scores(
    metrics: Mapping[str, float], noise_multiplier: float, shares: Collection[str] = ("correct",)
) -> dict[str, float]:
    """Scores with noise on the sums that one record changes by at most 1.

    Other sums, such as that of losses, are left out: one record could change them by any amount.
    The noise is for one sum, so that only the first is released.

    Args:
        metrics: an update's metrics, with sums if records were tested.
        noise_multiplier: the standard deviation of the noise; 0 releases everything exactly.
        shares: names of sums to which each record adds a number from 0 to 1.
    """
    if not noise_multiplier or TESTED not in metrics:
        return dict(metrics)
    released = {name: metrics[name] for name in (*TRAINED, TESTED) if name in metrics}
    noised = next((name for name in sorted(shares) if name in metrics), None)
    if noised is not None:
        # Two draws, as for updates: a single one has too short tails.
        draws = [random.SystemRandom().gauss(0, noise_multiplier / math.sqrt(2)) for _ in range(2)]
        noisy = round(metrics[noised] + sum(draws))
        released[noised] = min(max(noisy, 0), int(metrics[TESTED]))
    return released


def _read(node: NodeSettings) -> tuple[Marks, list[Charge]]:
    """Marks and charges that belong together; a lost file is not taken for a new one."""
    try:
        marks = read_marks(node.folder)
        charges = read(node.folder, marks.anchor)
    except RunError as error:
        raise Refused(RefusalCode.BUDGET, str(error)) from None
    lost = None
    if charges and not (node.folder / FILE).exists():
        lost = f"{node.folder / FILE}, which marks the records that trained under LDP"
    elif not charges and memory(node.folder).get("charged"):
        lost = f"the ledger in {node.folder}"
    if lost:
        raise Refused(RefusalCode.BUDGET, f"{lost}, is gone; restore it before anything is spent")
    return marks, charges


def _write(node: NodeSettings, charge: Charge, marks: Marks, ids: frozenset[bytes]) -> None:
    """Store a charge and marks, so that a crash in between leaves marks too many, not too few."""
    if ids != marks.ids or not (node.folder / FILE).exists():
        write_marks(node.folder, Marks(marks.anchor, ids))
    anchor = append(node.folder, [charge])
    write_marks(node.folder, Marks(anchor, ids))
    remember(node.folder, charged=True)
