"""Runs that share a ledger compose per record: seeds, sweeps and repeated runs add up."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fedp3
from fedp3.core.errors import InputError
from fedp3.data import from_tensors
from fedp3.data.shards import Shard
from fedp3.privacy import accountant
from fedp3.privacy.ledger import Charge
from fedp3.privacy.record_ledger import join, largest_epsilon

DATA = from_tensors(torch.randn(30, 4), torch.arange(30) % 2)
DELTA = 1e-5


def charge(client: int, t: int = 0, z: float = 1.2) -> Charge:
    return Charge(client=client, t=t, steps=10, noise_multiplier=z, sample_rate=0.1)


def shard(first: int, end: int) -> Shard:
    return Shard(torch.arange(first, end), torch.arange(0))


def test_a_record_pays_for_every_run_and_client_that_had_it(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    first = join(path, "a", DATA, {0: shard(0, 10), 1: shard(10, 20)}, seeded=False)
    first.charge([charge(0), charge(1)])
    first.charge([charge(0, t=1)])
    assert largest_epsilon(path, DELTA) == accountant.epsilon({(1.2, 0.1): 20}, DELTA)
    # Another run gives record 19 to another client, together with records that were never used.
    second = join(path, "b", DATA, {0: shard(19, 25)}, seeded=False)
    second.charge([charge(0, z=2.0)])
    of_19 = accountant.epsilon({(1.2, 0.1): 10, (2.0, 0.1): 10}, DELTA)
    assert second.epsilon_max(DELTA) == of_19
    assert largest_epsilon(path, DELTA) == max(of_19, accountant.epsilon({(1.2, 0.1): 20}, DELTA))


def test_a_seeded_round_that_is_repeated_is_one_release_and_an_unseeded_one_is_two(
    tmp_path: Path,
) -> None:
    for seeded, steps in ((True, 10), (False, 20)):
        path = tmp_path / f"{seeded}.jsonl"
        for _ in range(2):  # the run is resumed, and round 0 is computed again
            join(path, "a", DATA, {0: shard(0, 10)}, seeded=seeded).charge([charge(0)])
        assert largest_epsilon(path, DELTA) == accountant.epsilon({(1.2, 0.1): steps}, DELTA)


def test_limit_cases_nothing_charged_and_no_noise(tmp_path: Path) -> None:
    ledger = join(tmp_path / "a.jsonl", "a", DATA, {0: shard(0, 3)}, seeded=False)
    assert ledger.epsilon_max(DELTA) == 0
    ledger.charge([charge(0, z=0.0)])
    assert math.isinf(ledger.epsilon_max(DELTA))


def test_the_file_alone_does_not_tell_whose_records_are_in_it(tmp_path: Path) -> None:
    texts = []
    for name in "ab":
        join(tmp_path / name, "run", DATA, {0: shard(0, 3)}, seeded=False)
        texts.append((tmp_path / name).read_text())
    assert texts[0] != texts[1], "each file has its own secret"
    (tmp_path / "a.key").unlink()
    with pytest.raises(InputError, match="cannot be used without its key"):
        join(tmp_path / "a", "run", DATA, {0: shard(0, 3)}, seeded=False)


def test_several_seeds_of_one_run_report_what_they_cost_together(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    path = str(tmp_path / "all.jsonl")
    spent = []
    for seed in (0, 1):
        result = fedp3.run(
            net,
            DATA,
            method="fedp3",
            partition={"kind": "iid", "clients": 2},
            plan={"layers": "full"},
            run={"rounds": 1, "clients_per_round": 0, "seed": seed, "final_p": False},
            local={"steps": 2},
            privacy={
                "enabled": True,
                "noise_multiplier": 2.0,
                "delta": 1e-3,
                "ledger": path,
            },
        )
        spent.append(result.outcome.result["epsilon_over_runs"])
    assert spent[0] == accountant.epsilon({(2.0, 0.1): 2}, 1e-3)
    assert spent[1] == accountant.epsilon({(2.0, 0.1): 4}, 1e-3)
