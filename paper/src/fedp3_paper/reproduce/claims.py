"""The paper's claims, each as a contrast of rows that should be in a range, judged by results.

A contrast is sum_r c_r score_r, seed by seed.  A claim holds if the 95 % interval of its contrast
is inside the range, does not hold if it is outside, and is not decided otherwise.  The benches and
splits that have enough seeds are pooled; benches that train longer or wider are shown separately.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

from fedp3_paper.reproduce import published
from fedp3_paper.reproduce.cells import PROTOCOLS, SPLITS, Bench
from fedp3_paper.reproduce.stats import ENOUGH, Interval, interval, judge, pooled
from fedp3_paper.reproduce.targets import TARGETS, Row, benches_of, places_of, runs_on
from fedp3_paper.reproduce.training import Results, scores

Terms = Mapping[str, float]  # row label, with @split where splits are compared -> coefficient


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of the paper that training can check.

    Args:
        text: the claim in words.
        target: the target that has the rows.
        terms: the contrast.
        low: the lower end of the range, in points.
        high: the upper end of the range, in points.
        presumes: a contrast that must be above 0 for the claim to mean anything.
        instead: row -> the row that replaces it on benches that do not run it.
        of_paper: whether the paper claims it; if not, it is a question that the paper leaves open.
    """

    text: str
    target: str
    terms: Terms
    low: float = -inf
    high: float = inf
    presumes: Terms | None = None
    instead: Mapping[str, str] = field(default_factory=dict)
    of_paper: bool = True

    @property
    def want(self) -> str:
        """The range in words."""
        if self.low == -inf:
            return f"below {self.high:g}"
        return f"above {self.low:g}" if self.high == inf else f"{self.low:g} to {self.high:g}"


def _about(value: float) -> tuple[float, float]:
    """The range in which a number counts as reproduced: from half of it to twice it."""
    ends = sorted((value / 2, value * 2))
    return round(ends[0], 2), round(ends[1], 2)


OVERLAP = "fig-overlap"
PRUNING = "fig-global-pruning"
LOCAL = "table-local-pruning"
AGGREGATION = "fig-aggregation"
RESNET = "table-resnet"
SHARES = (0.9, 0.7)  # the paper's p of local pruning


def _minus(minuend: str, subtrahend: str) -> Terms:
    """The score of one row minus that of another."""
    return {minuend: 1.0, subtrahend: -1.0}


def _overlap() -> Iterator[Claim]:
    yield Claim(
        "OPU3 is close to FedAvg (within 3 points)", OVERLAP, _minus("OPU3", "FedAvg"), low=-3
    )
    yield Claim("OPU2 loses against FedAvg", OVERLAP, _minus("OPU2", "FedAvg"), high=0)
    yield Claim(
        "LowerB loses against OPU2: it is the lower bound",
        OVERLAP,
        _minus("LowerB", "OPU2"),
        high=0,
    )
    yield Claim(
        "redrawing the layer of LowerB each round beats a fixed one (not in the paper)",
        OVERLAP,
        _minus("LowerB, layers redrawn", "LowerB"),
        low=0,
        of_paper=False,
    )
    yield Claim(
        "freezing LowerB's other layers costs accuracy (not in the paper)",
        OVERLAP,
        _minus("LowerB, others frozen", "LowerB"),
        high=0,
        of_paper=False,
    )
    rows = ("OPU3", "OPU2", "LowerB")
    split_gap = {f"{row}@classes": 1 / 3 for row in rows}
    split_gap |= {f"{row}@dirichlet": -1 / 3 for row in rows}
    yield Claim(
        "Dirichlet costs little against class-wise: 3.55 points, at most twice that "
        "(OPU3, OPU2, LowerB)",
        OVERLAP,
        split_gap,
        high=7.1,
        instead={"OPU3": "FedAvg"},
    )
    low, high = _about(3.55)
    yield Claim(
        "Dirichlet lies about 3.55 points under class-wise (OPU3, OPU2, LowerB)",
        OVERLAP,
        split_gap,
        low=low,
        high=high,
        instead={"OPU3": "FedAvg"},
    )
    yield Claim(
        "FedCR-OPU3 loses little against FedCR (within 5 points)",
        OVERLAP,
        _minus("FedCR-OPU3", "FedCR"),
        low=-5,
    )


def _pruning() -> Iterator[Claim]:
    printed = {0.9: (5.43, "5.43 (printed: 5.32)"), 0.7: (12.86, "12.86"), 0.5: (27.76, "27.76")}
    for keep, (drop, words) in printed.items():
        low, high = _about(-drop)
        yield Claim(
            f"pruning to {keep} costs about {words} points",
            PRUNING,
            _minus(f"keep {keep}", "keep 1.0 (FedAvg)"),
            low=low,
            high=high,
        )


def _local() -> Iterator[Claim]:
    labels = {  # reading of p -> the rest of a row's label
        "(a)": "q = {p}",
        "(b)": "keep {p}",
    }
    fixed = {
        "(a)": {0.9: "Fixed", 0.7: "Fixed"},
        "(b)": {0.9: "Fixed", 0.7: "(b) Fixed, keep 0.7"},
    }
    leads: dict[str, dict[float, Terms]] = {}  # reading -> p -> uniform's lead over ordered dropout
    for reading, end in labels.items():
        leads[reading] = {
            p: _minus(
                f"{reading} uniform, {end.format(p=p)}", f"{reading} ordered, {end.format(p=p)}"
            )
            for p in SHARES
        }
    for reading, end in labels.items():
        for p in SHARES:
            yield Claim(
                f"{reading} fixed beats uniform local pruning, p = {p}",
                LOCAL,
                _minus(fixed[reading][p], f"{reading} uniform, {end.format(p=p)}"),
                low=0,
            )
    for reading in labels:
        for p in SHARES:
            yield Claim(
                f"{reading} uniform beats ordered dropout, p = {p}",
                LOCAL,
                leads[reading][p],
                low=0,
            )
    for p in SHARES:
        yield Claim(
            f"(a) uniform beats ordered dropout at equal density, p = {p} (not in the paper)",
            LOCAL,
            _minus(f"(a) uniform, q = {p}", f"(a) matched, q = {p}"),
            low=0,
            of_paper=False,
        )
    for reading in labels:
        at_09 = leads[reading][0.9]
        yield Claim(
            f"{reading} the lead of uniform over ordered dropout (there must be one) shrinks from "
            "p = 0.9 to 0.7",
            LOCAL,
            {**leads[reading][0.7], **{label: -c for label, c in at_09.items()}},
            high=0,
            presumes=at_09,
        )


def _aggregation() -> Iterator[Claim]:
    for plan in ("OPU1-2-3", "OPU2-3"):
        yield Claim(
            f"weighted beats simple averaging, {plan}",
            AGGREGATION,
            _minus(f"{plan} weighted", f"{plan} simple"),
            low=0,
        )
    yield Claim(
        "OPU2-3 beats OPU1-2-3",
        AGGREGATION,
        {
            "OPU2-3 simple": 0.5,
            "OPU2-3 weighted": 0.5,
            "OPU1-2-3 simple": -0.5,
            "OPU1-2-3 weighted": -0.5,
        },
        low=0,
    )
    yield Claim(
        "attention beats simple averaging (named, not measured in the paper)",
        AGGREGATION,
        {
            "OPU1-2-3 attention": 0.5,
            "OPU2-3 attention": 0.5,
            "OPU1-2-3 simple": -0.5,
            "OPU2-3 simple": -0.5,
        },
        low=0,
        of_paper=False,
    )


def _resnet() -> Iterator[Claim]:
    # The paper compares with Full, which is pruned, while the rows without blocks are not.
    bases = {"Full": "", "FedAvg, unpruned": " against FedAvg, unpruned; not in the paper"}
    for base, against in bases.items():
        yield Claim(
            f"leaving out parts of B2 or B3 costs little (within 2 points{against})",
            RESNET,
            {"-B2 (part)": 0.5, "-B3 (part)": 0.5, base: -1},
            low=-2,
            of_paper=base == "Full",
        )
    for base, against in bases.items():
        yield Claim(
            f"leaving out B2 or B3 costs little (within 6.32 points{against})",
            RESNET,
            _minus("-B2-B3 (full)", base),
            low=-6.32,
            of_paper=base == "Full",
        )
    yield Claim("-B3 (part) is above Full", RESNET, _minus("-B3 (part)", "Full"), low=0)


CLAIMS: Sequence[Claim] = (
    *_overlap(),
    *_pruning(),
    *_local(),
    *_aggregation(),
    *_resnet(),
)


# --------------------------------------------------------------------------- judging


@dataclass(frozen=True, slots=True)
class Part:
    """A claim on one bench and split."""

    where: str
    ours: Interval
    published: float | None
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A claim with our numbers.

    Args:
        claim: the claim.
        ours: our contrast, pooled over places; None where the claim was not run.
        published: the paper's contrast, averaged over everything that the paper shows.
        there: the paper's contrast, averaged over the places that `ours` is pooled over.
        verdict: whether the claim holds.
        parts: the claim place by place.
        pooled: the number of places that `ours` is pooled over.
    """

    claim: Claim
    ours: Interval | None
    published: float | None
    there: float | None
    verdict: str
    parts: tuple[Part, ...]
    pooled: int


@dataclass(frozen=True, slots=True)
class Place:
    """The contrast of a claim on one bench and split, and of its premise: seed -> value."""

    contrast: Mapping[int, float]
    premise: Mapping[int, float]
    published: float | None


def findings(results: Results, protocol: str, kind: str = "", back: int = 0) -> list[Finding]:
    """Judge every claim.

    Args:
        results: the results.
        protocol: the name of the protocol.
        kind: the accuracy to judge by, G, D or P; empty: the protocol's score.
        back: how many tens of evaluations before the last ten to judge by.
    """
    kind = kind or PROTOCOLS[protocol].score
    return [_judge(claim, results, protocol, kind, back) for claim in CLAIMS]


def _judge(claim: Claim, results: Results, protocol: str, kind: str, back: int) -> Finding:
    parts, places = [], []
    for bench, split in _places(claim, protocol):
        values = _contrast(claim, claim.terms, results, (kind, back), bench, split)
        if not values:
            continue
        premise: dict[int, float] = {}
        if claim.presumes:
            premise = _contrast(claim, claim.presumes, results, (kind, back), bench, split)
        where = bench.name + (f", {SPLITS[split]}" if split else "")
        ours, theirs = interval(list(values.values())), _published(claim, bench.paper, split)
        lead = interval(list(premise.values())) if premise else None
        parts.append(Part(where, ours, theirs, _verdict(claim, ours, lead)))
        if not bench.more:
            places.append(Place(values, premise, theirs))
    published_mean = _published_mean(claim)
    if not places:
        return Finding(
            claim=claim,
            ours=None,
            published=published_mean,
            there=None,
            verdict="not run",
            parts=tuple(parts),
            pooled=0,
        )
    chosen, seeds = _places_with_enough_seeds(places)
    ours = pooled([[place.contrast[k] for k in seeds] for place in chosen])
    lead = None
    if claim.presumes:
        lead = pooled([[place.premise[k] for k in seeds] for place in chosen])
    known = [place.published for place in chosen if place.published is not None]
    return Finding(
        claim=claim,
        ours=ours,
        published=published_mean,
        there=fmean(known) if known else None,
        verdict=_verdict(claim, ours, lead),
        parts=tuple(parts),
        pooled=len(chosen),
    )


def _verdict(claim: Claim, ours: Interval, lead: Interval | None) -> str:
    """Judge the premise first: a lead that does not exist cannot shrink."""
    presumed = judge(lead, 0, inf) if lead else "holds"
    return judge(ours, claim.low, claim.high) if presumed == "holds" else presumed


def _places_with_enough_seeds(places: Sequence[Place]) -> tuple[list[Place], list[int]]:
    """The places to pool and the seeds that they share.

    A place with fewer seeds is left out, since only seeds that all places have can be pooled.
    """
    enough = min(ENOUGH, max(len(place.contrast) for place in places))
    chosen = [place for place in places if len(place.contrast) >= enough]
    common = set.intersection(*(set(place.contrast) for place in chosen))
    if not common:
        return chosen[:1], sorted(chosen[0].contrast)
    return chosen, sorted(common)


def _places(claim: Claim, protocol: str) -> list[tuple[Bench, str]]:
    """Where a claim is tested: once per bench and split, or per bench if it compares splits."""
    target = TARGETS[claim.target]
    if _compares_splits(claim):
        return [(bench, "") for bench in benches_of(target, protocol)]
    return places_of(target, protocol)


def _compares_splits(claim: Claim) -> bool:
    return any("@" in label for label in claim.terms)


def _contrast(
    claim: Claim, terms: Terms, results: Results, which: tuple[str, int], bench: Bench, split: str
) -> dict[int, float]:
    """Seed -> value of the contrast, over seeds that have every row."""
    weighted = []
    for label, c in terms.items():
        name, _, named_split = label.partition("@")
        place = named_split or split
        row = _row(claim.target, name)
        if row is not None and not runs_on(row, bench, place):
            row = _row(claim.target, claim.instead.get(name, ""))
        if row is None or not runs_on(row, bench, place):
            return {}
        weighted.append((c, scores(results, bench, place, row, *which)))
    common = set.intersection(*(set(by_seed) for _, by_seed in weighted))
    return {k: sum(c * by_seed[k] for c, by_seed in weighted) for k in sorted(common)}


def _row(target: str, label: str) -> Row | None:
    return next((r for r in TARGETS[target].rows if r.label == label), None)


def _published(claim: Claim, column: str, split: str) -> float | None:
    """The contrast in the paper; None where the paper lacks one of its rows."""
    total = 0.0
    for label, c in claim.terms.items():
        name, _, named_split = label.partition("@")
        row = _row(claim.target, name)
        value = published.score(row.published if row else name, column, named_split or split)
        if value is None:
            return None
        total += c * value
    return total


def _published_mean(claim: Claim) -> float | None:
    """The mean of the contrast over everything that the paper shows of it."""
    splits = ("",) if _compares_splits(claim) else tuple(SPLITS)
    values = [_published(claim, column, split) for column in published.COLUMNS for split in splits]
    known = [v for v in values if v is not None]
    return fmean(known) if known else None
