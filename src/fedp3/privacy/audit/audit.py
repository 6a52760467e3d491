"""The audit of a run under LDP: what is audited, and the table of parts.

    sensitivity     without noise, no record moves the sum of a step by more than C
    noise           size and shape of the noise, for every client, plan, tensor and kind of task
    independence    nothing of the noise is shared between tensors, rows, steps, clients, rounds
    sampling        each record of each step is drawn by a coin of its own
    distinguishing  no test of one step proves more than its epsilon
    composition     no test of many subsampled steps proves more than their epsilon
    charging        the ledger of a whole run, against the noise that was really drawn
    releases        what else leaves: metrics, scores, counts, buffers, extra tensors, residuals
    accountant      the accountant and the budget, against an independent bound

An exception in a part is a failed finding.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedp3.client.context import ClientContext
from fedp3.core.errors import InputError
from fedp3.core.types import ClientPlan
from fedp3.privacy.audit.accounting import accounting
from fedp3.privacy.audit.charging import charging
from fedp3.privacy.audit.distinguishing import composition, one_step
from fedp3.privacy.audit.findings import Finding, crashed, located
from fedp3.privacy.audit.neighbours import Bench, bench, tiny
from fedp3.privacy.audit.noise import (
    across_clients,
    fresh,
    independence,
    network_draws,
    size_and_shape,
    small_draws,
)
from fedp3.privacy.audit.rehearsal import Rehearse
from fedp3.privacy.audit.releases import conservation, releases
from fedp3.privacy.audit.sampling import sampling
from fedp3.privacy.audit.sensitivity import drift, every_record, sensitivity
from fedp3.privacy.settings import Budget, Mechanism

# Records of the client on which the run's network is attacked, by the size of the network.
RECORDS, FEW_RECORDS, LARGE = 33, 9, 4_000_000
MOST_PLANS = 12  # plans of the run's network that are attacked
MOST_DRAWN = 5e7  # coordinates of noise that are drawn in the run's network, all in all
MOST_REHEARSED = 5e7  # coordinates of noise that are drawn in one rehearsal
REHEARSING_CLIENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is audited.

    Args:
        budget: the run's mechanism and limit, as the server knows them.
        context: the run's network and how its clients train.
        plans: the plans of all clients.
        others: what happens to layers outside L_i (`plan.others`).
        rehearse: runs the whole run on made-up records.
        seed: of made-up records and random directions.
    """

    budget: Budget
    context: ClientContext
    plans: Sequence[ClientPlan]
    others: str
    rehearse: Rehearse
    seed: int = 0

    @property
    def mechanism(self) -> Mechanism:
        """The run's mechanism; where it has no noise, with a noise multiplier of 1."""
        noise = self.budget.mechanism.noise_multiplier or 1.0
        return replace(self.budget.mechanism, noise_multiplier=noise)

    @property
    def clients(self) -> list[int]:
        """The numbers of all clients."""
        return [plan.client for plan in self.plans]

    def distinct_plans(self) -> list[ClientPlan]:
        """One client's plan of each kind; of clients with equal plans, the last one."""
        by_layers = {repr(sorted(plan.layers.items())): plan for plan in self.plans}
        plans = list(by_layers.values())
        return plans[:: max(1, -(-len(plans) // MOST_PLANS))]

    def own(self, plan: ClientPlan) -> Bench:
        """The run's network under one plan."""
        records = RECORDS if self.size < LARGE else FEW_RECORDS
        return bench(self.context, plan, records, self.seed)

    @property
    def size(self) -> int:
        """The number of the network's coordinates."""
        return sum(w.numel() for w in self.context.initial.values())


# --------------------------------------------------------------------------- parts

SMALL = "a small network"


def _own_network(plan: ClientPlan) -> str:
    return f"the run's network, client {plan.client}"


def _sensitivity(subject: Subject) -> list[Finding]:
    mechanism = subject.budget.mechanism
    small = tiny(subject.others, seed=subject.seed)
    findings = [
        *sensitivity(small, mechanism),
        *every_record(small, mechanism),
        *drift(small, mechanism),
    ]
    findings = located(findings, SMALL)
    for plan in subject.distinct_plans():
        findings += located(sensitivity(subject.own(plan), mechanism), _own_network(plan))
    return findings


def _noise(subject: Subject) -> list[Finding]:
    """Parts "noise" and "independence", which look at the same draws."""
    mechanism = subject.mechanism
    # Where layers outside L_i are noised, they are uploaded here, so that their noise is seen.
    upload: Literal["retained", "none"] = "retained" if subject.others == "noise" else "none"
    small_network = tiny(subject.others, upload, subject.seed)
    small = small_draws(small_network, mechanism, subject.clients)
    findings = located(
        [
            *size_and_shape(small),
            *independence(small, subject.seed),
            *fresh(mechanism),
        ],
        SMALL,
    )
    by_client: list[dict[str, Tensor]] = []
    plans = subject.distinct_plans()
    for plan in plans:
        own = subject.own(plan).without_local_pruning()
        trained = own.trained()
        size = sum(int(active.sum()) for active in trained.values())
        if not size:
            continue
        share = MOST_DRAWN / len(plans) / size
        draws = network_draws(own, mechanism, int(min(20, max(2, share))))
        checks = [*size_and_shape(draws), *independence(draws, subject.seed)]
        findings += located(checks, _own_network(plan))
        in_full = {n for n, active in trained.items() if bool(active.all())}
        by_client.append({n: values[0] for n, values, _ in draws.columns() if n in in_full})
    return [*findings, *located(across_clients(by_client), "the run's network")]


def _sampling(subject: Subject) -> list[Finding]:
    return sampling(subject.budget.mechanism, subject.clients)


def _distinguishing(subject: Subject) -> list[Finding]:
    return one_step(tiny(subject.others, seed=subject.seed), subject.mechanism, runs=200)


def _composition(subject: Subject) -> list[Finding]:
    return composition(tiny(subject.others, seed=subject.seed), subject.mechanism, runs=80)


def _rehearsed(subject: Subject) -> tuple[list[int], int]:
    """The clients and the number of steps of a rehearsal, so that it takes seconds."""
    plans = subject.distinct_plans()
    clients = sorted({plan.client for plan in plans[-REHEARSING_CLIENTS:]} | {subject.clients[0]})
    steps = subject.budget.mechanism.steps_per_task(subject.context.local)
    most = int(MOST_REHEARSED / (subject.size * len(clients) * 3))
    return clients, max(1, min(steps, max(2, most)))


def _charging(subject: Subject) -> list[Finding]:
    clients, steps = _rehearsed(subject)
    return charging(
        subject.context,
        clients,
        subject.budget,
        steps,
        subject.rehearse,
        subject.seed,
    )


def _releases(subject: Subject) -> list[Finding]:
    clients, steps = _rehearsed(subject)
    findings = releases(
        subject.context,
        clients,
        subject.budget,
        min(steps, 3),
        subject.rehearse,
        subject.seed,
    )
    own = bench(subject.context, subject.distinct_plans()[0], 4, subject.seed)
    return [*findings, *conservation(own, subject.budget.mechanism)]


def _accountant(subject: Subject) -> list[Finding]:
    return accounting(subject.budget, subject.context.local)


PARTS: Mapping[tuple[str, ...], Callable[[Subject], list[Finding]]] = {
    ("sensitivity",): _sensitivity,
    ("noise", "independence"): _noise,
    ("sampling",): _sampling,
    ("distinguishing",): _distinguishing,
    ("composition",): _composition,
    ("charging",): _charging,
    ("releases",): _releases,
    ("accountant",): _accountant,
}
NAMES = tuple(name for names in PARTS for name in names)


def audit(
    subject: Subject,
    parts: Collection[str] = NAMES,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Run these parts of the audit; every finding must pass.

    Args:
        subject: what is audited.
        parts: the names of the parts to run.
        tell: is called with the name of each part before it runs.
    """
    unknown = sorted(set(parts) - set(NAMES))
    if unknown:
        raise InputError(
            f"there is no part {unknown[0]!r} of an audit; the parts are {', '.join(NAMES)}"
        )
    findings: list[Finding] = []
    for names, run in PARTS.items():
        wanted = [name for name in names if name in parts]
        if not wanted:
            continue
        tell(", ".join(names))
        try:
            found = run(subject)
        except Exception as error:  # whatever a bug raises is a finding
            found = [crashed(name, error) for name in wanted]
        findings += [f for f in found if f.part in wanted]
    return findings
