"""The engine over a Grid, with nodes in this process: bits, bytes, and ways a node can fail."""

import json
import os
import pickle
import struct
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr")

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedp3 import config
from fedp3.config.plugins import load_plugins
from fedp3.core.errors import CodecError, ConfigError, InputError, RunError
from fedp3.core.files import read_json
from fedp3.core.hashing import model_sha256
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.types import ClientState, ClientUpdate
from fedp3.data import from_tensors
from fedp3.deploy.flower_app import ServeSettings, as_registered, serve
from fedp3.deploy.grid_run import own, run_on_grid
from fedp3.engines.base import States
from fedp3.engines.catalogue import make_engine
from fedp3.engines.flower.client_app import client_app, configured, configured_node
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.engines.flower.records import (
    ABOUT,
    FAILURE,
    FRAME,
    NODE,
    Identity,
    clean,
    failure,
    failure_in,
    frame_of,
    identity_of,
    identity_record,
    put_frame,
    request_of,
    state_bytes,
    state_of,
)
from fedp3.experiment.assemble import assemble
from fedp3.messages.codec import encode_update, room_for
from fedp3.messages.framing import MAGIC, payload_size
from fedp3.methods import METHODS
from fedp3.models.frozen import frozen_sha256
from fedp3.node.context import Request
from fedp3.privacy.mechanism import mechanism_of
from fedp3.runs import checkpoint, writer
from fedp3.runs.run_folder import read_events
from fedp3.runs.session import run_rounds
from fedp3.server.rounds import run_round
from flower.fakes import FakeGrid, in_a_run, with_content
from worlds import same

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict  # isort: skip

CLIENTS = 4
SMALL = [
    "model.width=0.02",
    f"partition.clients={CLIENTS}",
    "run.clients_per_round=0",
    "run.rounds=3",
    "local.steps=2",
]
HARD = [
    "aggregate.rule=attention",
    "plan.head=personal",
    "prune.local_pruner=uniform",
    "prune.keep=[0.9, 0.5]",
]
RUN = "ab" * 16


@pytest.fixture(scope="module")
def experiment():
    return assemble(config.parse({}, [*SMALL, *HARD]))


@pytest.fixture(scope="module")
def shared():
    """A run without personal layers."""
    return assemble(config.parse({}, SMALL))


@pytest.fixture(autouse=True)
def _in_a_run():
    with in_a_run():
        yield


def grid_of(experiment, folder: Path, carried: bool = False, **fields) -> FakeGrid:
    load = configured(experiment.config) if carried else configured_node(experiment.config)
    app = client_app(load, state_in_message=carried)
    nodes = [{"partition-id": i, "folder": str(folder / f"client-{i}")} for i in range(CLIENTS)]
    return FakeGrid(app, nodes, **fields)


def engine_over(grid, experiment, deadline: float = 0, states=None, roster=None):
    wire = Wire(
        spec=experiment.server.spec,
        digest=experiment.config.digest(),
        run=RUN,
        mechanism=mechanism_of(experiment.client),
        deadline=deadline,
        rest=lambda: time.sleep(0.001),
        room=room_for(experiment.start.extra),
    )
    return over(grid, wire, roster or Roster(), states)


def with_run(server, **changes):
    """The server with other settings of its `run`."""
    return replace(server, run=replace(server.run, **changes))


def reasons(record) -> dict[int, str]:
    """Why each rejected client was rejected."""
    return {client: rejection.text for client, rejection in record.rejected.items()}


# --------------------------------------------------------------------------- the same run


@pytest.mark.parametrize("carried", [True, False])
def test_the_model_is_bit_for_bit_that_of_a_run_in_process(carried, experiment, tmp_path):
    here = run_rounds(experiment, make_engine(experiment, 1)).result
    grid = grid_of(experiment, tmp_path, carried)
    there = run_rounds(
        experiment, engine_over(grid, experiment, states=States() if carried else None)
    ).result
    for key in ("model_sha256", "final", "mb_up", "mb_down"):
        assert there[key] == here[key], key


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"resist"}))  # which is for a ResNet
def test_every_method_gives_the_bits_of_a_run_in_process(method, tmp_path):
    devices = (
        ["prune.keep=[1.0, 0.5]"]
        if isinstance(METHODS[method].settings.get("prune", {}).get("keep"), list)
        else []
    )
    period = ["plan.period=2"] if "schedule" in METHODS[method].settings.get("plan", {}) else []
    overrides = [*SMALL, "run.rounds=2", *devices, *period]
    experiment = assemble(config.parse({"method": method}, overrides))
    here = run_rounds(experiment, make_engine(experiment, 1)).result
    there = run_rounds(experiment, engine_over(grid_of(experiment, tmp_path), experiment)).result
    for key in ("model_sha256", "final", "mb_up", "mb_down", "rejected"):
        assert there[key] == here[key], key


def test_only_the_planned_payload_is_sent_and_the_ledger_counts_it_exactly(experiment, tmp_path):
    answers = []

    def watch(asked, answer):
        answers.append(answer)
        return answer

    grid = grid_of(experiment, tmp_path, spoil=watch)
    _, record = run_round(
        experiment.server, experiment.start, engine_over(grid, experiment).execute
    )
    tasks = [m for m in grid.seen if m.metadata.message_type == "train"]
    assert sum(payload_size(frame_of(m.content)) for m in tasks) == record.bytes_down
    replies = [a for a in answers if NODE not in a.content]
    assert sum(payload_size(frame_of(a.content)) for a in replies) == record.bytes_up
    for m in tasks + replies:
        framing = m.content.array_records[FRAME].count_bytes() - payload_size(frame_of(m.content))
        assert framing < 700, "names, plan and checksum; nothing else"
        assert set(m.content) <= {FRAME, ABOUT}, "what a client keeps is not among it"


def test_what_a_client_keeps_stays_on_its_disk_for_the_last_two_rounds(experiment, tmp_path):
    grid = grid_of(experiment, tmp_path)
    run_rounds(experiment, engine_over(grid, experiment))
    for i in range(CLIENTS):
        kept = sorted(p.name for p in (tmp_path / f"client-{i}" / "runs" / RUN).iterdir())
        assert kept == ["state-00000001.safetensors", "state-00000002.safetensors"]


def test_a_node_whose_disk_was_wiped_is_a_failure_with_the_reason(experiment, tmp_path):
    engine = engine_over(grid_of(experiment, tmp_path), experiment)
    state, _ = run_round(experiment.server, experiment.start, engine.execute)
    next((tmp_path / "client-1" / "runs" / RUN).iterdir()).unlink()
    _, record = run_round(experiment.server, state, engine.execute)
    assert record.accepted == (0, 2, 3)
    assert "its node refused (training)" in reasons(record)[1]
    log = (tmp_path / "client-1" / "refusals.log").read_text()
    assert "this client's state of 'ffc' after round 1 is gone" in log


# --------------------------------------------------------------------------- serving, resuming


def test_an_interrupted_run_is_resumed_over_new_nodes_with_the_same_bits(experiment, tmp_path):
    full = run_rounds(experiment, make_engine(experiment, 1)).result["model_sha256"]
    pushed = 0

    def dies(asked, answer):
        nonlocal pushed
        pushed += asked.metadata.message_type == "train"
        if pushed == 2 * CLIENTS + 2:  # in the middle of the third round
            raise KeyboardInterrupt
        return answer

    settings = ServeSettings(out=tmp_path / "run", wait=1)
    with pytest.raises(KeyboardInterrupt):
        serve(grid_of(experiment, tmp_path / "nodes", spoil=dies), experiment, settings)
    assert (
        not (tmp_path / "run" / "result.json").exists() and len(read_events(tmp_path / "run")) == 2
    )
    with pytest.raises(InputError, match="resume=true"):
        serve(grid_of(experiment, tmp_path / "nodes"), experiment, settings)
    serve(grid_of(experiment, tmp_path / "nodes"), experiment, replace(settings, resume=True))
    assert read_json(tmp_path / "run" / "result.json")["model_sha256"] == full
    unused = grid_of(experiment, tmp_path / "nodes")
    finished = serve(unused, experiment, replace(settings, resume=True))
    assert finished.result["model_sha256"] == model_sha256(finished.state.W) == full
    assert not unused.seen, "a finished run needs no nodes"


def test_a_checkpoint_that_fails_leaves_the_nodes_with_what_a_resumed_run_needs(
    experiment, tmp_path, monkeypatch
):
    """Nodes drop older states when a task arrives: the round before it must be on disk by then."""
    full = run_rounds(experiment, make_engine(experiment, 1)).result["model_sha256"]
    save, settings = checkpoint.save_checkpoint, ServeSettings(out=tmp_path / "run", wait=1)

    def disk_full(folder, checkpoint, digest):
        if checkpoint.state.t == 2:
            time.sleep(0.2)  # as long as a round, so that its tasks would leave meanwhile
            raise RunError("no space")
        save(folder, checkpoint, digest)

    monkeypatch.setattr(writer, "save_checkpoint", disk_full)
    with pytest.raises(RunError, match="no space"):
        serve(grid_of(experiment, tmp_path / "nodes"), experiment, settings)
    monkeypatch.setattr(writer, "save_checkpoint", save)
    serve(grid_of(experiment, tmp_path / "nodes"), experiment, replace(settings, resume=True))
    assert read_json(tmp_path / "run" / "result.json")["model_sha256"] == full


def test_another_run_of_the_same_config_shares_no_state_on_the_nodes(experiment, tmp_path):
    for name in ("a", "b"):
        serve(
            grid_of(experiment, tmp_path / "nodes"),
            experiment,
            ServeSettings(out=tmp_path / name, wait=1),
        )
    runs = {read_json(tmp_path / name / "flower.json")["run"] for name in ("a", "b")}
    folders = {p.name for p in (tmp_path / "nodes" / "client-0" / "runs").iterdir()}
    assert len(runs) == 2 and folders == runs


def test_the_files_that_a_deployed_run_uses_are_recorded_and_must_stay_unchanged(shared, tmp_path):
    path = tmp_path / "my_rules.py"
    path.write_text("RULES = 1\n")
    settings = ServeSettings(
        out=tmp_path / "run", wait=1, plugins=load_plugins([path]), resume=True
    )
    serve(grid_of(shared, tmp_path / "nodes"), shared, settings)
    (recorded,) = read_json(tmp_path / "run" / "run.json")["plugins"]
    assert recorded["path"] == str(path)
    path.write_text("RULES = 2\n")
    with pytest.raises(InputError, match="was changed after the run began"):
        serve(grid_of(shared, tmp_path / "nodes"), shared, settings)


def test_nodes_are_sent_no_more_than_they_can_hold(shared, tmp_path):
    grid = grid_of(shared, tmp_path)
    grid.configs[2]["capacity"] = 0.25
    roster = Roster()
    engine = engine_over(grid, shared, roster=roster)
    _, before = run_round(shared.server, shared.start, engine.execute)
    assert list(before.rejected) == [2] and "(capacity)" in reasons(before)[2], (
        "the node checks for itself"
    )
    log = (tmp_path / "client-2" / "refusals.log").read_text()
    assert "the task holds 0.9 of a layer, and this node's capacity is 0.25" in log
    roster.met[7] = Identity(client=77, examples=5, capacity=0.1, digest="0" * 64)
    fitted = as_registered(shared, roster)  # which has no client 77
    assert fitted.server.keep == (0.9, 0.9, 0.25, 0.9)
    _, after = run_round(fitted.server, shared.start, engine.execute)
    assert not after.rejected and after.bytes_down < before.bytes_down


def test_a_node_cuts_its_records_the_same_way_in_every_run(tmp_path):
    """A record that trained under LDP in one run must not be scored, without noise, in another."""
    samples = from_tensors(torch.randn(40, 4), torch.arange(40) % 2)
    context = SimpleNamespace(node_config={"partition-id": 1, "folder": str(tmp_path)})
    cuts = []
    for seed in (0, 7):
        c = config.parse(
            {},
            [
                "partition.clients=4",
                "run.clients_per_round=0",
                "plan.layers=full",
                f"run.seed={seed}",
            ],
        )
        held = own(
            c, lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), lambda _: samples
        )(context)
        cuts.append(held.shard)
    assert torch.equal(cuts[0].train, cuts[1].train) and torch.equal(cuts[0].test, cuts[1].test)


def engine_tasks(experiment):
    tasks = []
    run_round(
        with_run(experiment.server, max_void=9), experiment.start, lambda ts: tasks.extend(ts) or []
    )
    return tasks


# ------------------------------------------------------------------- nodes that come, go and lie


def test_a_node_that_left_is_missed_and_one_that_joins_gets_tasks(shared, tmp_path):
    grid = grid_of(shared, tmp_path, away={1})
    engine = engine_over(grid, shared)
    state, first = run_round(shared.server, shared.start, engine.execute)
    assert first.accepted == (0, 2, 3) and reasons(first) == {1: "no node is this client"}
    grid.away = {3}
    _, second = run_round(shared.server, state, engine.execute)
    assert second.accepted == (0, 1, 2) and reasons(second) == {3: "no node is this client"}


def test_of_two_nodes_that_claim_a_client_one_gets_tasks_and_the_other_takes_over(shared, tmp_path):
    grid = grid_of(shared, tmp_path)
    grid.configs.append({"partition-id": 2, "folder": str(tmp_path)})
    roster = Roster()
    engine = engine_over(grid, shared, roster=roster)
    state, record = run_round(shared.server, shared.start, engine.execute)
    assert record.accepted == (0, 1, 2, 3)
    tasks = [m.metadata.dst_node_id for m in grid.seen if m.metadata.message_type == "train"]
    (first,) = {102, 104} & set(tasks)
    assert tasks.count(first) == 1
    grid.away = {first - 100}
    _, record = run_round(shared.server, state, engine.execute)
    assert record.accepted == (0, 1, 2, 3) and roster.nodes[2] == 206 - first


def test_nodes_that_do_not_fit_get_no_tasks(shared, tmp_path):
    grid = grid_of(shared, tmp_path)
    grid.configs += [{}, {"partition-id": 77}, {"partition-id": 3, "capacity": 7.0}]
    roster = Roster()
    _, record = run_round(
        shared.server, shared.start, engine_over(grid, shared, roster=roster).execute
    )
    assert record.accepted == (0, 1, 2, 3)
    assert all("its node refused (setup)" in roster.refused[n] for n in (104, 105, 106))
    other, strangers = assemble(config.parse({}, [*SMALL, "local.lr=0.5"])), Roster()
    engine = engine_over(grid_of(shared, tmp_path), other, roster=strangers)
    _, record = run_round(other.server, other.start, engine.execute)
    assert set(strangers.refused.values()) == {"it was set up with another config"} and record.void


def test_a_node_with_another_frozen_part_gets_no_tasks(tmp_path):
    """The same config, but the pretrained weights on the node are others."""
    experiment = assemble(config.parse({}, [*SMALL, "model.frozen=['fc1']"]))
    grid = grid_of(experiment, tmp_path)
    wire = Wire(
        spec=experiment.server.spec,
        digest=experiment.config.digest(),
        run=RUN,
        rest=lambda: time.sleep(0.001),
        frozen="0f" * 32,
    )
    roster, matching = Roster(), Roster()
    with in_a_run():
        roster.refresh(grid, wire)
        assert len(roster.refused) == CLIENTS and not roster.met
        assert "frozen part of its network has other values" in roster.refused[min(roster.refused)]
        matching.refresh(grid, replace(wire, frozen=frozen_sha256(experiment.client.net)))
        assert len(matching.met) == CLIENTS


def test_after_the_deadline_a_client_is_late_and_its_answer_is_never_used(shared, tmp_path):
    held = {}

    def slow(asked, answer):
        if (
            asked.metadata.message_type == "train"
            and asked.metadata.dst_node_id == 101
            and not held
        ):
            held[asked.metadata.message_id] = answer
            return None
        return answer

    grid = grid_of(shared, tmp_path, spoil=slow)
    engine = engine_over(grid, shared, deadline=0.2)
    state, record = run_round(shared.server, shared.start, engine.execute)
    assert record.late == (1,) and record.accepted == (0, 2, 3) and not record.rejected
    grid.waiting |= held  # now it comes
    after, record = run_round(shared.server, state, engine.execute)
    assert record.accepted == (0, 1, 2, 3) and not held.keys() & grid.waiting.keys()
    clean = engine_over(grid_of(shared, tmp_path), shared)
    expected, _ = run_round(shared.server, state, clean.execute)
    assert same(after.W, expected.W)


def test_a_dead_node_is_matched_by_message_though_the_superlink_answers_for_it(shared, tmp_path):
    def dead(asked, answer):
        if asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 102:
            reply = Message(Error(5, "Node Unavailable\x1b[31m - it\nleft"), reply_to=asked)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply
        return answer

    _, record = run_round(
        shared.server,
        shared.start,
        engine_over(grid_of(shared, tmp_path, spoil=dead), shared).execute,
    )
    assert reasons(record) == {2: "Flower reports (code 5): Node Unavailable?[31m - it left"}
    assert record.accepted == (0, 1, 3)


def test_a_client_that_raises_is_rejected_and_its_exception_stays_on_the_node(
    shared, tmp_path, monkeypatch
):
    def breaks(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("fedp3.engines.base.local_update", breaks)
    _, record = run_round(
        shared.server, shared.start, engine_over(grid_of(shared, tmp_path), shared).execute
    )
    assert record.void and "(training)" in reasons(record)[0]
    assert "no room" not in reasons(record)[0]
    assert "MemoryError: no room" in (tmp_path / "client-0" / "refusals.log").read_text()


def test_a_policy_may_reveal_the_texts_of_errors(shared, tmp_path, monkeypatch):
    def breaks(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("fedp3.engines.base.local_update", breaks)
    (tmp_path / "client-0").mkdir()
    (tmp_path / "client-0" / "policy.toml").write_text("[errors]\nreveal = true\n")
    _, record = run_round(
        shared.server, shared.start, engine_over(grid_of(shared, tmp_path), shared).execute
    )
    assert "MemoryError: no room" in reasons(record)[0]
    assert "no room" not in reasons(record)[1]


# --------------------------------------------------------------------------- malformed replies


def frame(**header) -> bytes:
    head = json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(head)) + head


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def raw(data: bytes, kind: str = "fedp3") -> RecordDict:
    return RecordDict({FRAME: ArrayRecord({"frame": Array("uint8", (len(data),), kind, data)})})


MALFORMED = {
    "nothing": (lambda d: RecordDict(), "no 'fedp3' frame"),
    "a config instead of arrays": (
        lambda d: RecordDict({FRAME: ConfigRecord({"frame": b"x"})}),
        "no 'fedp3' frame",
    ),
    "two arrays": (
        lambda d: RecordDict(
            {FRAME: ArrayRecord({k: Array("uint8", (1,), "x", b"x") for k in "ab"})}
        ),
        "no 'fedp3' frame",
    ),
    "no bytes": (lambda d: raw(b""), "no fedp3 message"),
    "noise": (lambda d: raw(os.urandom(5000)), "no fedp3 message"),
    "a pickle": (lambda d: raw(pickle.dumps(Bomb(f"{d}/marker"))), "no fedp3 message"),
    "a pickle called numpy": (
        lambda d: raw(pickle.dumps(Bomb(f"{d}/marker")), "numpy.ndarray"),
        "no fedp3 message",
    ),
    "a header of 2**31": (lambda d: raw(MAGIC + b"\xff\xff\xff\x7f"), "header of 2147483647 bytes"),
    "too much": (lambda d: raw(frame(kind="update") + bytes(50_000_000)), "at most"),
    "a task": (lambda d: raw(frame(kind="task")), "kind 'update'"),
    "another's name": (None, "claims to be client"),
    "half": (None, "checksum"),
    "NaN": (None, "NaN or infinity"),
    "a reason of a megabyte": (lambda d: failure("<script>" + "x" * 1_000_000), "<script>xxx"),
    "a reason that is bytes": (
        lambda d: RecordDict({FAILURE: ConfigRecord({"reason": b"x"})}),
        "a bytes instead",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_reply_is_refused_with_a_reason_and_leaves_no_trace(kind, shared, tmp_path):
    make, reason = MALFORMED[kind]
    by_hand = {"another's name": _renamed, "half": _half, "NaN": _nan}
    spoil = with_content(make(tmp_path)) if make else by_hand[kind](shared)

    def only_client_1(asked, answer):
        return spoil(asked, answer) if asked.metadata.dst_node_id == 101 else answer

    grid = grid_of(shared, tmp_path / "nodes", spoil=only_client_1)
    began = time.process_time()
    new, record = run_round(shared.server, shared.start, engine_over(grid, shared).execute)
    assert record.accepted == (0, 2, 3) and reason in reasons(record)[1], record.rejected
    assert len(reasons(record)[1]) <= 500 and reasons(record)[1].isprintable()
    assert not (tmp_path / "marker").exists() and time.process_time() - began < 20
    without = grid_of(shared, tmp_path / "nodes", away={1})
    clean_round, _ = run_round(shared.server, shared.start, engine_over(without, shared).execute)
    assert all(torch.equal(new.W[n], clean_round.W[n]) for n in new.W)


def _half(shared):
    def spoil(asked, answer):
        return (
            answer
            if NODE in answer.content
            else Message(raw(frame_of(answer.content)[:-10]), reply_to=asked)
        )

    return spoil


def _changed(shared, change):
    tasks = {t.plan.client: t for t in engine_tasks(shared)}

    def spoil(asked, answer):
        if NODE in answer.content:
            return answer
        layers, unfed = shared.server.layers, shared.server.spec.pruning.unfed_columns
        tensors = {
            n: torch.ones(layers.shapes[n])
            for l in tasks[1].plan.uploaded
            for n in layers.layers[l]
        }
        update = change(ClientUpdate(client=1, t=0, tensors=tensors, examples=10))
        return Message(raw(encode_update(update, tasks[1], layers, unfed)), reply_to=asked)

    return spoil


def _renamed(shared):
    return _changed(shared, lambda u: replace(u, client=3))


def _nan(shared):
    return _changed(
        shared, lambda u: replace(u, tensors={n: w * float("nan") for n, w in u.tensors.items()})
    )


# -------------------------------------------------------------------------- records, there and back


@given(st.binary(max_size=2000))
def test_a_frame_comes_back_as_it_was(data):
    assert frame_of(put_frame(RecordDict(), data)) == data


@given(
    st.integers(0, 1000),
    st.dictionaries(st.text("abc./", min_size=1, max_size=9), st.integers(0, 5), min_size=1),
)
def test_a_state_comes_back_as_it_was(t, sizes):
    state = ClientState(t, {n: torch.arange(float(k)) for n, k in sizes.items()})
    back = state_of(state_bytes(state))
    assert back.t == t and back.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(back.tensors[n], w) for n, w in state.tensors.items())


@given(st.binary(max_size=200))
def test_noise_is_no_state(data):
    with pytest.raises(CodecError):
        state_of(data)


@given(st.integers(0, (1 << 31) - 1), st.integers(0, 1 << 40), st.floats(0, 1, exclude_min=True))
def test_an_identity_comes_back_as_it_was(client, examples, capacity):
    identity = Identity(client=client, examples=examples, capacity=capacity, digest="0f" * 32)
    assert identity_of(identity_record(identity)) == identity


@pytest.mark.parametrize(
    "wrong",
    [
        {"client": -1},
        {"client": True},
        {"client": "0"},
        {"client": 1 << 40},
        {"examples": -1},
        {"examples": 2.5},
    ]
    + [{"capacity": v} for v in (0.0, 1.5, float("nan"), "half")]
    + [{"digest": v} for v in ("", "../..", b"x", "g" * 64)],
)
def test_an_identity_with_a_wrong_field_is_none(wrong):
    said = {"client": 0, "examples": 5, "capacity": 1.0, "digest": "0" * 64} | wrong
    with pytest.raises(CodecError):
        identity_of(RecordDict({NODE: ConfigRecord(said)}))


@pytest.mark.parametrize("run", ["", "../../etc", "AB" * 16, "a" * 31, "a" * 33, b"a" * 32, 5])
def test_a_run_is_named_by_hex_digits_alone(run):
    with pytest.raises(CodecError):
        request_of(RecordDict({ABOUT: ConfigRecord({"run": run})}))
    content = put_frame(RecordDict({ABOUT: ConfigRecord({"run": "a" * 32})}), b"task")
    assert request_of(content) == Request(run="a" * 32, bytes=4)


@given(st.text())
def test_a_reason_is_one_printable_line(text):
    assert clean(text).isprintable() and 0 < len(clean(text)) <= 500
    assert failure_in(failure(text)) == clean(text[:500])


# --------------------------------------------------------------------------- a user's own app


def own_net():
    with layers_draw_from(stream(3, Stream.INIT)):
        sizes = (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    return nn.Sequential(*sizes)


def own_data(context):
    rng = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    y = torch.arange(30) % 3
    return from_tensors(torch.randn(30, 6, generator=rng) + 2 * torch.eye(3, 6)[y], y, classes=3)


def own_config(*more: str):
    return config.parse(
        {},
        ["partition.clients=3", "run.clients_per_round=0", "run.rounds=4", "local.lr=0.3", *more],
    )


def own_grid(c, folder: Path, **fields) -> FakeGrid:
    nodes = [{"partition-id": i, "folder": str(folder / f"client-{i}")} for i in range(3)]
    return FakeGrid(client_app(own(c, own_net, own_data)), nodes, **fields)


def test_a_users_network_trains_on_data_that_only_the_nodes_have(tmp_path):
    c = own_config("plan.head=personal_uploaded")
    for i in range(3):  # which needs the consent of every node's owner
        (tmp_path / "nodes" / f"client-{i}").mkdir(parents=True)
        (tmp_path / "nodes" / f"client-{i}" / "policy.toml").write_text(
            "[layers]\npersonal_uploaded = true\n"
        )

    def trained(folder: Path | None):
        grid = own_grid(c, tmp_path / "nodes")
        return run_on_grid(grid, c, own_net(), torch.zeros(6), 3, folder, wait=1)

    outcome = trained(tmp_path / "run")
    assert outcome.result["accuracy_global"] > 0.6 and outcome.result["rejected"] == 0
    recorded = read_json(tmp_path / "run" / "result.json")
    assert recorded["model_sha256"] == outcome.result["model_sha256"]
    events = read_events(tmp_path / "run")
    assert [e["t"] for e in events] == [0, 1, 2, 3]
    assert all(len(e["accepted"]) == 3 and e["loss"] is not None for e in events)
    assert same(trained(None).state.W, outcome.state.W), "with and without a folder"


def test_a_server_scores_its_model_on_a_test_set_of_no_node(tmp_path):
    c = own_config("plan.layers=full", "run.rounds=2")
    x, y = torch.randn(12, 6) + 2 * torch.eye(3, 6)[torch.arange(12) % 3], torch.arange(12) % 3

    def trained(**more):
        grid = own_grid(c, tmp_path / "nodes")
        return run_on_grid(grid, c, own_net(), torch.zeros(6), 3, wait=1, **more)

    outcome = trained(test=(x, y))
    net = own_net()
    net.load_state_dict(outcome.state.W)
    right = (net.eval()(x).argmax(1) == y).float().mean()
    assert outcome.result["score_central"] == pytest.approx(float(right))
    assert same(trained().state.W, outcome.state.W)
    with pytest.raises(InputError, match="pass the test set as test="):
        run_on_grid(
            FakeGrid(None, []), own_config("data.name=mnist", "data.test=official"), own_net(),
            torch.zeros(6), 3,
        )  # fmt: skip


def test_nodes_train_a_regression_on_two_inputs_and_score_it(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            with layers_draw_from(stream(3, Stream.INIT)):
                self.a, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, left, right):
            return self.out(torch.tanh(self.a(torch.cat([left, right], 1))))

    def data(context):
        rng = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        x = torch.randn(30, 4, generator=rng)
        return from_tensors((x[:, :2], x[:, 2:]), x.sum(1, keepdim=True), labelled=False)

    c = own_config("local.objective=regression", "plan.layers=full", "run.eval_every=1")
    nodes = [{"partition-id": i, "folder": str(tmp_path / f"client-{i}")} for i in range(3)]
    grid = FakeGrid(client_app(own(c, Sum, data)), nodes)
    example = (torch.zeros(2), torch.zeros(2))
    out = tmp_path / "run"
    outcome = run_on_grid(grid, c, Sum(), example, 0, out, target=torch.zeros(1), wait=1)
    assert outcome.result["rejected"] == 0 and outcome.result["score"]["name"] == "RMSE"
    G = [event["G"]["mean"] for event in read_events(out)]
    assert G[-1] < G[0]


def test_a_server_without_records_cannot_find_the_noise_and_trains_with_a_given_one(tmp_path):
    ldp = ["privacy.enabled=true", "plan.others=freeze"]
    grid = FakeGrid(None, [])
    with pytest.raises(InputError, match=r"fedp3 privacy sigma.*privacy\.noise_multiplier"):
        run_on_grid(grid, own_config(*ldp), own_net(), torch.zeros(6), 3)
    c = own_config(*ldp, "privacy.noise_multiplier=2.0", "privacy.epsilon=50.0")
    grid = own_grid(c, tmp_path / "nodes")
    outcome = run_on_grid(grid, c, own_net(), torch.zeros(6), 3, wait=1)
    assert outcome.result["rejected"] == 0 and outcome.state.t == 4


def test_a_run_on_a_grid_is_continued_only_on_request_and_only_with_its_own_settings(tmp_path):
    c = own_config()

    def run(config_, **options):
        grid = own_grid(config_, tmp_path / "nodes")
        example, out = torch.zeros(6), tmp_path / "run"
        return run_on_grid(grid, config_, own_net(), example, 3, out, wait=1, **options)

    first = run(c)
    with pytest.raises(InputError, match="holds a run already"):
        run(c)
    assert same(run(c, resume=True).state.W, first.state.W)
    with pytest.raises(InputError, match="begun with other settings"):
        run(own_config("local.lr=0.2"), resume=True)


def test_noise_from_a_seed_is_refused_by_the_server_too():
    seeded = own_config(
        "privacy.enabled=true",
        "privacy.randomness=seeded",
        "privacy.noise_multiplier=2.0",
        "privacy.epsilon=50.0",
    )
    with pytest.raises(ConfigError, match="is for simulation"):
        run_on_grid(FakeGrid(None, []), seeded, own_net(), torch.zeros(6), 3)


def test_a_node_that_is_slow_to_identify_itself_is_queried_once_and_met_later(
    shared, tmp_path, monkeypatch
):
    monkeypatch.setattr("fedp3.engines.flower.grid.QUERY_SECONDS", 0.1)
    held = {}

    def slow(asked, answer):
        if asked.metadata.message_type == "query" and asked.metadata.dst_node_id == 103:
            held[asked.metadata.message_id] = answer
            return None
        return answer

    grid = grid_of(shared, tmp_path, spoil=slow)
    engine = engine_over(grid, shared)
    state, record = run_round(shared.server, shared.start, engine.execute)
    assert record.accepted == (0, 1, 2) and reasons(record) == {3: "no node is this client"}
    grid.waiting |= held
    _, record = run_round(shared.server, state, engine.execute)
    assert record.accepted == (0, 1, 2, 3) and len(held) == 1


def test_a_node_whose_process_broke_in_a_query_is_queried_again(shared, tmp_path):
    broke = []

    def breaks(asked, answer):
        if asked.metadata.message_type == "query" and not broke:
            broke.append(asked.metadata.dst_node_id)
            return Message(Error(2, "out of memory"), reply_to=asked)
        return answer

    engine = engine_over(grid_of(shared, tmp_path, spoil=breaks), shared)
    state, record = run_round(shared.server, shared.start, engine.execute)
    assert len(record.accepted) == 3
    _, record = run_round(shared.server, state, engine.execute)
    assert record.accepted == (0, 1, 2, 3)
