"""What holds for every method: it runs, its bytes are the codec's, its bits are its seed's, and it can be picked up."""

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedp3 import config
from fedp3.client import local_update
from fedp3.codec import decode_task, decode_update, encode_task, encode_update, room_for
from fedp3.driver import make_engine
from fedp3.engines.inprocess import States, sequential
from fedp3.errors import InputError
from fedp3.experiment import Experiment, assemble
from fedp3.frames import payload_size
from fedp3.methods import METHODS, under_ldp
from fedp3.record import Checkpoint, load_checkpoint, model_sha256, save_checkpoint
from fedp3.server import finish, run, run_round
from fedp3.types import ClientUpdate, Reply, Task
from worlds import same

from .fleet import experiment, trained

every_method = pytest.mark.parametrize("method", METHODS)


class Wire:
    """An engine whose tasks and updates travel as bytes, as they do to other machines; it weighs them."""

    def __init__(self, e: Experiment) -> None:
        self.e, self.states, self.up, self.down = e, States(), 0, 0

    def execute(self, tasks: Sequence[Task]) -> list[Reply]:
        return [self.one(task) for task in tasks]

    def one(self, task: Task) -> Reply:
        r = self.e.recipe
        data = encode_task(task, r.layers, r.pruning)
        room = room_for(self.e.start.extra)
        got = decode_task(data, r.layers, r.pruning, r.seed, room)
        update, state = local_update(r, self.e.shards[task.plan.client], got, self.states.start(task))
        back = encode_update(update, task, r.layers, r.pruning.stale, r.compression)
        if task.kind == "train":
            self.down += payload_size(data)
            self.up += payload_size(back)
        self.states.keep(task.plan.client, state)
        return decode_update(back, task, r.layers, r.pruning.stale, r.compression, room)


@every_method
def test_bytes_are_those_the_codec_writes_and_bits_survive_them(method: str) -> None:
    e = experiment(method)
    wire = Wire(e)
    state = e.start
    for _ in range(2):
        wire.up = wire.down = 0
        state, record = run_round(e.problem, state, wire.execute)
        assert (record.bytes_down, record.bytes_up) == (wire.down, wire.up)
        assert not record.rejected and record.accepted == (0, 1, 2, 3)
    direct, _ = trained(e, 2)
    assert same(state.W, direct.W) and same(state.extra, direct.extra)


@every_method
def test_a_run_picked_up_from_its_checkpoint_goes_on_with_the_same_bits(method: str, tmp_path: Path) -> None:
    e = experiment(method)
    straight, _ = trained(e, 3)
    half, states = trained(e, 2)
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path, Checkpoint(half, states.of), "digest")
    found, broken = load_checkpoint(tmp_path, "digest")
    assert found is not None and not broken
    engine = sequential(e.recipe, e.shards, States({i: dict(of) for i, of in found.clients.items()}))
    *_, (resumed, _) = run(replace(e.problem, rounds=3), found.state, engine.execute)
    assert model_sha256(resumed.W) == model_sha256(straight.W)
    assert same(resumed.extra, straight.extra) and same(resumed.memory.moments, straight.memory.moments)


@every_method
def test_all_three_accuracies_are_measured_and_measuring_changes_nothing(method: str) -> None:
    e = experiment(method)
    engine = sequential(e.recipe, e.shards)
    *_, (state, _) = run(replace(e.problem, rounds=2, eval_every=1), e.start, engine.execute)
    before = {i: dict(of) for i, of in engine.states.of.items()}
    final = finish(e.problem, state, engine.execute)
    assert all(len(a.clients) == 4 for a in (final.G, final.D, final.P))
    assert engine.states.of == before
    assert same(state.W, trained(e, 2)[0].W), "a run that evaluates is the run that does not"


@pytest.mark.parametrize(
    "method", ["scaffold", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "scaffold")]
)
def test_two_workers_give_the_same_bits(method: str) -> None:
    e = experiment(method, stacked=True)
    alone, both = make_engine(e, 1), make_engine(e, 2)
    try:
        assert same(trained(e, 2, alone)[0].W, trained(e, 2, both)[0].W)
    finally:
        both.close()


@every_method
def test_a_method_is_one_line_of_the_config_that_init_writes(method: str) -> None:
    text = config.template().replace('method = "fedp3"', f'method = "{method}"')
    small = ["partition.clients=10", "run.clients_per_round=4", "run.rounds=1", "model.width=0.02"]
    c = config.parse(tomllib.loads(text), small)
    if method == "resist":
        with pytest.raises(InputError, match=r"model\.name=resnet18"):
            assemble(c)
        return
    e = assemble(c)
    _, record = run_round(e.problem, e.start, sequential(e.recipe, e.shards).execute)
    assert not record.rejected and len(record.accepted) == 4


PRIVATE = {"fedp3", "fedp3-lowerb", "fedp3-opu2", "fedp3-opu3", "fedavg", "fedprox", "fedper", "local", "fedrop",
           "fjord", "fiarse", "ist", "resist", "fedavg-fp16", "fedavg-int8", "fedavg-topk", "fedavg-layer", "fedavgm",
           "fedadam"}  # fmt: skip


@every_method
def test_under_ldp_a_method_that_lets_something_out_without_noise_is_refused(method: str) -> None:
    refused = under_ldp(config.parse({"method": method}).parts)
    assert bool(refused) == (method not in PRIVATE)


def test_the_refusal_says_what_would_leave() -> None:
    c = config.parse({"method": "scaffold"}, ["privacy.enabled=true", "privacy.epsilon=inf"])
    with pytest.raises(InputError, match=r"LDP refused: the method's own tensors leave the client without noise"):
        assemble(c)


@every_method
def test_each_method_has_a_card_that_names_its_settings(method: str) -> None:
    card = Path(__file__).parents[2] / "docs" / "methods" / f"{method}.md"
    text = card.read_text(encoding="utf-8")
    for part in ("## What", "## How", "## Settings", "## Differs"):
        assert part in text, f"{card.name} lacks {part}"
    for section, keys in METHODS[method].settings.items():
        for key in keys:
            assert f"{section}.{key}" in text, f"{card.name} does not name {section}.{key}"


# --------------------------------------------------------------------------- what a hostile or broken client can do


def hurt(e: Experiment, change: object) -> dict[int, str]:
    def execute(tasks: Sequence[Task]) -> list[Reply]:
        good = [r for r in sequential(e.recipe, e.shards).execute(tasks) if isinstance(r, ClientUpdate)]
        return [change(r) if r.client == 1 else r for r in good]

    _, record = run_round(e.problem, e.start, execute)
    assert record.accepted == (0, 2, 3)
    return dict(record.rejected)


def test_a_methods_own_tensors_pass_the_gate_or_the_client_is_refused() -> None:
    e = experiment("scaffold")
    assert "is missing" in hurt(e, lambda u: replace(u, extra={}))[1]
    assert "want (12, 9)" in hurt(e, lambda u: replace(u, extra={**u.extra, "fc1.weight": torch.zeros(3)}))[1]
    bad = {"fc1.weight": torch.full((12, 9), torch.nan)}
    assert "holds NaN" in hurt(e, lambda u: replace(u, extra={**u.extra, **bad}))[1]


def test_compressed_uploads_pass_the_gate_or_the_client_is_refused() -> None:
    e = experiment("fedavg-int8")
    whole = {n: w.float() for n, w in trained(e, 1)[0].W.items()}
    assert "want int8" in hurt(e, lambda u: replace(u, tensors=whole))[1]

    def huge(u: ClientUpdate) -> ClientUpdate:
        """Whole numbers and scales, each finite, that stand for infinity."""
        loud = {n: torch.full_like(w, 127) if w.dtype == torch.int8 else w for n, w in u.tensors.items()}
        return replace(u, tensors=loud, extra={n: torch.full_like(s, 3e38) for n, s in u.extra.items()})

    assert "stands for holds NaN or infinity" in hurt(e, huge)[1]
    assert (
        "extra 'scale/fc1.bias' is negative"
        in hurt(e, lambda u: replace(u, extra={**u.extra, "scale/fc1.bias": torch.tensor(-1.0)}))[1]
    )
