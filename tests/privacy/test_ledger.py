"""The ledger only grows, is on disk before tasks are sent, and shows what is missing or changed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedp3.core.errors import InputError, RunError
from fedp3.privacy import accountant
from fedp3.privacy.ledger import (
    FILE,
    NO_LINE,
    Anchor,
    Charge,
    Ledger,
    append,
    composed,
    open_ledger,
    read,
    summary,
)
from fedp3.privacy.settings import Budget, Mechanism

OS, SEEDED = (
    Mechanism(clip=1.0, noise_multiplier=1.2, sample_rate=0.1, randomness="os"),
    Mechanism(clip=1.0, noise_multiplier=1.2, sample_rate=0.1, randomness="seeded"),
)


def budget(mechanism: Mechanism, allowed: int = 40) -> Budget:
    return Budget(
        mechanism=mechanism,
        steps_per_task=10,
        epsilon=8.0,
        delta=1e-5,
        allowed_steps=allowed,
    )


def test_a_client_can_pay_until_its_steps_are_spent() -> None:
    ledger = Ledger(budget(OS))
    for t in range(4):
        assert ledger.can_pay(3, t)
        ledger.charge([3], t)
    assert not ledger.can_pay(3, 4) and ledger.can_pay(4, 4)
    assert ledger.spent(3, 4) == 40
    assert ledger.epsilons() == {3: accountant.epsilon({(1.2, 0.1): 40}, 1e-5)}
    assert ledger.epsilon_max() == ledger.epsilons()[3]


def test_a_round_redone_is_charged_again_unless_it_is_the_identical_release(tmp_path: Path) -> None:
    for mechanism, want in ((OS, 30), (SEEDED, 20)):
        place = tmp_path / mechanism.randomness
        place.mkdir()
        first = open_ledger(budget(mechanism), "r", place)
        first.charge([0, 1], 0)
        first.charge([0], 1)
        again = open_ledger(
            budget(mechanism), "r", place
        )  # after a crash: round 1 is run once more
        assert again.spent(0, 1) == (20 if mechanism is OS else 10), (
            "a replay must decide as the first time did"
        )
        again.charge([0], 1)
        assert again.spent(0, 2) == want
        assert open_ledger(budget(mechanism), "r", place).spent(0, 2) == want
        assert len(read(place)) == 4, "every charge is on record"


def test_charges_are_on_disk_before_charge_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append((tmp_path / FILE).stat().st_size))
    open_ledger(budget(OS), "r", tmp_path).charge([5, 6], 2)
    assert synced == [(tmp_path / FILE).stat().st_size]
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    want = {"t": 2, "steps": 10, "noise_multiplier": 1.2, "sample_rate": 0.1, "run": "r"}
    want |= {"released": "update", "account": "training"}
    want |= {"epsilon": accountant.epsilon({(1.2, 0.1): 10}, 1e-5)}
    for i, line in zip((5, 6), lines, strict=True):
        assert line.pop("time").endswith("+00:00") and len(line.pop("previous")) == 64
        assert line == {"client": i, **want}


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    ledger = open_ledger(budget(OS), "r", tmp_path)
    ledger.charge([0], 0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"client": 0, "t": 1')
    again = open_ledger(budget(OS), "r", tmp_path)
    assert again.spent(0, 9) == 10
    again.charge([0], 1)
    assert open_ledger(budget(OS), "r", tmp_path).spent(0, 9) == 20


def test_a_ledger_of_an_older_version_still_counts(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"client":0,"t":3,"steps":10,"z":1.2,"q":0.1,"run":"r"}\n')
    ledger = open_ledger(budget(OS), "r", tmp_path)
    assert ledger.spent(0, 4) == 10
    assert ledger.epsilons() == {0: accountant.epsilon({(1.2, 0.1): 10}, 1e-5)}


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '{"client": 0}',
        '{"client":0,"t":0,"steps":-5,"noise_multiplier":1,"sample_rate":0.1}',
        "[]",
        "7",
    ],
)
def test_a_ledger_that_cannot_be_read_is_not_taken_for_empty(line: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(line + "\n")
    with pytest.raises(RunError, match="line 1"):
        read(tmp_path)


def test_a_run_does_not_go_on_with_other_noise(tmp_path: Path) -> None:
    open_ledger(budget(OS), "r", tmp_path).charge([0], 0)
    with pytest.raises(InputError, match=r"noise multiplier 1.2 .* now they would be 1.3"):
        open_ledger(budget(replace(OS, noise_multiplier=1.3)), "r", tmp_path)


def test_a_disk_that_is_full_stops_the_task(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing was sent"):
        open_ledger(budget(OS), "r", tmp_path / "missing").charge([0], 0)


# --------------------------------------------------------------------------- the chain


def charge(t: int = 0) -> Charge:
    return Charge(client=0, t=t, steps=10, noise_multiplier=1.2, sample_rate=0.1)


def test_a_line_that_was_changed_left_out_or_moved_is_noticed(tmp_path: Path) -> None:
    append(tmp_path, [charge(t) for t in range(4)])
    lines = (tmp_path / FILE).read_text().splitlines(keepends=True)
    assert json.loads(lines[0])["previous"] == NO_LINE
    cheaper = lines[1].replace('"steps": 10', '"steps": 1')
    unchained = json.dumps({k: v for k, v in json.loads(lines[2]).items() if k != "previous"})
    for wrong in (
        [lines[0], cheaper, *lines[2:]],
        [lines[0], *lines[2:]],
        [lines[1], lines[0], *lines[2:]],
        [*lines[:2], unchained + "\n", lines[3]],
    ):
        (tmp_path / FILE).write_text("".join(wrong))
        with pytest.raises(RunError, match="was changed before line"):
            read(tmp_path)
    (tmp_path / FILE).write_text("".join(lines))
    assert len(read(tmp_path)) == 4


def test_an_anchor_notices_a_ledger_that_was_deleted_cut_or_replaced(tmp_path: Path) -> None:
    append(tmp_path, [charge(0)])
    anchor = append(tmp_path, [charge(1)])
    assert anchor.entries == 2
    append(tmp_path, [charge(2)])
    assert len(read(tmp_path, anchor)) == 3, "it may have grown since"
    first = (tmp_path / FILE).read_text().splitlines(keepends=True)[0]
    (tmp_path / FILE).write_text(first)
    with pytest.raises(RunError, match="deleted, cut or replaced"):
        read(tmp_path, anchor)
    (tmp_path / FILE).unlink()
    with pytest.raises(RunError, match="deleted, cut or replaced"):
        read(tmp_path, anchor)
    append(tmp_path, [charge(5), charge(6)])
    with pytest.raises(RunError, match="deleted, cut or replaced"):
        read(tmp_path, anchor)
    assert read(tmp_path, Anchor()), "an anchor of an empty ledger fits every ledger"


def test_a_run_whose_ledger_is_gone_is_not_resumed_as_if_nothing_was_spent(tmp_path: Path) -> None:
    ledger = open_ledger(budget(OS), "r", tmp_path)
    ledger.charge([0], 0)
    ledger.charge([0], 1)
    assert open_ledger(budget(OS), "r", tmp_path, rounds=2).spent(0, 2) == 20
    with pytest.raises(RunError, match="missing or incomplete: the run has finished 3 rounds"):
        open_ledger(budget(OS), "r", tmp_path, rounds=3)
    (tmp_path / FILE).unlink()
    with pytest.raises(RunError, match="missing or incomplete"):
        open_ledger(budget(OS), "r", tmp_path, rounds=1)


def test_a_summary_is_a_range_and_never_one_number() -> None:
    assert summary({0: 1.0, 1: 5.0, 2: 2.0}) == {"min": 1.0, "median": 2.0, "max": 5.0}
    assert composed(
        [
            Charge(client=0, t=0, steps=3, noise_multiplier=1.0, sample_rate=0.1),
            Charge(client=0, t=1, steps=4, noise_multiplier=1.0, sample_rate=0.1),
        ]
    ) == {(1.0, 0.1): 7}
