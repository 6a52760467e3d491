"""Data sets that are read row by row: the same bits everywhere, random transforms drawn anew."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedp3
from fedp3.core.errors import DataError, InputError
from fedp3.core.randomness import Stream, stream
from fedp3.data import from_torch, records

RNG = torch.Generator().manual_seed(0)
Y = torch.arange(60) % 3
X = torch.randn(60, 1, 4, 4, generator=RNG) + 2 * torch.eye(3, 4)[Y][:, None, None]
SETTINGS: dict[str, Any] = {
    "partition": {"kind": "iid", "clients": 3},
    "plan": {"layers": "full"},
    "local": {"steps": 3, "batch": 8},
    "run": {"rounds": 2, "clients_per_round": 2, "eval_every": 1},
}


def net() -> nn.Module:
    """A network that is not stacked, so that all paths compute the same way."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 3)
    )


class Noisy(Dataset[Any]):
    """Adds noise of Python, NumPy and torch to every row, and counts reads."""

    def __init__(self, noise: float = 0.3, ids: list[str] | None = None) -> None:
        self.noise, self.reads = noise, 0
        if ids is not None:
            self.ids = ids

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.reads += 1
        drawn = random.random() + float(np.random.rand()) + torch.randn(1, 4, 4)  # noqa: NPY002
        return X[i] + self.noise * drawn, int(Y[i])


class Stored(Noisy):
    """Also stores its labels."""

    targets = Y


class Wrong(Noisy):
    """Stores other labels than its rows have, as with a target_transform."""

    targets = (Y + 1) % 3


def run(data: Any, **more: Any) -> Any:
    return fedp3.run(net(), data, **{**SETTINGS, **more})


@pytest.fixture(scope="module")
def noisy() -> Any:
    return run(Noisy(), lazy=True)


def test_rows_without_draws_give_the_bits_of_the_same_samples_in_memory() -> None:
    in_memory, lazy = run((X, Y)), run(TensorDataset(X, Y), lazy=True)
    assert lazy.model_sha256 == in_memory.model_sha256 and lazy.scores == in_memory.scores


def test_rows_with_draws_repeat_to_the_bit_with_workers_and_after_a_resume(
    noisy: Any, tmp_path: Any
) -> None:
    assert noisy.model_sha256 != run((X, Y)).model_sha256
    random.seed(5)  # what the global generators are at does not matter
    torch.manual_seed(5)
    assert run(Noisy(), lazy=True, workers=2).model_sha256 == noisy.model_sha256
    out = tmp_path / "run"
    stop = fedp3.Callback(stop=lambda history: "enough" if len(history) == 1 else None)
    run(Noisy(), lazy=True, out=out, callbacks=[stop])
    again = run(Stored(), lazy=True, out=out, resume=True)
    assert again.model_sha256 == noisy.model_sha256 and again.scores == noisy.scores


def test_a_row_is_drawn_anew_for_every_address_and_the_same_for_one() -> None:
    data = from_torch(Noisy(), lazy=True)
    at = torch.tensor([4, 7])

    def read(*address: int) -> Tensor:
        return records(data, at, None, lambda i: stream(3, Stream.ROW, *address, i)).x

    assert torch.equal(read(0, 1, 2), read(0, 1, 2))
    others = [read(1, 1, 2), read(0, 2, 2), read(0, 1, 3), records(data, at).x]
    assert all(not torch.equal(read(0, 1, 2), other) for other in others)
    backwards = records(data, at.flip(0), None, lambda i: stream(3, Stream.ROW, 0, 1, 2, i)).x
    assert torch.equal(backwards.flip(0), read(0, 1, 2)), "draws belong to the row, not its place"


def test_the_global_generators_are_as_they_were_after_a_read() -> None:
    data = from_torch(Noisy(), lazy=True)

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))  # noqa: NPY002

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    expected = drawn()
    seed()
    records(data, torch.arange(9))
    assert drawn() == expected


def test_stored_labels_spare_a_pass_and_wrong_ones_are_not_believed() -> None:
    stored, wrong, without = Stored(), Wrong(), Noisy()
    for source in (stored, wrong, without):
        assert torch.equal(from_torch(source, lazy=True).y, Y)
    assert stored.reads < 30 and without.reads == 1 + len(X)
    assert wrong.reads > len(X)


def test_ldp_needs_identifiers_of_rows() -> None:
    private = {
        "privacy": {"enabled": True, "epsilon": 50.0, "sample_rate": 0.3, "randomness": "seeded"}
    }
    with pytest.raises(InputError, match="`ids`, a stable text for each row"):
        run(Noisy(), lazy=True, **private)
    names = [f"patient {i}" for i in range(len(X))]
    first, again = (run(Noisy(ids=names), lazy=True, **private) for _ in range(2))
    assert first.model_sha256 == again.model_sha256
    with pytest.raises(DataError, match="59 different ids"):
        from_torch(Noisy(ids=[*names[:-1], names[0]]), lazy=True)


def test_a_label_that_changes_between_two_reads_is_refused() -> None:
    class Shifting(Noisy):
        shift = 0

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return X[i], int(Y[i] + self.shift) % 3

    source = Shifting()
    data = from_torch(source, lazy=True)
    records(data, torch.arange(2))
    source.shift = 1
    with pytest.raises(DataError, match="the label of sample 0 is 1, and it was 0 before"):
        records(data, torch.arange(2))


def test_each_client_may_have_rows_of_its_own() -> None:
    halves = [TensorDataset(X[:30], Y[:30]), TensorDataset(X[30:], Y[30:])]
    settings = {"partition": {}, "run": {"rounds": 1, "clients_per_round": 0}}
    lazy = run(dict(zip("ab", halves, strict=True)), lazy=True, **settings)
    assert lazy.model_sha256 == run(halves, **settings).model_sha256
    assert [row["name"] for row in lazy.per_client] == ["a", "b"]


def test_targets_that_change_with_their_inputs_are_those_of_the_read() -> None:
    class Flipped(Dataset[Any]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            sign = random.choice([-1, 1])
            return sign * X[i], sign * X[i].mean().view(1)

    data = from_torch(Flipped(), lazy=True, labelled=False)
    read = records(data, torch.arange(20), None, lambda i: stream(9, Stream.ROW, i))
    assert torch.allclose(read.x.flatten(1).mean(1, keepdim=True), read.y)
    assert not torch.equal(read.y, data.y[:20])


def test_workers_need_a_data_set_that_can_be_pickled() -> None:
    class Local(Noisy):
        pass

    with pytest.raises(InputError, match="a data set that is read lazily that can be pickled"):
        run(Local(), lazy=True, workers=2)
