"""What holds for every method: it runs and resumes, and its bytes are those of the codec."""

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedp3 import config
from fedp3.client.update import local_update
from fedp3.core.errors import InputError
from fedp3.core.hashing import model_sha256
from fedp3.core.trees import flatten
from fedp3.core.types import ClientState, ClientUpdate, Rejection, RejectionCode, Reply, Task
from fedp3.engines.base import States
from fedp3.engines.catalogue import make_engine
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.messages.codec import (
    Copy,
    decode_task,
    decode_update,
    encode_task,
    encode_update,
    room_for,
)
from fedp3.messages.copies import copy_in, copy_tensors, initial_copy
from fedp3.messages.framing import payload_size
from fedp3.methods import METHODS
from fedp3.privacy import requirements
from fedp3.runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedp3.server.rounds import run, run_round
from fedp3.server.scoring import finish
from worlds import same

from .fleet import experiment, trained, with_rounds

every_method = pytest.mark.parametrize("method", METHODS)


class Wire:
    """An engine that exchanges tasks and updates as bytes, and counts them."""

    def __init__(self, e: Experiment) -> None:
        self.e, self.states, self.copies, self.up, self.down = e, States(), States(), 0, 0

    def execute(self, tasks: Sequence[Task]) -> list[Reply]:
        return [self.one(task) for task in tasks]

    def one(self, task: Task) -> Reply:
        context = self.e.client
        layers, pruning, compression = context.layers, context.pruning, context.spec.compression
        download, unfed = context.spec.download, pruning.unfed_columns
        data = encode_task(task, layers, pruning, download)
        room = room_for(self.e.start.extra)
        stored = self.copies.start(task)

        def find_copy(t: int) -> Copy | None:
            return initial_copy(context.initial, layers, download) if t < 0 else copy_in(stored)

        received = decode_task(data, layers, pruning, context.seed, room, download, find_copy)
        copy = ClientState(task.t, copy_tensors(received, layers, unfed, download))
        self.copies.keep(task.plan.client, copy)
        shard, state = self.e.shards[task.plan.client], self.states.start(task)
        update, state = local_update(context, shard, received, state)
        back = encode_update(update, task, layers, unfed, compression)
        if task.kind == "train":
            self.down += payload_size(data)
            self.up += payload_size(back)
        self.states.keep(task.plan.client, state)
        return decode_update(back, task, layers, unfed, compression, room)


@every_method
def test_bytes_are_those_the_codec_writes_and_bits_survive_them(method: str) -> None:
    e = experiment(method)
    wire = Wire(e)
    state = e.start
    for _ in range(2):
        wire.up = wire.down = 0
        state, record = run_round(e.server, state, wire.execute)
        assert (record.bytes_down, record.bytes_up) == (wire.down, wire.up)
        assert not record.rejected and record.accepted == (0, 1, 2, 3)
    direct, _ = trained(e, 2)
    assert same(state.W, direct.W) and same(state.extra, direct.extra)


@every_method
def test_a_run_resumed_from_its_checkpoint_ends_at_the_same_bits(
    method: str, tmp_path: Path
) -> None:
    e = experiment(method)
    straight, _ = trained(e, 3)
    half, states = trained(e, 2)
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path, Checkpoint(half, states.by_client), "digest")
    checkpoint, broken = load_checkpoint(tmp_path, "digest")
    assert checkpoint is not None and not broken
    stored = States({i: dict(rounds) for i, rounds in checkpoint.clients.items()})
    engine = sequential(e.client, e.shards, stored)
    *_, (resumed, _) = run(with_rounds(e.server, 3), checkpoint.state, engine.execute)
    assert model_sha256(resumed.W) == model_sha256(straight.W)
    assert same(resumed.extra, straight.extra)
    plain, tensors = flatten(resumed.aggregator, "")
    plain_of_straight, tensors_of_straight = flatten(straight.aggregator, "")
    assert plain == plain_of_straight and same(tensors, tensors_of_straight)


@every_method
def test_all_three_accuracies_are_measured_and_measuring_changes_nothing(method: str) -> None:
    e = experiment(method)
    engine = sequential(e.client, e.shards)
    *_, (state, _) = run(with_rounds(e.server, 2, eval_every=1), e.start, engine.execute)
    before = {i: dict(rounds) for i, rounds in engine.states.by_client.items()}
    final = finish(e.server, state, engine.execute)
    assert all(len(a.clients) == 4 for a in (final.G, final.D, final.P))
    assert engine.states.by_client == before
    assert same(state.W, trained(e, 2)[0].W), "a run that evaluates is the run that does not"


@pytest.mark.parametrize(
    "method",
    ["scaffold", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "scaffold")],
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
    small = ["partition.clients=10", "run.clients_per_round=4", "run.rounds=4", "model.width=0.02"]
    c = config.parse(tomllib.loads(text), small)
    if method == "resist":
        with pytest.raises(InputError, match=r"model\.name=resnet18"):
            assemble(c)
        return
    if c.adapter.kind != "none":
        with pytest.raises(InputError, match=r"the network has fc1, fc2, fc3, ffc"):
            assemble(c)
        return
    e = assemble(c)
    _, record = run_round(e.server, e.start, sequential(e.client, e.shards).execute)
    assert not record.rejected and len(record.accepted) == 4


PRIVATE = {
    "fedp3", "fedp3-lowerb", "fedp3-opu2", "fedp3-opu3", "fedavg", "fedper", "local",
    "fedrop", "fjord", "fiarse", "ist", "resist", "fedavg-fp16", "fedavg-int8", "fedavg-topk",
    "fedavg-layer", "fedavgm", "fedadam", "fedp3-paced", "fedpart", "fedlp", "fedluar", "cocofl",
    "fedlama", "fedit", "ffa-lora", "hetlora", "flexlora", "flora", "fedra",
}  # fmt: skip


@every_method
def test_under_ldp_a_method_that_lets_something_out_without_noise_is_refused(method: str) -> None:
    e = experiment(method)
    reasons = ""
    try:
        requirements.check(e.client, e.shards, delta=1e-5)
    except (
        InputError
    ) as error:  # a network may be refused too; a method's parts are named hooks.KEY
        reasons = str(error)
    assert ("(hooks." in reasons) == (method not in PRIVATE)


def test_the_refusal_names_what_would_be_sent_without_noise() -> None:
    c = config.parse({"method": "scaffold"}, ["privacy.enabled=true", "privacy.epsilon=inf"])
    with pytest.raises(
        InputError, match=r"LDP refused: the method's own tensors leave the client without noise"
    ):
        assemble(c)


@every_method
def test_each_method_has_a_card(method: str) -> None:
    card = Path(__file__).parents[2] / "docs" / "methods" / f"{method}.md"
    text = card.read_text(encoding="utf-8")
    assert re.search(r"Source|Paper|\b(19|20)\d\d\b", text), f"{card.name} names no source"
    assert "Differs" in text, f"{card.name} does not say how the method differs from its source"
    if "## Settings" in text:  # otherwise they are added when the site is built
        for section, keys in METHODS[method].settings.items():
            for key in keys:
                assert f"{section}.{key}" in text, f"{card.name} does not name {section}.{key}"


# ----------------------------------------------------------- what a hostile or broken client can do


def rejection(e: Experiment, change: Callable[[ClientUpdate], ClientUpdate]) -> Rejection:
    """Why client 1 is rejected when its update is changed like this; the others are accepted."""

    def execute(tasks: Sequence[Task]) -> list[Reply]:
        replies = sequential(e.client, e.shards).execute(tasks)
        updates = [r for r in replies if isinstance(r, ClientUpdate)]
        return [change(u) if u.client == 1 else u for u in updates]

    _, record = run_round(e.server, e.start, execute)
    assert record.accepted == (0, 2, 3) and list(record.rejected) == [1]
    return record.rejected[1]


def with_extra(u: ClientUpdate, **tensors: torch.Tensor) -> ClientUpdate:
    return replace(u, extra={**u.extra, **tensors})


def test_a_methods_own_tensors_pass_the_gate_or_the_client_is_refused() -> None:
    e = experiment("scaffold")
    assert "is missing" in rejection(e, lambda u: replace(u, extra={})).text
    short = {"fc1.weight": torch.zeros(3)}
    assert "want (12, 9)" in rejection(e, lambda u: with_extra(u, **short)).text
    invalid = {"fc1.weight": torch.full((12, 9), torch.nan)}
    refused = rejection(e, lambda u: with_extra(u, **invalid))
    assert refused.code is RejectionCode.NOT_FINITE and "holds NaN" in refused.text


def test_compressed_uploads_pass_the_gate_or_the_client_is_refused() -> None:
    e = experiment("fedavg-int8")
    dense = {n: w.float() for n, w in trained(e, 1)[0].W.items()}
    assert "want int8" in rejection(e, lambda u: replace(u, tensors=dense)).text

    def huge(u: ClientUpdate) -> ClientUpdate:
        """Whole numbers and scales, each finite, that stand for infinity."""
        largest = {
            n: torch.full_like(w, 127) if w.dtype == torch.int8 else w for n, w in u.tensors.items()
        }
        scales = {n: torch.full_like(s, 3e38) for n, s in u.extra.items()}
        return replace(u, tensors=largest, extra=scales)

    assert "stands for holds NaN or infinity" in rejection(e, huge).text
    negative = {"scale/fc1.bias": torch.tensor(-1.0)}
    text = rejection(e, lambda u: with_extra(u, **negative)).text
    assert "extra 'scale/fc1.bias' is negative" in text
