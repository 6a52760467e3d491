"""The pages in docs/reproduce, made from summaries alone: one for each target, and one of the claims."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from fedp3.record import write_atomic
from fedp3.reproduce import figures, published
from fedp3.reproduce.arithmetic import ARITHMETIC, Numbers, communication, parameters, upload_by_fleet
from fedp3.reproduce.cells import BENCHES, PROTOCOLS, SCORED
from fedp3.reproduce.claims import Finding, findings
from fedp3.reproduce.tables import Table, markdown, number
from fedp3.reproduce.targets import TARGETS, benches_of, cells_of
from fedp3.reproduce.training import Found, nearest_reading, progress, tables

LEGEND = (
    "G: the server's model, with the client's own head where a method keeps heads at the clients (FedCR). D: the "
    "model as it was sent to the device. P: the client's own after local training. MB up: all clients, all rounds. "
    "Step density: the share of the pruned layers' kept weights that a local step uses."
)

VERDICTS: Mapping[str, str] = {
    "holds": "hold", "does not hold": "do not", "not decided": "are not decided", "not run": "were not run"
}  # fmt: skip


def _write(path: Path, blocks: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, ("\n\n".join(block.strip() for block in blocks if block) + "\n").encode())
    return path


def _made(name: str, protocol: str) -> str:
    return f"Made by `fedp3 reproduce {name}{_flag(protocol)}`; do not edit."


def _flag(protocol: str) -> str:
    return "" if protocol == "desk" else f" --protocol {protocol}"


def _length(found: Found) -> str:
    """How long the runs were that a page shows."""
    rounds = sorted({s.rounds[-1] for runs in found.values() for s in runs.values() if s.rounds})
    return f", {' or '.join(map(str, rounds))} rounds" if rounds else ""


def _picture(path: Path | None, about: str) -> str:
    return f"![{about}]({path.name})" if path else ""


def arithmetic_page(name: str, numbers: Numbers, docs: Path) -> Path:
    """The page of a target that needs no training."""
    target = ARITHMETIC[name]
    picture = figures.parameters(docs) if name == "fig-parameters" else None
    blocks = [f"# {target.title}", _made(name, "desk"), _picture(picture, target.title)]
    return _write(docs / f"{name}.md", [*blocks, *(markdown(t) for t in target.tables(numbers))])


def training_page(name: str, found: Found, protocol: str, docs: Path) -> Path:
    """The page of a training target."""
    target = TARGETS[name]
    done, planned = progress(target, found, protocol)
    kind = PROTOCOLS[protocol].score
    blocks = [
        f"# {target.title}",
        _made(name, protocol),
        f"{target.about[0].upper()}{target.about[1:]}. Protocol {protocol}: {PROTOCOLS[protocol].about}"
        f"{_length({c.name: found.get(c.name, {}) for c in cells_of(target, protocol)})}. {done} of "
        f"{planned} runs are finished; a score is the mean of the last {SCORED} evaluations of {kind}, in percent, "
        "means over seeds; differences are paired by seed.",
        LEGEND,
        _picture(figures.differences(name, target, found, protocol, docs), f"{target.title}: published and ours"),
    ]
    if name == "fig-global-pruning":
        blocks += _pruning_blocks(found, protocol, docs)
    return _write(docs / f"{name}.md", [*blocks, *(markdown(t) for t in tables(target, found, protocol))])


def _pruning_blocks(found: Found, protocol: str, docs: Path) -> Iterator[str]:
    """Which reading comes nearest to the published drops, and the trade-off of size and accuracy."""
    target = TARGETS["fig-global-pruning"]
    yield _picture(figures.trade_off(target, found, protocol, docs), "Size against accuracy")
    for bench in benches_of(target, protocol):
        rows = [[name, number(error)] for name, error in nearest_reading(target, found, protocol, bench)]
        if len(rows) > 1:
            yield markdown(
                Table(
                    f"{bench.name}: which reading gives the published drops",
                    ["selector, mask, upload, score", "distance, points"],
                    rows,
                    (f"Root mean square over keep 0.9, 0.7, 0.5, class-wise, against {bench.paper}.",),
                )
            )


# --------------------------------------------------------------------------- the claims


def claims_page(found: Found, protocol: str, docs: Path) -> Path:
    """Every claim in one line, then where each was tested."""
    kind = PROTOCOLS[protocol].score
    judged = findings(found, protocol)
    blocks = [
        "# The paper's claims, tested",
        _made("claims", protocol),
        f"Protocol {protocol}: {PROTOCOLS[protocol].about}{_length(found)}, all participating. A claim is a difference "
        "of scores in points; it *holds* if the 95 % interval over seeds, paired, lies in the wanted range, *does not "
        "hold* if it lies outside, and is *not decided* between, or with fewer than three seeds. A claimed size counts "
        "as reproduced from half of it to twice it; how much *close* and *little* are is our choice. A claim about a "
        "lead that shrinks needs one: where there is none it does not hold, however the difference moves. *Places* are "
        "data sets and splits that have those seeds, of all that have any; *published there* is the paper's own mean "
        "over them. Over several places the wider of two intervals is taken, by the spread of the seeds' means and by "
        "the spread within places; neither says what another data set would give. Intervals are of one claim each: of "
        "twenty, one errs by chance. "
        f"What may lie behind the differences: [differences.md]({'' if protocol == 'desk' else '../'}differences.md).",
        _tally(judged),
        f"Scores are means of the last {SCORED} evaluations of {kind}. The paper does not say which model it scored, "
        f"so the same difference stands beside it by {_other(kind)} (G: the server's model, P: a client's own after "
        "local training).",
        _picture(figures.claims(judged, docs), "What each claim says, what the paper has, what we found"),
        f"To repeat: `fedp3 reproduce all{_flag(protocol)}`, or a part with `--bench` and `--no-scans`, then "
        f"`fedp3 reproduce claims{_flag(protocol)}`. What is finished is read, not run again; the same command in two "
        "terminals shares the work.",
        markdown(claim_table(judged, found, protocol)),
        markdown(_counted_table(judged, protocol)),
        markdown(_moving_table(judged, found, protocol)),
        markdown(_part_table(judged)),
        markdown(_progress_table(found, protocol)),
        markdown(_time_table(found)),
        "Pages: " + ", ".join(f"[{name}]({name}.md)" for name in (*ARITHMETIC, *TARGETS)) + ".",
    ]
    return _write(docs / "README.md", blocks)


def _tally(judged: Sequence[Finding]) -> str:
    """How many claims of the paper itself hold."""
    verdicts = Counter(f.verdict for f in judged if f.claim.of_paper)
    counts = ", ".join(f"{verdicts[v]} {words}" for v, words in VERDICTS.items() if verdicts[v])
    return (
        f"**Of {verdicts.total()} lines below that state a claim of the paper, {counts}** (local pruning stands under "
        "two readings, (a) and (b))."
    )


def _other(kind: str) -> str:
    return {"G": "P", "P": "G"}[kind]


def claim_table(judged: Sequence[Finding], found: Found, protocol: str) -> Table:
    """A line for each claim."""
    kind = PROTOCOLS[protocol].score
    also = {f.claim.text: f.ours for f in findings(found, protocol, _other(kind))}
    rows = [
        [
            f.claim.text,
            f.verdict,
            f.claim.want,
            number(f.published, sign=True),
            number(f.there, sign=True),
            f.ours.text() if f.ours else "-",
            other.text() if (other := also[f.claim.text]) else "-",
            str(f.ours.seeds) if f.ours else "0",
            f"{f.pooled} of {len(f.parts)}" if f.pooled < len(f.parts) else str(f.pooled),
        ]
        for f in judged
    ]
    ours = f"ours, {kind} [95 %]"
    columns = ["claim", "verdict", "wanted", "published", "published there", ours, _other(kind), "seeds", "places"]
    return Table("Claims that training tests", columns, rows, words=3)


def _moving_table(judged: Sequence[Finding], found: Found, protocol: str) -> Table:
    """The same differences earlier in the runs: whether a longer one would bring them nearer to the paper's."""
    at = {back: findings(found, protocol, back=back) if back else judged for back in (2, 1, 0)}
    tens = [f"evaluations -{SCORED * (back + 1)} to -{SCORED * back + 1}" for back in at]
    rows = [
        [
            f.claim.text,
            number(f.published, sign=True),
            *(number(g.ours.mean if g.ours else None, sign=True) for g in each),
        ]
        for f, *each in zip(judged, *at.values(), strict=True)
        if f.ours
    ]
    return Table("How the differences move during a run", ["claim", "published", *tens], rows)


def _part_table(judged: Sequence[Finding]) -> Table:
    rows = [
        [f.claim.text, p.where, p.verdict, number(p.published, sign=True), p.ours.text(), str(p.ours.seeds)]
        for f in judged
        for p in f.parts
    ]
    return Table("Place by place", ["claim", "where", "verdict", "published", "ours [95 %]", "seeds"], rows, words=3)


def _counted_table(judged: Sequence[Finding], protocol: str) -> Table:
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
        ["one trained layer costs 10,815 times another's upload", "does not hold", f"{times:.0f} times (CIFAR10 net)"],
    ]
    more = "More such numbers, checked one by one: [errata](ERRATA)."
    link = f"{'' if protocol == 'desk' else '../'}../errata.md"
    columns = ["claim", "verdict", "numbers"]
    return Table("Claims that counting tests", columns, rows, (more.replace("ERRATA", link),), words=3)


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
