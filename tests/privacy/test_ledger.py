"""The ledger only grows, on disk before tasks are sent; a device refuses what costs too much."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fedp3.core.errors import InputError, RunError
from fedp3.core.files import locked
from fedp3.privacy import accountant
from fedp3.privacy.ledger import (
    FILE,
    Budget,
    Charge,
    Ledger,
    Policy,
    append,
    composed,
    open_ledger,
    permit,
    read,
    summary,
)
from fedp3.privacy.settings import Mechanism

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
        accountant="RDP",
        allowed_steps=allowed,
    )


def test_a_client_can_pay_until_its_steps_are_spent() -> None:
    ledger = Ledger(budget(OS))
    for t in range(4):
        assert ledger.can_pay(3, t)
        ledger.charge([3], t)
    assert not ledger.can_pay(3, 4) and ledger.can_pay(4, 4)
    assert ledger.spent(3, 4) == 40
    assert ledger.epsilons() == {3: accountant.epsilon({(1.2, 0.1): 40}, 1e-5, "RDP")}
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
    assert [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()] == [
        {"client": i, "t": 2, "steps": 10, "noise_multiplier": 1.2, "sample_rate": 0.1, "run": "r"}
        for i in (5, 6)
    ]


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
    assert ledger.epsilons() == {0: accountant.epsilon({(1.2, 0.1): 10}, 1e-5, "RDP")}


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


# --------------------------------------------------------------------------- on a device


def test_a_device_pays_over_all_runs_and_then_refuses(tmp_path: Path) -> None:
    policy = Policy(4.0, 1e-5)
    reasons = [permit(tmp_path, 7, t, OS, 10, policy, f"run{t % 2}") for t in range(8)]
    paid = reasons.index(next(r for r in reasons if r))
    assert 0 < paid < 8 and all(reasons[paid:]) and len(read(tmp_path)) == paid, (
        "a refused task is not charged"
    )
    assert accountant.epsilon(composed(read(tmp_path)), 1e-5) <= 4.0
    assert "this device allows 4" in reasons[-1]
    assert not permit(tmp_path, 8, 0, OS, 10, policy), (
        "another client of the same folder has its own account"
    )


def test_a_device_that_is_asked_twice_at_once_pays_one_after_the_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as elsewhere:
        with locked(
            tmp_path, ".ledger"
        ):  # as the first of two tasks holds it between reading and writing
            second = elsewhere.submit(permit, tmp_path, 7, 1, OS, 10, Policy(8.0))
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            append(
                tmp_path,
                [
                    Charge(
                        client=7,
                        t=0,
                        steps=10,
                        noise_multiplier=OS.noise_multiplier,
                        sample_rate=OS.sample_rate,
                    )
                ],
            )
        assert not second.result()
    assert [c.t for c in read(tmp_path)] == [0, 1]


def test_a_device_composes_runs_of_different_noise(tmp_path: Path) -> None:
    assert not permit(tmp_path, 0, 0, replace(OS, noise_multiplier=1.0), 10, Policy(3.5))
    alone = accountant.epsilon({(1.3, 0.1): 10}, 1e-5)
    assert alone < 3.5
    assert permit(tmp_path, 0, 0, replace(OS, noise_multiplier=0.8), 10, Policy(3.5))


def test_a_device_refuses_noise_it_did_not_draw_and_runs_without_any(tmp_path: Path) -> None:
    assert "seeded" in permit(tmp_path, 0, 0, SEEDED, 10, Policy(8.0))
    assert "LDP" in permit(tmp_path, 0, 0, None, 10, Policy(8.0))
    assert not read(tmp_path)


def test_a_summary_is_a_range_and_never_one_number() -> None:
    assert summary({0: 1.0, 1: 5.0, 2: 2.0}) == {"min": 1.0, "median": 2.0, "max": 5.0}
    assert composed(
        [
            Charge(client=0, t=0, steps=3, noise_multiplier=1.0, sample_rate=0.1),
            Charge(client=0, t=1, steps=4, noise_multiplier=1.0, sample_rate=0.1),
        ]
    ) == {(1.0, 0.1): 7}
