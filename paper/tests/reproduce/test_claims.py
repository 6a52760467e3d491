"""Claims judged from made-up results whose answer is known."""

import re
from dataclasses import replace

import pytest

from fedp3_paper.reproduce import claims, pages, training, verdicts
from fedp3_paper.reproduce.cells import BENCHES
from fedp3_paper.reproduce.claims import CLAIMS, findings
from fedp3_paper.reproduce.summary import Summary
from fedp3_paper.reproduce.targets import TARGETS, cells_of

BASE = Summary(
    cell="",
    protocol="desk",
    seed=0,
    date="2026-01-01",
    rounds=list(range(1, 13)),
    scores={},
    final={},
    mb_up=10.0,
    mb_down=20.0,
    density=1.0,
    seconds=3.0,
    model_sha256="0" * 64,
    config={"run": {}},
    versions={"torch": "x"},
)


def made(score, seeds=3, cells=("mnist-mlp/", "fashion-mlp/")):
    """Results in which every cell scores what `score(cell, seed)` says, in percent."""
    found = {}
    for target in TARGETS.values():
        for cell in cells_of(target, "desk"):
            if cell.name.startswith(cells):
                for k in range(seeds):
                    value = score(cell, k) / 100
                    line = [0.0, 0.0] + [value] * 10  # only the last ten count
                    s = replace(
                        BASE, cell=cell.name, seed=k, scores={"G": line, "D": line, "P": line}
                    )
                    found.setdefault(cell.name, {})[k] = s
    return found


def judged_by_text(found):
    return {f.claim.text: f for f in findings(found, "desk")}


def jitter(seed):
    return (0.0, 0.3, -0.2, 0.1, 0.05)[seed]


def test_a_score_is_the_mean_of_the_last_ten_evaluations():
    s = replace(
        BASE, scores={"G": [0.0] * 5 + [i / 10 for i in range(10)], "D": [], "P": [None, 0.5]}
    )
    assert s.score("G") == pytest.approx(45)
    assert s.score("G", back=1) == 0 and s.score("G", back=2) is None
    assert s.score("D") is None
    assert s.score("P") == pytest.approx(50)


def test_noise_that_pairs_share_does_not_blur_a_claim():
    """Seeds differ by 20 points, the variants by one: paired, that is decided."""
    lower = {"opu2": 1.0, "lowerb": 2.0}
    found = made(
        lambda c, k: (
            60 + 20 * k - lower.get(c.variant.name, 0.0) + 0.1 * jitter(k) * len(c.variant.name)
        )
    )
    judged = judged_by_text(found)
    assert judged["OPU2 loses against FedAvg"].verdict == "holds"
    assert judged["LowerB loses against OPU2: it is the lower bound"].verdict == "holds"


def test_a_claim_turned_round_does_not_hold():
    found = made(lambda c, k: 80 + (c.variant.name == "opu2") * (1 + jitter(k)))
    assert judged_by_text(found)["OPU2 loses against FedAvg"].verdict == "does not hold"


def test_noise_alone_decides_nothing():
    found = made(lambda c, k: 80 + (c.variant.name == "opu2") * (k - 1))
    f = judged_by_text(found)["OPU2 loses against FedAvg"]
    assert f.verdict == "not decided" and f.ours.low < 0 < f.ours.high


def test_a_lead_that_is_not_there_cannot_shrink():
    def shrinks(lead):  # uniform leads ordered dropout by `lead` at 0.9 and by a point less at 0.7
        ways = {"local-a-uniform-0.9": lead, "local-a-uniform-0.7": lead - 1}
        found = made(
            lambda c, k: (
                80 + sum(v + 0.1 * jitter(k) for w, v in ways.items() if c.variant.name.endswith(w))
            )
        )
        return next(
            f for text, f in judged_by_text(found).items() if text.startswith("(a) the lead")
        )

    assert shrinks(3.0).verdict == "holds"
    there_is_none = shrinks(-3.0)
    assert there_is_none.verdict == "does not hold" and there_is_none.ours.high < 0
    assert {part.verdict for part in there_is_none.parts} == {"does not hold"}


def test_one_seed_decides_nothing():
    judged = judged_by_text(made(lambda c, k: 80 - 5 * (c.variant.name == "opu2"), seeds=1))
    assert judged["OPU2 loses against FedAvg"].verdict == "not decided"


def test_what_was_not_run_says_so():
    judged = judged_by_text({})
    assert {f.verdict for f in judged.values()} == {"not run"}
    assert (
        judged_by_text(made(lambda c, k: 80))[
            "FedCR-OPU3 loses little against FedCR (within 5 points)"
        ].verdict
        == "not run"
    )


def test_a_gap_of_splits_is_taken_within_a_bench():
    found = made(lambda c, k: 80 + 4 * (c.split == "classes") + jitter(k))
    f = next(
        f for text, f in judged_by_text(found).items() if text.startswith("Dirichlet costs little")
    )
    assert f.ours.mean == pytest.approx(4) and [p.where for p in f.parts] == [
        "mnist-mlp",
        "fashion-mlp",
    ]


def test_a_bench_that_has_just_begun_does_not_cost_the_others_their_seeds():
    found = made(lambda c, k: 80 - (c.variant.name == "opu2") * (1 + 0.1 * jitter(k)))
    found |= made(lambda c, k: 50, seeds=1, cells=("fashion-cnn/",))
    f = judged_by_text(found)["OPU2 loses against FedAvg"]
    assert f.ours.seeds == 3 and f.verdict == "holds" and len(f.parts) == 6


def test_places_without_a_seed_in_common_do_not_end_in_an_error():
    found = made(lambda c, k: 80 - (c.variant.name == "opu2"), cells=("mnist-mlp/",))
    for runs in (later := made(lambda c, k: 70, cells=("fashion-mlp/",))).values():
        for k in list(runs):
            runs[k + 3] = replace(runs.pop(k), seed=k + 3)
    f = judged_by_text(found | later)["OPU2 loses against FedAvg"]
    assert f.ours.mean == pytest.approx(-1) and f.pooled == 1 and len(f.parts) == 4


def test_how_a_difference_moves_is_seen_by_tens_of_evaluations():
    found = made(lambda c, k: 80)
    for cell, runs in found.items():
        for k, s in runs.items():
            line = [0.8] * 20 + [0.8 - 0.05 * cell.endswith("/opu2")] * 10
            runs[k] = replace(s, scores=dict.fromkeys("GDP", line))
    at = [
        next(f for f in findings(found, "desk", back=b) if f.claim.text.startswith("OPU2 loses"))
        for b in (2, 1, 0)
    ]
    assert [f.ours.mean for f in at] == pytest.approx([0, 0, -5])


def test_the_published_number_beside_ours_is_of_the_same_places():
    f = judged_by_text(made(lambda c, k: 80))["OPU2 loses against FedAvg"]
    assert f.there == pytest.approx(((91.72 - 94.24) + (89.44 - 91.40)) / 2)
    assert f.published == pytest.approx(-4.60, abs=0.01)


def test_longer_and_wider_benches_stand_beside_and_the_papers_own_data_count():
    found = made(lambda c, k: 80 - (c.variant.name == "opu2") * (1 + 0.1 * jitter(k)))
    longer = made(lambda c, k: 80 + 9 * (c.variant.name == "opu2"), cells=("mnist-mlp-k90/",))
    f = judged_by_text(found | longer)["OPU2 loses against FedAvg"]
    assert f.verdict == "holds" and f.pooled == 4 and len(f.parts) == 6
    assert not BENCHES["emnist-mlp"].more and not BENCHES["cifar100-cnn-5"].more


def test_published_contrasts_are_those_of_the_paper():
    judged = judged_by_text({})
    assert judged[
        "pruning to 0.9 costs about 5.43 (printed: 5.32) points"
    ].published == pytest.approx(-5.43, abs=0.01)
    assert judged["OPU2-3 beats OPU1-2-3"].published == pytest.approx(1.89, abs=0.01)
    shrinks = next(f for text, f in judged.items() if text.startswith("(a) the lead"))
    assert shrinks.published == pytest.approx(3.29 - 3.41, abs=0.02)
    blocks = judged["leaving out B2 or B3 costs little (within 6.32 points)"]
    assert blocks.published == pytest.approx(-6.32, abs=0.01) and blocks.there is None


def test_claims_name_rows_that_exist_or_are_announced():
    announced = {"FedCR", "FedCR-OPU3"}
    for claim in CLAIMS:
        labels = {label.partition("@")[0] for label in claim.terms}
        assert labels <= {row.label for row in TARGETS[claim.target].rows} | announced
        assert sum(claim.terms.values()) == pytest.approx(0), "a contrast"
        assert claim.low < claim.high


def test_the_reading_that_matches_the_published_drops_is_found():
    drops = {"0.9": 5.49, "0.7": 11.39, "0.5": 25.77}  # EMNIST-L's, class-wise

    def score(cell, seed):
        keep = cell.variant.name.split("-")[1] if cell.variant.name.startswith("prune-") else ""
        hit = cell.variant.name.endswith("-random-free-zeros")
        return 90 - (drops[keep] if hit else 1.0 if keep else 0.0)

    bench = next(
        b
        for b in training.places_of(TARGETS["fig-global-pruning"], "desk")
        if b[0].name == "fashion-mlp"
    )[0]
    ranked = training.nearest_reading(TARGETS["fig-global-pruning"], made(score), "desk", bench)
    assert ranked[0][0] in ("random, not frozen, zeros, G", "random, not frozen, zeros, D")
    assert ranked[0][1] == pytest.approx(0, abs=0.01) and ranked[2][1] > 5


def test_pages_show_what_was_run_and_link_to_what_exists(tmp_path):
    found = made(lambda c, k: 80 + jitter(k) - len(c.variant.name) / 10)
    docs = tmp_path
    for name, target in pages.ARITHMETIC.items():
        pages.arithmetic_page(name, target.numbers(), docs)
    for name in TARGETS:
        pages.training_page(name, found, "desk", docs)
    page = verdicts.claims_page(found, "desk", docs)
    for by_hand in ("differences.md", "errata.md"):
        (docs / by_hand).touch()
    for path in docs.glob("*.md"):
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            assert (docs / target).exists(), f"{path.name} links to {target}"
    text = page.read_text()
    assert all(claim.text in text for claim in CLAIMS)
    assert "| 5 " not in text and "not run" in text
    assert text.count("\n| OPU2 loses against FedAvg") == 1 + 1 + 4
    assert "mnist-mlp, S1, class-wise" in (docs / "fig-overlap.md").read_text()
    assert len(claims.findings(found, "desk")) == len(CLAIMS)


def test_the_tally_counts_the_papers_own_claims(tmp_path):
    found = made(lambda c, k: 80 - (c.variant.name == "opu2") * (1 + jitter(k)))
    page = verdicts.claims_page(found, "desk", tmp_path).read_text()
    own = [f.verdict for f in findings(found, "desk") if f.claim.of_paper]
    assert f"**Of the {len(own)} lines of the first table that state a claim of the paper, " in page
    assert page.count(f", {own.count('holds')} hold, ") == 2 and own.count("holds")
    assert page.count(f"{own.count('not run')} were not run") == 2, (
        "by G and by P, which are the same here"
    )
    assert all("in the paper)" in c.text for c in CLAIMS if not c.of_paper)
