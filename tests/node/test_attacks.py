"""A dishonest server against an unchanged node: what a review of 0.1.0.dev got, and cannot get now.

Each test sends crafted messages to a real ClientApp, as a server could.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from fedp3 import config
from fedp3.core.types import ClientPlan, LayerPlan, Masks, Task
from fedp3.engines.flower.client_app import client_app, configured_node
from fedp3.engines.flower.records import (
    ABOUT,
    FAILURE,
    about_record,
    failure_in,
    frame_of,
    put_frame,
)
from fedp3.experiment.assemble import assemble
from fedp3.experiment.experiment import Experiment
from fedp3.messages.codec import decode_update, encode_task
from fedp3.node.context import Request
from fedp3.node.records import read_marks
from fedp3.planning.dispatch import dispatch, global_tasks, training_tasks
from fedp3.planning.revised_plans import without_layers
from fedp3.privacy.ledger import read
from fedp3.privacy.mechanism import mechanism_of
from fedp3.privacy.settings import Mechanism
from fedp3.server.round_plans import plans_for
from flower.fakes import in_a_run

from flwr.app import Context, Message, MessageType, RecordDict  # isort: skip

RUN = "cd" * 16
SMALL = [
    "model.width=0.02",
    "partition.clients=4",
    "run.clients_per_round=0",
    "run.rounds=2",
    "local.steps=2",
]
LDP = [
    "privacy.enabled=true",
    "privacy.noise_multiplier=2.0",
    "privacy.epsilon=50.0",
    "privacy.randomness=os",
]
AUTO_NOISE = ["privacy.enabled=true", "privacy.epsilon=2.0", "privacy.randomness=os"]
PERSONAL = ["plan.head=personal"]
POLICY = "[privacy]\nepsilon = 3.0\n"


@pytest.fixture(autouse=True)
def _in_a_run() -> Any:
    with in_a_run():
        yield


class Device:
    """One node, and a server that may send it anything."""

    def __init__(self, folder: Path, *overrides: str, policy: str = "") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if policy:
            (folder / "policy.toml").write_text(policy)
        self.experiment: Experiment = assemble(config.parse({}, [*SMALL, *overrides]))
        self.app = client_app(configured_node(self.experiment.config))
        self.context = Context(7, 1, {"partition-id": 0, "folder": str(folder)}, RecordDict(), {})

    def tasks(self, **changes: Any) -> Task:
        """An honest training task of round 0, with changes."""
        e = self.experiment
        spec = e.server.spec
        (task,) = training_tasks(
            e.start.W,
            e.first_plans[:1],
            spec.layers,
            spec.pruning,
            0,
            spec.seed,
            {},
            evaluate=False,
            extra={},
        )
        return replace(task, **changes)

    def send(self, task: Task, run: str = RUN, mechanism: Mechanism | None = None) -> RecordDict:
        spec = self.experiment.server.spec
        content = put_frame(RecordDict(), encode_task(task, spec.layers, spec.pruning))
        mechanism = mechanism or mechanism_of(self.experiment.client)
        content[ABOUT] = about_record(Request(run=run, mechanism=mechanism))
        reply = self.app(Message(content, 1, MessageType.TRAIN), self.context)
        return reply.content

    def update(self, task: Task, **options: Any) -> Any:
        spec = self.experiment.server.spec
        content = self.send(task, **options)
        assert FAILURE not in content, failure_in(content)
        return decode_update(
            frame_of(content), task, spec.layers, spec.pruning.unfed_columns, spec.compression
        )

    def log(self) -> str:
        return (self.folder / "refusals.log").read_text()


def with_head(task: Task, experiment: Experiment, head: LayerPlan) -> Task:
    """The task with another plan of the head."""
    layers = dict(task.plan.layers)
    layers[experiment.server.layers.head] = head
    return replace(task, plan=ClientPlan(task.plan.client, layers))


# --------------------------------------------------------------------------- H1: personal layers


@pytest.mark.parametrize("ldp", [[], LDP], ids=["plain", "LDP"])
@pytest.mark.parametrize("train", [True, False])
def test_a_personal_head_is_not_uploaded_whatever_the_plan_says(
    ldp: list[str], train: bool, tmp_path: Path
) -> None:
    device = Device(tmp_path, *PERSONAL, *ldp)
    device.update(device.tasks())  # now the node has a state of its own
    crafted = with_head(
        device.tasks(state_from=0, t=1),
        device.experiment,
        LayerPlan(send="none", train=train, upload="all"),
    )
    before = len(read(tmp_path))
    assert "(plan)" in str(failure_in(device.send(crafted)))
    assert len(read(tmp_path)) == before, "a refused task is not charged"


def test_a_state_made_without_ldp_cannot_be_asked_for_by_a_run_under_ldp(tmp_path: Path) -> None:
    plain = Device(tmp_path, *PERSONAL)
    plain.update(plain.tasks())
    private = Device(tmp_path, *PERSONAL, *LDP)
    asked = private.tasks(state_from=0, t=1)
    assert "(state)" in str(failure_in(private.send(asked, run=RUN))), "the server chose the name"
    assert "belongs to another config" in private.log()


def test_a_layer_that_the_policy_withholds_is_not_uploaded(tmp_path: Path) -> None:
    device = Device(tmp_path, policy='[layers]\nnever_leave = ["ff*"]\n')
    assert "(plan)" in str(failure_in(device.send(device.tasks())))
    assert "ffc never leaves this node" in device.log()
    assert "(plan)" not in str(failure_in(device.send(device.tasks(kind="evaluate"))))


def test_uploading_personal_layers_needs_explicit_consent(tmp_path: Path) -> None:
    overrides = ["plan.head=personal_uploaded"]
    refused = Device(tmp_path / "a", *overrides)
    assert "(plan)" in str(failure_in(refused.send(refused.tasks())))
    allowed = Device(tmp_path / "b", *overrides, policy="[layers]\npersonal_uploaded = true\n")
    head = allowed.experiment.server.layers.layers[allowed.experiment.server.layers.head][0]
    assert head in allowed.update(allowed.tasks()).tensors


def test_only_the_layers_of_the_clients_own_plan_are_uploaded(tmp_path: Path) -> None:
    device = Device(tmp_path)
    task, W = device.tasks(), device.experiment.start.W
    assert set(task.plan.layers) - set(task.plan.uploaded), "the honest plan leaves a layer out"
    everything = ClientPlan(0, {l: LayerPlan() for l in task.plan.layers})
    greedy = replace(task, plan=everything, weights=W, masks=Masks())
    assert "(plan)" in str(failure_in(device.send(greedy)))
    device.update(task)


def test_a_device_may_be_sent_less_of_a_pruned_layer_but_not_more(tmp_path: Path) -> None:
    device = Device(tmp_path, "prune.keep=0.5")
    e, answered = device.experiment, {}
    for keep in (0.3, 0.5, 0.8):
        layers = {
            l: replace(p, keep=keep) if p.send == "pruned" else p
            for l, p in e.first_plans[0].layers.items()
        }
        plan, spec = ClientPlan(0, layers), e.server.spec
        ((weights, masks),) = dispatch(e.start.W, [plan], spec.layers, spec.pruning, 0, spec.seed)
        task = Task(t=0, plan=plan, weights=weights, masks=masks)
        answered[keep] = FAILURE not in device.send(task)
    assert answered == {0.3: True, 0.5: True, 0.8: False}


def test_rounds_that_the_config_does_not_have_are_refused(tmp_path: Path) -> None:
    """With plan.redraw a server could otherwise choose the round in which it gets any layer."""
    device = Device(tmp_path)
    device.update(device.tasks(t=1))
    for late in (device.tasks(t=2), device.tasks(t=3, kind="evaluate")):
        assert "(plan)" in str(failure_in(device.send(late)))
    device.update(device.tasks(t=2, kind="evaluate"))


def sent(device: Device, t: int, plan: ClientPlan) -> RecordDict:
    """The answer to a task of this round with this plan."""
    e = device.experiment
    spec = e.server.spec
    ((weights, masks),) = dispatch(e.start.W, [plan], spec.layers, spec.pruning, t, spec.seed)
    return device.send(Task(t=t, plan=plan, weights=weights, masks=masks))


def test_a_node_follows_a_schedule_and_gives_a_layer_only_in_its_round(tmp_path: Path) -> None:
    device = Device(
        tmp_path,
        *("method=fedpart", "plan.warm=1", "plan.stretch=1", "run.rounds=5"),
    )
    plans = [plans_for(device.experiment.server, t)[0] for t in range(5)]
    assert [plan.uploaded for plan in plans[1:]] == [("fc1",), ("fc2",), ("fc3",), ("ffc",)]
    for t in range(5):
        for other in range(5):
            accepted = FAILURE not in sent(device, t, plans[other])
            assert accepted == (other == t), (t, other)


def test_a_server_may_leave_out_layers_that_it_recycles_but_no_more(tmp_path: Path) -> None:
    device = Device(tmp_path, "method=fedluar", "prune.keep=0.5")  # two of four layers
    full, settings, keep = device.experiment.first_plans[0], device.experiment.config.plan, [0.5]
    for left_out, accepted in (
        ((), True),
        (("fc2",), True),
        (("fc1", "ffc"), True),
        (("fc1", "fc2", "fc3"), False),
    ):
        (plan,) = without_layers([full], left_out, settings, keep)
        assert (FAILURE not in sent(device, 1, plan)) == accepted, left_out
    assert "this config recycles 2 layers" in device.log()
    (plan,) = without_layers([full], ["fc2"], settings, keep)
    for change in ({"upload": "retained"}, {"keep": 0.9}, {"train": False}):
        layers = {**plan.layers, "fc2": replace(plan.layers["fc2"], **change)}
        assert FAILURE in sent(device, 1, ClientPlan(0, layers)), change


def test_a_server_may_select_any_layers_but_no_fewer(tmp_path: Path) -> None:
    device = Device(tmp_path, "method=selective")  # two of four layers
    full, settings = device.experiment.first_plans[0], device.experiment.config.plan
    for left_out, accepted in (((), True), (("fc1", "ffc"), True), (("fc1", "fc2", "fc3"), False)):
        (plan,) = without_layers([full], left_out, settings, [1.0])
        assert (FAILURE not in sent(device, 1, plan)) == accepted, left_out
    assert "this config does not select 2 layers" in device.log()


def test_a_layer_that_is_averaged_seldom_may_stay_on_the_node_for_some_rounds(
    tmp_path: Path,
) -> None:
    device = Device(tmp_path, "method=fedlama")
    full = device.experiment.first_plans[0]
    sent_and_kept = LayerPlan(upload="none")
    entries = {
        "received and stored": (sent_and_kept, True),
        "continued": (replace(sent_and_kept, send="none"), True),
        "continued and uploaded": (LayerPlan(send="none"), True),
        "frozen": (LayerPlan(train=False), False),
        "skipped": (LayerPlan(send="skip", train=False, upload="none"), False),
    }
    for name, (entry, accepted) in entries.items():
        plan = replace(full, layers={**full.layers, "fc2": entry})
        assert (FAILURE not in sent(device, 0, plan)) == accepted, name
    plain = Device(tmp_path / "plain", "method=fedavg")
    plan = replace(full, layers={**full.layers, "fc2": LayerPlan(send="none")})
    assert FAILURE in sent(plain, 0, plan), "only where the config averages layers seldom"


def test_a_weak_device_takes_the_steps_of_its_plan_and_no_others(tmp_path: Path) -> None:
    device = Device(
        tmp_path,
        *("method=fedavg", "prune.keep=0.5", "plan.weak_below=0.6", "plan.weak_steps=1"),
    )
    plan = device.experiment.first_plans[0]
    assert plan.steps == 1
    assert FAILURE not in sent(device, 0, plan)
    for steps in (0, 2):
        assert FAILURE in sent(device, 0, replace(plan, steps=steps))


def test_a_withheld_layer_that_the_network_does_not_have_is_a_mistake(tmp_path: Path) -> None:
    device = Device(tmp_path, policy='[layers]\nnever_leave = ["ffc", "head"]\n')
    assert "(plan)" in str(failure_in(device.send(device.tasks(kind="evaluate"))))
    assert "withholds 'head', and no layer" in device.log()


def test_a_server_cannot_fill_the_disk_with_states(tmp_path: Path) -> None:
    device = Device(tmp_path, *PERSONAL, policy="[runs]\nstored = 2\n")
    replies = [device.send(device.tasks(), run=f"{k:032x}") for k in range(4)]
    assert [FAILURE in reply for reply in replies] == [False, False, True, True]
    assert "--clear states" in device.log()
    device.update(device.tasks(t=1, state_from=0), run=f"{1:032x}")


# --------------------------------------------------------------------------- H2 and H3: scores


def evaluation(device: Device) -> Task:
    return global_tasks(device.experiment.start.W, device.experiment.first_plans[:1], 0, {})[0]


def test_a_node_with_an_epsilon_gives_no_scores_unless_its_owner_says_so(tmp_path: Path) -> None:
    for name, overrides, policy in (
        ("policy", LDP, POLICY),
        ("run", LDP, ""),
        ("policy alone", [], "[privacy]\nrequired = true\n"),
    ):
        device = Device(tmp_path / name, *overrides, policy=policy)
        content = device.send(evaluation(device))
        if FAILURE not in content:
            assert not device.update(evaluation(device)).metrics, name
    open_device = Device(tmp_path / "open")
    assert open_device.update(evaluation(open_device)).metrics["tested"] > 0
    consent = Device(
        tmp_path / "consent",
        *LDP,
        policy=POLICY + "[scores]\nenabled = true\n[split]\nown = true\n",
    )
    assert consent.update(evaluation(consent)).metrics["tested"] > 0


def test_scores_are_counted_and_capped(tmp_path: Path) -> None:
    device = Device(tmp_path, policy="[scores]\nlimit = 3\n")
    scored = [bool(device.update(evaluation(device)).metrics) for _ in range(5)]
    assert scored == [True] * 3 + [False] * 2
    charges = read(tmp_path)
    assert [c.released for c in charges] == ["scores"] * 3
    assert all(c.account == "test" and c.epsilon is None for c in charges), "exact: no epsilon"


def test_noisy_scores_are_accounted_and_stop_at_their_epsilon(tmp_path: Path) -> None:
    policy = "[scores]\nenabled = true\nnoise_multiplier = 4.0\nepsilon = 3.0\n"
    device = Device(tmp_path, policy=policy)
    seen = [device.update(evaluation(device)).metrics for _ in range(12)]
    released = [m for m in seen if m]
    assert 1 < len(released) < 12
    assert all("test_loss" not in m and 0 <= m["correct"] <= m["tested"] for m in released)
    assert len({m["correct"] for m in released}) > 1, "the noise is drawn anew"
    spent = [c.epsilon for c in read(tmp_path)]
    assert spent == sorted(spent) and spent[-1] is not None and spent[-1] <= 3.0


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_the_config_cannot_turn_training_records_into_test_records(
    share: float, tmp_path: Path
) -> None:
    policy = "[split]\nown = true\ntest_share = 0.4\n"
    shards = []
    for train_share in (0.7, share):
        device = Device(tmp_path, f"partition.train_share={train_share}", policy=policy)
        metrics = device.update(evaluation(device)).metrics
        shards.append(metrics["tested"])
    assert shards[0] == shards[1]


def test_records_that_trained_under_ldp_are_known_under_every_preprocessing(
    tmp_path: Path,
) -> None:
    mlp = Device(tmp_path, *LDP)
    mlp.update(mlp.tasks())
    trained = set(mlp.experiment.shards[0].train.tolist())
    assert len(read_marks(tmp_path).ids) == len(trained)
    # The CNN pads its images to 32x32, and another seed splits the records differently.
    cnn = Device(tmp_path, "model.name=cnn", "run.seed=5", "model.width=0.05")
    overlap = trained & set(cnn.experiment.shards[0].test.tolist())
    assert overlap and cnn.experiment.client.data.x.shape[-1] == 32
    tested = cnn.update(evaluation(cnn)).metrics["tested"]
    assert tested == len(cnn.experiment.shards[0].test) - len(overlap)


# --------------------------------------------------------------------------- noise and budget


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 1e-3},
        {"noise_multiplier": 0.0},
        {"clip": 1e3},
        {"sample_rate": 0.01},
        {"randomness": "seeded"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_task_cannot_change_the_mechanism_of_its_config(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    device = Device(tmp_path, *LDP)
    mechanism = replace(mechanism_of(device.experiment.client), **changes)  # type: ignore[type-var]
    assert "(privacy)" in str(failure_in(device.send(device.tasks(), mechanism=mechanism)))
    assert not read(tmp_path)


def test_noise_that_breaks_the_runs_own_promise_is_refused(tmp_path: Path) -> None:
    """With noise_multiplier = "auto" the server resolves the noise, and the node checks it."""
    device = Device(
        tmp_path, "privacy.enabled=true", "privacy.epsilon=2.0", "privacy.randomness=os"
    )
    honest = mechanism_of(device.experiment.client)
    assert honest is not None
    weak = replace(honest, noise_multiplier=honest.noise_multiplier / 3)
    assert "(budget)" in str(failure_in(device.send(device.tasks(), mechanism=weak)))
    assert "it promises 2" in device.log() and not read(tmp_path)
    device.update(device.tasks())
    assert [c.noise_multiplier for c in read(tmp_path)] == [honest.noise_multiplier]


@pytest.mark.filterwarnings("ignore")  # as on a node
@pytest.mark.parametrize("first", [1e200, 1e160, 1e308, 1e7])
def test_absurdly_much_noise_in_one_task_does_not_hide_what_others_cost(
    first: float, tmp_path: Path
) -> None:
    """Squares of such numbers overflow; epsilon was then 0 for all tasks of the node's life."""
    device = Device(tmp_path, *AUTO_NOISE, policy=POLICY)
    honest = mechanism_of(device.experiment.client)
    assert honest is not None
    for noise in (first, 1e-3):
        mechanism = replace(honest, noise_multiplier=noise)
        assert FAILURE in device.send(device.tasks(), mechanism=mechanism)
    assert not read(tmp_path)


def test_a_run_has_one_noise_multiplier(tmp_path: Path) -> None:
    device = Device(tmp_path, *AUTO_NOISE)
    device.update(device.tasks())
    honest = mechanism_of(device.experiment.client)
    assert honest is not None
    more = replace(honest, noise_multiplier=honest.noise_multiplier * 2)
    assert "(privacy)" in str(failure_in(device.send(device.tasks(t=1), mechanism=more)))
    device.update(device.tasks(t=1))


@pytest.mark.parametrize("noise", ["auto", "0"])
def test_clipping_without_noise_is_not_ldp_for_a_policy(noise: str, tmp_path: Path) -> None:
    device = Device(
        tmp_path,
        "privacy.enabled=true",
        "privacy.epsilon=inf",
        f"privacy.noise_multiplier={noise}",
        policy="[privacy]\nrequired = true\n",
    )
    assert "(privacy)" in str(failure_in(device.send(device.tasks())))


def test_a_delta_of_the_policy_that_protects_no_record_is_refused(tmp_path: Path) -> None:
    device = Device(tmp_path, *LDP, policy="[privacy]\nepsilon = 3.0\ndelta = 0.1\n")
    assert "(privacy)" in str(failure_in(device.send(device.tasks())))
    assert "delta 0.1 is not below" in device.log()


def test_all_runs_together_stay_within_the_policy(tmp_path: Path) -> None:
    device = Device(tmp_path, *LDP, policy="[privacy]\nepsilon = 0.7\ndelta = 1e-3\n")
    replies = [device.send(device.tasks(t=k % 2), run=f"{k % 2:032x}") for k in range(12)]
    refused = [FAILURE in reply for reply in replies]
    paid = refused.index(True)
    assert 0 < paid < 12 and all(refused[paid:]) and len(read(tmp_path)) == paid
    assert "over all runs; the policy allows 0.7" in device.log()


def test_a_lost_ledger_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    device = Device(tmp_path, *LDP, *PERSONAL)
    device.update(device.tasks())
    (tmp_path / "ledger.jsonl").unlink()
    assert "(budget)" in str(failure_in(device.send(device.tasks(t=1))))
    assert "deleted, cut or replaced" in device.log()
    (tmp_path / "trained").unlink()
    assert "(budget)" in str(failure_in(device.send(device.tasks(t=1))))
    (tmp_path / "node.json").unlink()  # the state is what remains
    assert "(state)" in str(failure_in(device.send(device.tasks(t=1, state_from=0))))


def test_lost_marks_are_not_taken_for_new_ones(tmp_path: Path) -> None:
    private = Device(tmp_path, *LDP)
    private.update(private.tasks())
    (tmp_path / "trained").unlink()
    plain = Device(tmp_path, "run.seed=5")
    assert "(budget)" in str(failure_in(plain.send(evaluation(plain))))
    assert "marks the records that trained under LDP, is gone" in plain.log()


def test_a_ledger_that_lost_its_scores_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    device = Device(tmp_path, policy="[scores]\nlimit = 2\n")
    device.update(evaluation(device))
    first = (tmp_path / "ledger.jsonl").read_bytes()
    device.update(evaluation(device))
    for content in (first, b""):
        (tmp_path / "ledger.jsonl").write_bytes(content)
        assert "(budget)" in str(failure_in(device.send(evaluation(device))))


@pytest.mark.parametrize("lost", ["append", "remember"])
def test_a_crash_between_ledger_and_marks_leaves_no_record_unmarked(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tmp_path, *LDP)

    def crash(*_: Any, **__: Any) -> Any:
        raise OSError("power cut")

    with monkeypatch.context() as broken:
        broken.setattr(f"fedp3.node.account.{lost}", crash)
        assert FAILURE in device.send(device.tasks())
    assert len(read_marks(tmp_path).ids) == len(device.experiment.shards[0].train)
    charged = len(read(tmp_path))
    device.update(device.tasks())  # the node goes on
    assert len(read(tmp_path)) == charged + 1


def test_a_node_that_had_a_policy_does_not_go_on_without_it(tmp_path: Path) -> None:
    device = Device(tmp_path, policy=POLICY)
    assert "(privacy)" in str(failure_in(device.send(device.tasks())))
    (tmp_path / "policy.toml").rename(tmp_path / "policy.old")
    assert "(setup)" in str(failure_in(device.send(device.tasks())))
    assert "is gone, and this node had one" in device.log()
    (tmp_path / "policy.old").rename(tmp_path / "policy.toml")
    assert "(privacy)" in str(failure_in(device.send(device.tasks())))


def test_a_node_that_lost_the_key_of_its_split_makes_no_other_split(tmp_path: Path) -> None:
    device = Device(tmp_path, policy="[split]\nown = true\n")
    tested = device.update(evaluation(device)).metrics["tested"]
    key = (tmp_path / "split.key").read_bytes()
    for lost in (b"", b"k" * 32):
        (tmp_path / "split.key").write_bytes(lost)
        assert "(setup)" in str(failure_in(device.send(evaluation(device))))
    (tmp_path / "split.key").unlink()
    assert "(setup)" in str(failure_in(device.send(evaluation(device))))
    (tmp_path / "split.key").write_bytes(key)
    assert device.update(evaluation(device)).metrics["tested"] == tested


def test_scores_beside_an_epsilon_need_a_split_of_the_node(tmp_path: Path) -> None:
    """Else one config scores records, exactly, on which another one trains later."""
    device = Device(tmp_path, *LDP, policy=POLICY + "[scores]\nenabled = true\n")
    assert "(setup)" in str(failure_in(device.send(evaluation(device))))
    assert "own = true" in device.log()


def test_a_run_without_ldp_is_refused_where_the_policy_needs_it(tmp_path: Path) -> None:
    device = Device(tmp_path, policy=POLICY)
    assert "(privacy)" in str(failure_in(device.send(device.tasks())))


# --------------------------------------------------------------------------- error texts


def test_no_value_of_the_data_reaches_the_server_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tmp_path)

    def broken(*_: Any) -> Any:
        raise ValueError("labels 0..7, want 0..3, record 17")

    monkeypatch.setattr("fedp3.engines.flower.client_app.load_parts", broken)
    content = device.send(device.tasks())
    assert dict(content[FAILURE]) == {"code": "training"}
    assert "record 17" in device.log()


def test_a_policy_file_with_a_mistake_stops_the_node(tmp_path: Path) -> None:
    device = Device(tmp_path, policy="[privacy]\nepsilom = 3.0\n")
    assert "(setup)" in str(failure_in(device.send(device.tasks())))


def test_weights_that_are_too_large_a_task_are_refused(tmp_path: Path) -> None:
    device = Device(tmp_path, policy="[runs]\nlargest_task_mb = 1e-4\n")
    assert "(capacity)" in str(failure_in(device.send(device.tasks())))
    assert torch.is_tensor(next(iter(device.tasks().weights.values())))
