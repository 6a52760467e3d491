"""The paper's claims, each as a contrast of rows that should lie in a range, judged from summaries.

A contrast is sum_r c_r score_r, seed by seed; a claim holds where its 95 % interval lies inside the range, does not
hold where it lies outside, and is not decided between.  Several benches and splits are pooled, those with enough
seeds; benches that train a data set longer or wider are shown beside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

from fedp3.reproduce import published
from fedp3.reproduce.cells import PROTOCOLS, SPLITS, Bench
from fedp3.reproduce.stats import ENOUGH, Interval, interval, judge, pooled
from fedp3.reproduce.targets import TARGETS, Row, benches_of, places_of, runs_on
from fedp3.reproduce.training import Found, scores

Terms = Mapping[str, float]  # row label, with @split where splits are compared -> coefficient


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of the paper that training can check."""

    text: str
    target: str
    terms: Terms
    low: float = -inf  # points
    high: float = inf
    presumes: Terms | None = None  # a contrast that must lie above 0 for the claim to mean anything
    instead: Mapping[str, str] = field(default_factory=dict)  # row -> row to take where it is not run
    of_paper: bool = True  # else it asks what the paper leaves open

    @property
    def want(self) -> str:
        """The range in words."""
        if self.low == -inf:
            return f"below {self.high:g}"
        return f"above {self.low:g}" if self.high == inf else f"{self.low:g} to {self.high:g}"


def _about(value: float) -> tuple[float, float]:
    """The range that counts as reproducing a number: half of it to twice it."""
    ends = sorted((value / 2, value * 2))
    return round(ends[0], 2), round(ends[1], 2)


OVERLAP, PRUNING, LOCAL, MEANS, RESNET = (
    "fig-overlap", "fig-global-pruning", "table-local-pruning", "fig-aggregation", "table-resnet",
)  # fmt: skip
GAPS: Mapping[str, Mapping[float, Terms]] = {  # reading of p -> p -> uniform's lead over ordered dropout
    "(a)": {p: {f"(a) uniform, q = {p}": 1.0, f"(a) ordered, q = {p}": -1.0} for p in (0.9, 0.7)},
    "(b)": {p: {f"(b) uniform, keep {p}": 1.0, f"(b) ordered, keep {p}": -1.0} for p in (0.9, 0.7)},
}
SPLIT_GAP: Terms = {
    f"{row}@{split}": sign / 3
    for split, sign in (("classes", 1), ("dirichlet", -1))
    for row in ("OPU3", "OPU2", "LowerB")
}
FULLS = {  # what ResNet18 without blocks is compared with: Full is pruned, unlike it
    "Full": "",
    "FedAvg, unpruned": " against FedAvg, unpruned; not in the paper",
}
CLAIMS: Sequence[Claim] = (
    Claim("OPU3 is close to FedAvg (within 3 points)", OVERLAP, {"OPU3": 1, "FedAvg": -1}, low=-3),
    Claim("OPU2 loses against FedAvg", OVERLAP, {"OPU2": 1, "FedAvg": -1}, high=0),
    Claim("LowerB loses against OPU2: it is the lower bound", OVERLAP, {"LowerB": 1, "OPU2": -1}, high=0),
    Claim("redrawing the layer of LowerB each round beats a fixed one (not in the paper)", OVERLAP,
          {"LowerB, layers redrawn": 1, "LowerB": -1}, low=0, of_paper=False),
    Claim("freezing LowerB's other layers costs accuracy (not in the paper)", OVERLAP,
          {"LowerB, others frozen": 1, "LowerB": -1}, high=0, of_paper=False),
    Claim("Dirichlet costs little against class-wise: 3.55 points, at most twice that (OPU3, OPU2, LowerB)", OVERLAP,
          SPLIT_GAP, high=7.1, instead={"OPU3": "FedAvg"}),
    Claim("Dirichlet lies about 3.55 points under class-wise (OPU3, OPU2, LowerB)", OVERLAP,
          SPLIT_GAP, *_about(3.55), instead={"OPU3": "FedAvg"}),
    Claim("FedCR-OPU3 loses little against FedCR (within 5 points)", OVERLAP, {"FedCR-OPU3": 1, "FedCR": -1}, low=-5),
    *(
        Claim(f"pruning to {keep} costs about {printed} points", PRUNING,
              {f"keep {keep}": 1, "keep 1.0 (FedAvg)": -1}, *_about(-drop))
        for keep, drop, printed in ((0.9, 5.43, "5.43 (printed: 5.32)"), (0.7, 12.86, "12.86"), (0.5, 27.76, "27.76"))
    ),
    *(
        Claim(f"(a) fixed beats uniform local pruning, p = {p}", LOCAL,
              {"Fixed": 1, f"(a) uniform, q = {p}": -1}, low=0)
        for p in (0.9, 0.7)
    ),
    *(
        Claim(f"(b) fixed beats uniform local pruning, p = {p}", LOCAL,
              {fixed: 1, f"(b) uniform, keep {p}": -1}, low=0)
        for p, fixed in ((0.9, "Fixed"), (0.7, "(b) Fixed, keep 0.7"))
    ),
    *(
        Claim(f"{reading} uniform beats ordered dropout, p = {p}", LOCAL, gaps[p], low=0)
        for reading, gaps in GAPS.items()
        for p in (0.9, 0.7)
    ),
    *(
        Claim(f"(a) uniform beats ordered dropout at equal density, p = {p} (not in the paper)", LOCAL,
              {f"(a) uniform, q = {p}": 1, f"(a) matched, q = {p}": -1}, low=0, of_paper=False)
        for p in (0.9, 0.7)
    ),
    *(
        Claim(f"{reading} the lead of uniform over ordered dropout (there must be one) shrinks from p = 0.9 to 0.7",
              LOCAL, {**gaps[0.7], **{label: -c for label, c in gaps[0.9].items()}}, high=0, presumes=gaps[0.9])
        for reading, gaps in GAPS.items()
    ),
    *(
        Claim(f"weighted beats simple averaging, {plan}", MEANS, {f"{plan} weighted": 1, f"{plan} simple": -1}, low=0)
        for plan in ("OPU1-2-3", "OPU2-3")
    ),
    Claim("OPU2-3 beats OPU1-2-3", MEANS,
          {"OPU2-3 simple": 0.5, "OPU2-3 weighted": 0.5, "OPU1-2-3 simple": -0.5, "OPU1-2-3 weighted": -0.5}, low=0),
    Claim("attention beats simple averaging (named, not measured in the paper)", MEANS,
          {"OPU1-2-3 attention": 0.5, "OPU2-3 attention": 0.5, "OPU1-2-3 simple": -0.5, "OPU2-3 simple": -0.5}, low=0,
          of_paper=False),
    *(
        Claim(f"leaving out parts of B2 or B3 costs little (within 2 points{against})", RESNET,
              {"-B2 (part)": 0.5, "-B3 (part)": 0.5, base: -1}, low=-2, of_paper=base == "Full")
        for base, against in FULLS.items()
    ),
    *(
        Claim(f"leaving out B2 or B3 costs little (within 6.32 points{against})", RESNET,
              {"-B2-B3 (full)": 1, base: -1}, low=-6.32, of_paper=base == "Full")
        for base, against in FULLS.items()
    ),
    Claim("-B3 (part) is above Full", RESNET, {"-B3 (part)": 1, "Full": -1}, low=0),
)  # fmt: skip


# --------------------------------------------------------------------------- judging


@dataclass(frozen=True, slots=True)
class Part:
    """A claim on one bench and split."""

    where: str
    ours: Interval
    published: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim with our numbers; `ours` is None where it was not run."""

    claim: Claim
    ours: Interval | None
    published: float | None  # of the same contrast, averaged over what the paper shows
    there: float | None  # the same over the parts that `ours` is a mean over
    verdict: str
    parts: tuple[Part, ...]
    pooled: int  # parts that `ours` is a mean over


def findings(found: Found, protocol: str, kind: str = "", back: int = 0) -> list[Finding]:
    """Every claim, judged by the protocol's score or by another kind of accuracy, at the end or tens earlier."""
    return [_judge(claim, found, protocol, kind or PROTOCOLS[protocol].score, back) for claim in CLAIMS]


def _judge(claim: Claim, found: Found, protocol: str, kind: str, back: int) -> Finding:
    parts, places = [], []
    for bench, split in _places(claim, protocol):
        values = _contrast(claim, claim.terms, found, (kind, back), bench, split)
        if not values:
            continue
        premise = _contrast(claim, claim.presumes, found, (kind, back), bench, split) if claim.presumes else {}
        where = bench.name + (f", {SPLITS[split]}" if split else "")
        ours, theirs = interval(list(values.values())), _published(claim, bench.paper, split)
        lead = interval(list(premise.values())) if premise else None
        parts.append(Part(where, ours, theirs, _verdict(claim, ours, lead)))
        if not bench.more:
            places.append((values, premise, theirs))
    published_mean = _published_mean(claim)
    if not places:
        return Finding(claim, None, published_mean, None, "not run", tuple(parts), 0)
    each, common = _enough(places)
    ours = pooled([[values[k] for k in common] for values, _, _ in each])
    lead = pooled([[premise[k] for k in common] for _, premise, _ in each]) if claim.presumes else None
    known = [theirs for _, _, theirs in each if theirs is not None]
    there = fmean(known) if known else None
    return Finding(claim, ours, published_mean, there, _verdict(claim, ours, lead), tuple(parts), len(each))


def _verdict(claim: Claim, ours: Interval, lead: Interval | None) -> str:
    """A lead that is not there cannot shrink: what is presumed is judged first."""
    presumed = judge(lead, 0, inf) if lead else "holds"
    return judge(ours, claim.low, claim.high) if presumed == "holds" else presumed


Place = tuple[Mapping[int, float], Mapping[int, float], float | None]  # seed -> contrast, seed -> premise, published


def _enough(places: Sequence[Place]) -> tuple[list[Place], list[int]]:
    """Places with enough seeds, and the seeds they share; one that has just begun would cost the others theirs."""
    enough = min(ENOUGH, max(len(values) for values, _, _ in places))
    each = [place for place in places if len(place[0]) >= enough]
    common = set.intersection(*(set(values) for values, _, _ in each))
    return (each, sorted(common)) if common else (each[:1], sorted(each[0][0]))


def _places(claim: Claim, protocol: str) -> list[tuple[Bench, str]]:
    """Where a claim is tested; one that compares splits is tested once a bench."""
    target = TARGETS[claim.target]
    across = any("@" in label for label in claim.terms)
    return [(b, "") for b in benches_of(target, protocol)] if across else places_of(target, protocol)


def _contrast(
    claim: Claim, terms: Terms, found: Found, which: tuple[str, int], bench: Bench, split: str
) -> dict[int, float]:
    """Seed -> value of the contrast, over seeds that have every row."""
    each = []
    for label, c in terms.items():
        name, _, own = label.partition("@")
        row = _row(claim.target, name)
        if row is not None and not runs_on(row, bench, own or split):
            row = _row(claim.target, claim.instead.get(name, ""))
        if row is None or not runs_on(row, bench, own or split):
            return {}
        each.append((c, scores(found, bench, own or split, row, *which)))
    common = set.intersection(*(set(s) for _, s in each))
    return {k: sum(c * s[k] for c, s in each) for k in sorted(common)}


def _row(target: str, label: str) -> Row | None:
    return next((r for r in TARGETS[target].rows if r.label == label), None)


def _published(claim: Claim, column: str, split: str) -> float | None:
    total = 0.0
    for label, c in claim.terms.items():
        name, _, own = label.partition("@")
        row = _row(claim.target, name)
        value = published.score(row.published if row else name, column, own or split)
        if value is None:
            return None
        total += c * value
    return total


def _published_mean(claim: Claim) -> float | None:
    """The contrast over everything the paper shows of it."""
    across = any("@" in label for label in claim.terms)
    splits = ("",) if across else tuple(SPLITS)
    values = [_published(claim, column, split) for column in published.COLUMNS for split in splits]
    known = [v for v in values if v is not None]
    return fmean(known) if known else None
