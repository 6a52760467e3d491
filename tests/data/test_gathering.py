"""What people pass to `fedp3.run` as data: every kind trains, and the rest is refused in words."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import fedp3
from fedp3.core.errors import InputError
from fedp3.data import gather

RNG = torch.Generator().manual_seed(0)
Y = torch.arange(60) % 3
X = torch.randn(60, 4, generator=RNG) + 2 * torch.eye(3, 4)[Y]
NAMES = np.array(["ash", "birch", "cedar"])
ROWS = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
SETTINGS: dict[str, Any] = {"run": {"rounds": 1}}


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


class Frame:
    """Something with `__array__`, as columns of pandas are."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.ndim = values, values.ndim

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values

    def __len__(self) -> int:
        return len(self.values)


def trained(data: Any, **more: Any) -> Any:
    return fedp3.run(net(), data, **{**SETTINGS, **more})


@pytest.fixture(scope="module")
def usual() -> str:
    return str(trained((X, Y)).model_sha256)


# Different ways to write the same data.
SAME = {
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "a list of two": lambda: [X, Y],
    "nested lists": lambda: (X.tolist(), Y.tolist()),
    "columns": lambda: (Frame(X.numpy()), Frame(Y.numpy())),
    "labels one by one": lambda: (X, list(Y)),
    "labels of Python": lambda: (X, np.array(Y.tolist(), object)),
    "texts": lambda: (X, NAMES[Y].tolist()),
    "an array of texts": lambda: (X, NAMES[Y]),
    "bytes": lambda: (X, NAMES[Y].astype("S")),
    "a data set": lambda: TensorDataset(X, Y),
    "rows": lambda: ROWS,
    "rows with texts": lambda: [(x, str(NAMES[y])) for x, y in ROWS],
    "a loader": lambda: DataLoader(TensorDataset(X, Y), shuffle=True),
    "a Dataset": lambda: fedp3.from_tensors(X, Y),
}


@pytest.mark.parametrize("form", SAME)
def test_the_same_data_in_another_form_give_the_same_bits(form: str, usual: str) -> None:
    assert trained(SAME[form]()).model_sha256 == usual


def test_the_data_of_each_client_by_number_or_by_name(tmp_path: Any) -> None:
    halves = [(X[:30], NAMES[Y[:30]]), (X[30:], NAMES[Y[30:]])]
    numbered = trained(halves)
    named = trained({"anna": halves[0], "bob": halves[1]}, out=tmp_path / "run")
    assert named.model_sha256 == numbered.model_sha256
    assert [row["name"] for row in named.per_client] == ["anna", "bob"]
    assert "name" not in numbered.per_client[0]
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    page = named.report(tmp_path / "page.html").read_text()
    assert "0 anna" in page and "1 bob" in page
    assert about["client_names"] == ["anna", "bob"] and about["class_names"] == list(NAMES)


def test_texts_mean_the_same_for_all_clients_and_in_the_test_set() -> None:
    clients = [(X[Y < 2], NAMES[Y[Y < 2]]), (X[Y > 0], NAMES[Y[Y > 0]])]
    data = gather(clients, test=(X[Y == 2], NAMES[Y[Y == 2]])).data
    assert data.class_names == tuple(NAMES) and data.classes == 3
    assert torch.equal(data.y, torch.cat([Y[Y < 2], Y[Y > 0]]))
    assert data.test is not None and set(data.test.y.tolist()) == {2}
    result = trained(clients)
    assert result.class_names == tuple(NAMES)


def test_exported_networks_know_the_texts(tmp_path: Any) -> None:
    about = trained((X, NAMES[Y])).export(tmp_path / "net", format="safetensors")
    assert about["class_names"] == list(NAMES)
    assert "0: ash, 1: birch, 2: cedar" in (tmp_path / "net" / "README.md").read_text()


def test_training_and_test_data_as_pairs_data_sets_loaders_or_by_name() -> None:
    train, test = TensorDataset(X[:40], Y[:40]), TensorDataset(X[40:], Y[40:])
    pairs = trained(((X[:40], Y[:40]), (X[40:], Y[40:])))
    assert pairs.outcome.result["final"]["C"]["samples"] == 20
    for form in ((train, test), (DataLoader(train), DataLoader(test)), (ROWS[:40], ROWS[40:])):
        other = trained(form)
        assert (other.model_sha256, other.scores) == (pairs.model_sha256, pairs.scores)
    assert trained(train, test=test).scores == pairs.scores


def test_a_loader_gives_its_batch_size_unless_the_settings_name_one() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
    assert trained(loader).experiment.config.local.batch == 16
    assert trained(loader, local={"batch": 4}).experiment.config.local.batch == 4


def test_integers_stay_integers_where_the_network_reads_tokens() -> None:
    tokens = torch.randint(2**24, 2**24 + 9, (60, 3), generator=RNG)
    embed = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = embed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x - 2**24)  # type: ignore[no-any-return]

    result = fedp3.run(Shifted(), (tokens, Y), **SETTINGS)
    assert torch.equal(result.experiment.client.data.x, tokens)
    numbers = fedp3.run(net(), ((10 * X).long(), Y), **SETTINGS)
    assert numbers.experiment.client.data.x.dtype == torch.float32


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(ROWS)


WRONG = {
    "four arrays": (lambda: (X, Y, X, Y), "pass ((x_train, y_train), (x_test, y_test))"),
    "three data sets": (lambda: (TensorDataset(X, Y),) * 3, "pass a list"),
    "a tensor and a pair": (lambda: (X, (X, Y)), "a pair of a Tensor and a data set"),
    "parts by name": (
        lambda: {"train": TensorDataset(X, Y), "test": TensorDataset(X, Y)},
        "pass (data['train'], data['test'])",
    ),
    "inputs by name": (lambda: {"x": X, "y": Y}, "inputs with names are passed as (inputs, y)"),
    "no clients": (dict, "want the data of each client by its name"),
    "a tensor alone": (lambda: X, "a Tensor without labels; pass (x, y)"),
    "a stream": (lambda: DataLoader(Stream()), "over a stream"),
    "a collate_fn": (
        lambda: DataLoader(TensorDataset(X, Y), collate_fn=lambda rows: rows),
        "with a collate_fn of its own",
    ),
    "a subset sampler": (
        lambda: DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler([0, 1])),
        "whose SubsetRandomSampler chooses samples",
    ),
    "a sampler with replacement": (
        lambda: DataLoader(
            TensorDataset(X, Y), sampler=RandomSampler(TensorDataset(X, Y), replacement=True)
        ),
        "whose RandomSampler chooses samples",
    ),
    "one-hot labels": (lambda: (X, torch.eye(3)[Y]), "one-hot, want the number of the class"),
    "a column of labels": (lambda: (X, Y[:, None]), "pass y[:, 0]"),
    "labels of several": (lambda: (X, torch.ones(60, 3)), "objective='multi_label'"),
    "labels of -1 and 1": (lambda: (X, 2 * (Y > 0).long() - 1), "the labels are -1, 1; number"),
    "truth values": (lambda: (X, Y > 0), "pass y.long()"),
    "texts and numbers": (lambda: (X, ["a", 1, None] * 20), "want texts only"),
    "texts here, numbers there": (
        lambda: [(X, Y), (X, NAMES[Y])],
        "texts as labels and others numbers",
    ),
    "tensors in a list": (lambda: (list(X), Y), "pass torch.stack(x)"),
    "words": (lambda: (["a", "b"], [0, 1]), "no array of numbers"),
    "one number": (lambda: (3.0, Y), "a single number"),
    "rows that cannot be read": (
        lambda: type("Broken", (), {"__len__": lambda s: 3, "__getitem__": lambda s, i: 1 / 0})(),
        "sample 0 cannot be read: ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("form", WRONG)
def test_other_data_are_refused_with_what_to_write(form: str) -> None:
    make, text = WRONG[form]
    with pytest.raises(InputError) as error:
        trained(make())
    assert text in str(error.value) and len(str(error.value)) < 500


def test_two_test_sets_or_lazy_arrays_are_refused() -> None:
    with pytest.raises(InputError, match="and test= is another test set"):
        trained(((X, Y), (X, Y)), test=(X, Y))
    with pytest.raises(InputError, match="these are arrays"):
        trained((X, Y), lazy=True)
    with pytest.raises(InputError, match="pass only one test set"):
        trained(gather((X, Y), (X, Y)).data, test=(X, Y))
    with pytest.raises(InputError, match="is for data sets with a name"):
        fedp3.run(net(), (X, Y), **{"data": {"test": "official"}})  # type: ignore[arg-type]


PARTS: list[Any] = [
    None, 3, "a", b"a", 1.5, True, X, Y, X[:0], X.numpy(), Y.tolist(), [], (), {}, [X], (X,), NAMES,
    ROWS, ROWS[:1], {"a": X}, {"a": (X, Y)}, TensorDataset(X, Y), TensorDataset(X), {1: None},
    DataLoader(TensorDataset(X, Y)), Stream(), object(), int, [None], [[1, 2], [3]], float("nan"),
    np.zeros((60, 4), object), torch.zeros(60, 4, dtype=torch.complex64), range(60), iter([1]),
]  # fmt: skip


def reason_against(data: Any) -> str | None:
    try:
        gather(data)
    except InputError as error:
        return str(error)
    return None


def test_no_value_ends_in_an_exception_of_another_library() -> None:
    """Alone, in pairs, in pairs of pairs and by client: a data set, or an InputError."""
    pairs = list(itertools.product(PARTS, PARTS))
    cases: list[Any] = [*PARTS, *pairs, *map(list, pairs), *({"a": a, "b": b} for a, b in pairs)]
    cases += [((X, Y), pair) for pair in pairs[::3]] + [(pair, (X, Y)) for pair in pairs[::3]]
    refused = [text for case in cases if (text := reason_against(case)) is not None]
    assert all(10 < len(text) < 600 for text in refused)
    assert 20 < len(cases) - len(refused) < len(refused)
