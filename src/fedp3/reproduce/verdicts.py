"""The page of the claims: every line of the paper that can be checked, judged, with where and how."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from fedp3.reproduce import figures, published
from fedp3.reproduce.arithmetic import ARITHMETIC, KEEP, communication, parameters, upload_by_fleet
from fedp3.reproduce.cells import BENCHES, PROTOCOLS, SCORED
from fedp3.reproduce.claims import Finding, findings
from fedp3.reproduce.pages import flag, made_by, picture_of, write_page
from fedp3.reproduce.tables import Table, markdown, number
from fedp3.reproduce.targets import TARGETS
from fedp3.reproduce.training import Found, length, progress

VERDICTS: Mapping[str, str] = {
    "holds": "hold", "does not hold": "do not", "not decided": "are not decided", "not run": "were not run"
}  # fmt: skip
HOW_TO_READ = """\
- A claim is a difference of scores in points, paired by seed. It *holds* if its 95 % interval lies in the wanted \
range, *does not hold* if it lies outside, and is *not decided* between, or with fewer than three seeds.
- A claimed size counts as reproduced from half of it to twice it. Where the paper says *close* or *little*, there \
is one limit, and how much it is is our choice. A lead can only shrink where there is one: else the claim does not \
hold.
- *Places* are data sets and splits with as many seeds as the line says, of all that have any; benches that train \
longer or wider (k90, wide, full) stand among the places below and do not enter the means. OPU3 on an MLP is FedAvg \
and is taken as such where splits are compared.
- *Published* is the paper's mean over all it shows, *published there* over our places, as far as it shows them (its \
aggregation is on CIFAR only); EMNIST-L stands for both of our MLPs.
- Over several places the wider of two intervals is taken, by the spread of the seeds' means and by the spread \
within places; neither says what another data set would give. Intervals are of one claim each: of twenty, one errs \
by chance.
- S1 is the class-wise split, S2 the Dirichlet one. OPU3, OPU2 and LowerB train three, two and one hidden layers per \
client. (a) and (b) are two readings of the share p in [local pruning](table-local-pruning.md).
- G is the server's model, P a client's own after local training; a score is the mean of the last {scored} \
evaluations. The paper does not say which model it scored, so every claim is judged by both. The headline is by \
{kind}."""


def claims_page(found: Found, protocol: str, docs: Path) -> Path:
    """Every claim in one line, then where each was tested."""
    kind = PROTOCOLS[protocol].score
    judged, also = findings(found, protocol), findings(found, protocol, other(kind))
    up = "" if protocol == "desk" else "../"
    blocks = [
        "# The paper's claims, tested",
        made_by("claims", protocol),
        f"Protocol {protocol}: {PROTOCOLS[protocol].about}{length(found)}, all participating. "
        f"What may lie behind the differences: [differences.md]({up}differences.md).",
        f"**Of the {_count(judged)} lines of the first table that state a claim of the paper, {_tally(judged)}** "
        f"(local pruning stands under two readings, (a) and (b)). By {other(kind)}, {_tally(also)}.",
        picture_of(figures.claims(judged, docs), "What each claim says, what the paper has, what we found"),
        "### How to read it",
        HOW_TO_READ.format(scored=SCORED, kind=kind),
        f"To repeat: `fedp3 reproduce all{flag(protocol)}`, or a part with `--bench` and `--no-scans`, then "
        f"`fedp3 reproduce claims{flag(protocol)}`. What is finished is read, not run again; the same command in two "
        "terminals shares the work.",
        markdown(claim_table(judged, also, protocol)),
        markdown(_counted_table(judged, f"{up}../errata.md")),
        markdown(_moving_table(judged, found, protocol)),
        markdown(_part_table(judged, also, kind)),
        markdown(_progress_table(found, protocol)),
        markdown(_time_table(found)),
        "Pages: " + ", ".join(f"[{page.removesuffix('.md')}]({page})" for page in _others(docs)) + ".",
    ]
    return write_page(docs / "README.md", blocks)


def _others(docs: Path) -> Iterator[str]:
    """The other pages, and those of other protocols that are there."""
    yield from (f"{name}.md" for name in (*ARITHMETIC, *TARGETS))
    yield from sorted(str(p.relative_to(docs)) for p in docs.glob("*/*.md"))


def _count(judged: Sequence[Finding]) -> int:
    return sum(f.claim.of_paper for f in judged)


def _tally(judged: Sequence[Finding]) -> str:
    """How many claims of the paper itself hold."""
    verdicts = Counter(f.verdict for f in judged if f.claim.of_paper)
    return ", ".join(f"{verdicts[v]} {words}" for v, words in VERDICTS.items() if verdicts[v])


def other(kind: str) -> str:
    """The score that stands beside the protocol's."""
    return {"G": "P", "P": "G"}[kind]


def claim_table(judged: Sequence[Finding], also: Sequence[Finding], protocol: str) -> Table:
    """A line for each claim, by the protocol's score and by the other one."""
    kind = PROTOCOLS[protocol].score
    rows = [
        [
            f.claim.text,
            f.verdict,
            g.verdict,
            f.claim.want,
            number(f.published, sign=True),
            number(f.there, sign=True),
            *(each.ours.text() if each.ours else "-" for each in (f, g)),
            str(f.ours.seeds) if f.ours else "0",
            f"{f.pooled} of {len(f.parts)}" if f.pooled < len(f.parts) else str(f.pooled),
        ]
        for f, g in zip(judged, also, strict=True)
    ]
    columns = [
        "claim", f"by {kind}", f"by {other(kind)}", "wanted", "published", "published there",
        f"ours, {kind} [95 %]", f"ours, {other(kind)} [95 %]", "seeds", "places",
    ]  # fmt: skip
    return Table("Claims that training tests", columns, rows, words=4)


def _moving_table(judged: Sequence[Finding], found: Found, protocol: str) -> Table:
    """The same differences earlier in the runs: whether a longer one would bring them nearer to the paper's."""
    at = {back: findings(found, protocol, back=back) if back else judged for back in (2, 1, 0)}
    rows = [
        [
            f.claim.text,
            number(f.published, sign=True),
            *(number(g.ours.mean if g.ours else None, sign=True) for g in each),
        ]
        for f, *each in zip(judged, *at.values(), strict=True)
        if f.ours
    ]
    columns = ["claim", "published", "ours, last 30 to 21 evaluations", "last 20 to 11", f"last {SCORED}, as above"]
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
        "claim", "where", f"by {kind}", "published", f"ours, {kind} [95 %]", f"ours, {other(kind)} [95 %]", "seeds"
    ]  # fmt: skip
    return Table("Place by place", columns, rows, words=3)


def _counted_table(judged: Sequence[Finding], errata: str) -> Table:
    saved = communication()["cifar10"]
    ways = {
        name: ", ".join(f"{saved[plan][way]:.1f}" for plan in saved)
        for name, way in (("of layers sent up", "layers_up"), ("of parameters up", "parameters_up"),
                          ("of parameters both ways", "parameters_up_down"))
    }  # fmt: skip
    times = 1 + parameters()["cifar10"]["comm_spread_percent"] / 100
    uploads = upload_by_fleet()
    same = "holds" if len(set(uploads.values())) == 1 else "does not hold"
    by_fleet = ", ".join(f"n = {n}: {v:,.0f}" for n, v in uploads.items())
    d = sum(published.ARCHITECTURES["cifar10"].values())
    together = ", ".join(f"n = {n}: {n * v / d:.1f} d" for n, v in uploads.items())
    halved = next(f for f in judged if f.claim.text.startswith("pruning to 0.5"))
    theirs, ours = (number(-d) if d else "-" for d in (halved.published, halved.ours and halved.ours.mean))
    crossing = f"by construction: keep 0.5 overtakes 1.0 at alpha = {theirs} points (published), {ours} (ours)"
    rows = [
        ["a client's communication does not depend on n", same, f"{by_fleet} parameters up (LowerB, CIFAR10 net)"],
        [
            "a round costs d parameters in all, whatever n",
            "holds in theory",
            f"where each layer goes to one client; LowerB sends {together} (CIFAR10 net)",
        ],
        ["a larger alpha favours small ratios", "holds", crossing],
        [
            "OPU3, OPU2, LowerB save 20, 40, 60 % of communication",
            "holds, counting layers",
            "; ".join(f"{numbers} % {name}" for name, numbers in ways.items()) + " (CIFAR10 net)",
        ],
        _blocks_line(),
        ["one trained layer costs 10,815 times another's upload", "does not hold", f"{times:.0f} times (CIFAR10 net)"],
    ]
    columns = ["claim", "verdict", "numbers"]
    more = f"More such numbers, checked one by one: [errata]({errata})."
    return Table("Claims that counting tests", columns, rows, (more,), words=3)


def _blocks_line() -> list[str]:
    """What leaving out blocks saves: of all parameters both ways, and beside a Full that is itself pruned."""
    found = communication()["resnet18"]
    saved = {plan: found[plan]["parameters_up_down"] for plan in published.RESNET_REDUCTION}
    words = ", ".join(f"{value:.1f}" for value in saved.values())
    least = 100 * (1 - KEEP)
    verdict = "does not hold" if max(saved.values()) < least else "holds"
    return [
        "-B2 (part), -B3 (part), -B2-B3 (full) save 6.25, 6.25, 12.5 % against Full",
        verdict,
        f"{words} % of the whole ResNet18's parameters both ways; Full, pruned to {KEEP} both ways, saves about "
        f"{least:.0f} %, so they send more than it does",
    ]


def _progress_table(found: Found, protocol: str) -> Table:
    rows = [[name, *map(str, progress(target, found, protocol))] for name, target in TARGETS.items()]
    return Table("What is finished", ["target", "runs finished", "runs planned"], rows)


def _time_table(found: Found) -> Table:
    seconds: dict[str, list[float]] = {}
    for runs in found.values():
        for s in runs.values():
            seconds.setdefault(s.cell.partition("/")[0], []).append(s.seconds)
    rows = [[b, number(median(seconds[b]), 0), str(len(seconds[b]))] for b in BENCHES if b in seconds]
    return Table("Seconds for one run on one thread", ["bench", "median", "runs"], rows)
