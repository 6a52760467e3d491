"""The page of the claims: every statement of the paper that can be checked, and its verdict."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from fedp3_paper.reproduce import figures, published
from fedp3_paper.reproduce.arithmetic import (
    ARITHMETIC,
    KEEP,
    communication,
    parameters,
    upload_by_fleet,
)
from fedp3_paper.reproduce.cells import BENCHES, PROTOCOLS, SCORED
from fedp3_paper.reproduce.claims import Finding, findings
from fedp3_paper.reproduce.pages import flag, made_by, picture_of, write_page
from fedp3_paper.reproduce.tables import Table, markdown, number
from fedp3_paper.reproduce.targets import TARGETS
from fedp3_paper.reproduce.training import Results, length, progress

VERDICTS: Mapping[str, str] = {  # of one claim -> of several
    "holds": "hold",
    "does not hold": "do not",
    "not decided": "are not decided",
    "not run": "were not run",
}
HOW_TO_READ = (
    "A claim is a difference of scores in points, paired by seed. It *holds* if its 95 % interval "
    "lies in the wanted range, *does not hold* if it lies outside, and is *not decided* between, "
    "or with fewer than three seeds.",
    "A claimed size counts as reproduced from half of it to twice it. Where the paper says *close* "
    "or *little*, there is one limit, which we chose. A lead can only shrink where there is one: "
    "else the claim does not hold.",
    "*Places* are data sets and splits with as many seeds as the line says, of all that have any; "
    "benches that train longer or wider (k90, wide, full) are listed among the places below and do "
    "not enter the means. OPU3 on an MLP is FedAvg and is taken as such where splits are compared.",
    "*Published* is the paper's mean over all it shows, *published there* over our places, as far "
    "as it shows them (its aggregation is on CIFAR only); EMNIST-L stands for both of our MLPs.",
    "Over several places the wider of two intervals is taken, by the spread of the seeds' means "
    "and by the spread within places; neither says what another data set would give. Intervals are "
    "of one claim each: of twenty, one errs by chance.",
    "S1 is the class-wise split, S2 the Dirichlet one. OPU3, OPU2 and LowerB train three, two and "
    "one hidden layers per client. (a) and (b) are two readings of the share p in "
    "[local pruning](table-local-pruning.md).",
    "G is the server's model, P a client's personal model after local training; a score is the "
    "mean of the last {scored} evaluations. The paper does not say which model it scored, so every "
    "claim is judged by both. The headline is by {kind}.",
)


def claims_page(results: Results, protocol: str, docs: Path) -> Path:
    """Write the page: every claim on one line, then place by place."""
    kind, about = PROTOCOLS[protocol].score, PROTOCOLS[protocol].about
    judged, also = findings(results, protocol), findings(results, protocol, other(kind))
    up = "" if protocol == "desk" else "../"
    how_to_read = "\n".join(f"- {line}" for line in HOW_TO_READ)
    pages = ", ".join(f"[{page.removesuffix('.md')}]({page})" for page in _others(docs))
    blocks = [
        "# The paper's claims, tested",
        made_by("claims", protocol),
        f"Protocol {protocol}: {about}{length(results)}, all participating. What may lie behind "
        f"the differences: [differences.md]({up}differences.md).",
        f"**Of the {_count(judged)} lines of the first table that state a claim of the paper, "
        f"{_tally(judged)}** (local pruning is listed under two readings, (a) and (b)). "
        f"By {other(kind)}, {_tally(also)}.",
        picture_of(
            figures.claims(judged, docs), "What each claim says, what the paper has, what we found"
        ),
        "### How to read it",
        how_to_read.format(scored=SCORED, kind=kind),
        f"To repeat: `fedp3 reproduce all{flag(protocol)}`, or a part with `--bench` and "
        f"`--no-scans`, then `fedp3 reproduce claims{flag(protocol)}`. Finished runs are read and "
        "not run again; the same command in two terminals shares the work.",
        markdown(claim_table(judged, also, protocol)),
        markdown(_counted_table(judged, f"{up}errata.md")),
        markdown(_moving_table(judged, results, protocol)),
        markdown(_part_table(judged, also, kind)),
        markdown(_progress_table(results, protocol)),
        markdown(_time_table(results)),
        f"Pages: {pages}.",
    ]
    return write_page(docs / "README.md", blocks)


def _others(docs: Path) -> Iterator[str]:
    """The other pages, and the existing pages of other protocols."""
    yield from (f"{name}.md" for name in (*ARITHMETIC, *TARGETS))
    yield from sorted(str(p.relative_to(docs)) for p in docs.glob("*/*.md"))


def _count(judged: Sequence[Finding]) -> int:
    return sum(f.claim.of_paper for f in judged)


def _tally(judged: Sequence[Finding]) -> str:
    """How many claims of the paper hold, and how many do not."""
    verdicts = Counter(f.verdict for f in judged if f.claim.of_paper)
    return ", ".join(f"{verdicts[v]} {words}" for v, words in VERDICTS.items() if verdicts[v])


def other(kind: str) -> str:
    """The score that is shown beside the protocol's."""
    return {"G": "P", "P": "G"}[kind]


def claim_table(judged: Sequence[Finding], also: Sequence[Finding], protocol: str) -> Table:
    """A line for each claim.

    Args:
        judged: the claims, judged by the protocol's score.
        also: the same claims, judged by the other score.
        protocol: the name of the protocol.
    """
    kind = PROTOCOLS[protocol].score
    rows = []
    for f, g in zip(judged, also, strict=True):
        places = str(f.pooled)
        if f.pooled < len(f.parts):
            places = f"{f.pooled} of {len(f.parts)}"
        rows.append(
            [
                f.claim.text,
                f.verdict,
                g.verdict,
                f.claim.want,
                number(f.published, sign=True),
                number(f.there, sign=True),
                f.ours.text() if f.ours else "-",
                g.ours.text() if g.ours else "-",
                str(f.ours.seeds) if f.ours else "0",
                places,
            ]
        )
    columns = [
        "claim",
        f"by {kind}",
        f"by {other(kind)}",
        "wanted",
        "published",
        "published there",
        f"ours, {kind} [95 %]",
        f"ours, {other(kind)} [95 %]",
        "seeds",
        "places",
    ]
    return Table("Claims that training tests", columns, rows, words=4)


def _moving_table(judged: Sequence[Finding], results: Results, protocol: str) -> Table:
    """The differences earlier in the runs: would longer runs come nearer to the paper?"""
    earliest, earlier = (findings(results, protocol, back=back) for back in (2, 1))
    rows = []
    for moments in zip(earliest, earlier, judged, strict=True):
        last = moments[-1]
        if last.ours is None:
            continue
        means = [f.ours.mean if f.ours else None for f in moments]
        published_mean = number(last.published, sign=True)
        rows.append([last.claim.text, published_mean, *(number(m, sign=True) for m in means)])
    columns = [
        "claim",
        "published",
        "ours, last 30 to 21 evaluations",
        "last 20 to 11",
        f"last {SCORED}, as above",
    ]
    return Table("How the differences move during a run", columns, rows)


def _part_table(judged: Sequence[Finding], also: Sequence[Finding], kind: str) -> Table:
    by_other = {(f.claim.text, p.where): p.ours.text() for f in also for p in f.parts}
    rows = [
        [
            f.claim.text,
            p.where,
            p.verdict,
            number(p.published, sign=True),
            p.ours.text(),
            by_other.get((f.claim.text, p.where), "-"),
            str(p.ours.seeds),
        ]
        for f in judged
        for p in f.parts
    ]
    columns = [
        "claim",
        "where",
        f"by {kind}",
        "published",
        f"ours, {kind} [95 %]",
        f"ours, {other(kind)} [95 %]",
        "seeds",
    ]
    return Table("Place by place", columns, rows, words=3)


def _counted_table(judged: Sequence[Finding], errata: str) -> Table:
    """The claims that need no training.

    Args:
        judged: the claims that need it, for the accuracy that pruning costs.
        errata: the link to the errata.
    """
    rows = [
        *_fleet_lines(),
        ["a larger alpha favours small ratios", "holds", _crossing(judged)],
        _savings_line(),
        _blocks_line(),
        _spread_line(),
    ]
    columns = ["claim", "verdict", "numbers"]
    more = f"More such numbers, checked one by one: [errata]({errata})."
    return Table("Claims that counting tests", columns, rows, (more,), words=3)


def _fleet_lines() -> list[list[str]]:
    """How a client's upload, and that of the fleet, depend on the number of clients."""
    uploads = upload_by_fleet()
    same = "holds" if len(set(uploads.values())) == 1 else "does not hold"
    by_fleet = ", ".join(f"n = {n}: {v:,.0f}" for n, v in uploads.items())
    d = sum(published.ARCHITECTURES["cifar10"].values())
    together = ", ".join(f"n = {n}: {n * v / d:.1f} d" for n, v in uploads.items())
    return [
        [
            "a client's communication does not depend on n",
            same,
            f"{by_fleet} parameters up (LowerB, CIFAR10 network)",
        ],
        [
            "a round costs d parameters in all, whatever n",
            "holds in theory",
            f"where each layer goes to one client; LowerB sends {together} (CIFAR10 network)",
        ],
    ]


def _crossing(judged: Sequence[Finding]) -> str:
    """From which alpha on keep 0.5 is better than no pruning."""
    halved = next(f for f in judged if f.claim.text.startswith("pruning to 0.5"))
    theirs = number(-halved.published) if halved.published else "-"
    ours = number(-halved.ours.mean) if halved.ours and halved.ours.mean else "-"
    return (
        f"by construction: keep 0.5 overtakes 1.0 at alpha = {theirs} points (published), "
        f"{ours} (ours)"
    )


def _savings_line() -> list[str]:
    """What training fewer layers saves, counted in three ways."""
    saved = communication()["cifar10"]
    ways = {
        "of layers sent up": "layers_up",
        "of parameters up": "parameters_up",
        "of parameters both ways": "parameters_up_down",
    }
    texts = []
    for name, way in ways.items():
        percents = ", ".join(f"{saved[plan][way]:.1f}" for plan in saved)
        texts.append(f"{percents} % {name}")
    return [
        "OPU3, OPU2, LowerB save 20, 40, 60 % of communication",
        "holds, counting layers",
        "; ".join(texts) + " (CIFAR10 network)",
    ]


def _blocks_line() -> list[str]:
    """What leaving out blocks saves, beside a Full that is itself pruned."""
    rows = communication()["resnet18"]
    saved = {plan: rows[plan]["parameters_up_down"] for plan in published.RESNET_REDUCTION}
    words = ", ".join(f"{value:.1f}" for value in saved.values())
    least = 100 * (1 - KEEP)
    verdict = "does not hold" if max(saved.values()) < least else "holds"
    return [
        "-B2 (part), -B3 (part), -B2-B3 (full) save 6.25, 6.25, 12.5 % against Full",
        verdict,
        f"{words} % of all parameters of ResNet18 both ways; Full, pruned to {KEEP} both ways, "
        f"saves about {least:.0f} %, so they send more than it does",
    ]


def _spread_line() -> list[str]:
    times = 1 + parameters()["cifar10"]["comm_spread_percent"] / 100
    return [
        "one trained layer costs 10,815 times another's upload",
        "does not hold",
        f"{times:.0f} times (CIFAR10 network)",
    ]


def _progress_table(results: Results, protocol: str) -> Table:
    rows = [
        [name, *map(str, progress(target, results, protocol))] for name, target in TARGETS.items()
    ]
    return Table("What is finished", ["target", "runs finished", "runs planned"], rows)


def _time_table(results: Results) -> Table:
    seconds: dict[str, list[float]] = {}
    for runs in results.values():
        for s in runs.values():
            seconds.setdefault(s.cell.partition("/")[0], []).append(s.seconds)
    rows = [
        [b, number(median(seconds[b]), 0), str(len(seconds[b]))] for b in BENCHES if b in seconds
    ]
    return Table("Seconds for one run on one thread", ["bench", "median", "runs"], rows)
