"""Parts of a node: its policy file, folder, split, marks and permits."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedp3
from fedp3.core.errors import InputError, RunError
from fedp3.core.types import ClientPlan, Task
from fedp3.data import from_tensors, load
from fedp3.data.record_ids import record_ids
from fedp3.data.shards import Shard
from fedp3.node import folder as folders
from fedp3.node.account import charge_update, noisy_scores
from fedp3.node.admission import refused_configs
from fedp3.node.permits import (
    check_permit,
    make_owner_key,
    permit_text,
    read_permit,
    sign_permit,
)
from fedp3.node.policy import CAREFUL, Policy, load_policy, policy_text
from fedp3.node.records import Marks, own_split, read_marks, without_marked, write_marks
from fedp3.node.refusal import MEANINGS, RefusalCode, Refused, code_of, meaning
from fedp3.privacy.ledger import Anchor, read
from fedp3.privacy.settings import Mechanism, PrivacySettings

DATA = from_tensors(torch.randn(60, 5), torch.arange(60) % 3)
ALL = Shard(torch.arange(40), torch.arange(40, 60))
KEY = b"k" * 32

# --------------------------------------------------------------------------- identity of records


def test_a_record_has_one_identity_under_every_padding_and_at_every_index() -> None:
    plain, padded = load("digits"), load("digits", pad_to=32)
    indices = torch.tensor([3, 700, 41])
    assert record_ids(plain, indices) == record_ids(padded, indices)
    turned = replace(plain, x=plain.x.flip(0), y=plain.y.flip(0))
    assert record_ids(turned, len(plain.y) - 1 - indices) == record_ids(plain, indices)
    assert record_ids(plain, indices, KEY) != record_ids(plain, indices)
    relabelled = replace(plain, y=(plain.y + 1) % 10)
    assert not set(record_ids(relabelled, indices)) & set(record_ids(plain, indices))


def test_ids_that_a_user_gives_survive_another_preprocessing() -> None:
    names = [f"patient {j}" for j in range(60)]
    first = from_tensors(DATA.x, DATA.y, ids=names)
    second = from_tensors(DATA.x * 2 + 1, DATA.y, ids=names)
    everything = torch.arange(60)
    assert record_ids(first, everything) == record_ids(second, everything)
    with pytest.raises(InputError, match="60 samples but 59 different ids"):
        from_tensors(DATA.x, DATA.y, ids=[*names[:-1], "patient 0"])


# --------------------------------------------------------------------------- the node's own split


@given(st.floats(0.05, 0.95), st.integers(0, 40), st.integers(0, 20))
def test_a_split_is_stable_when_records_come_and_go_and_whatever_the_config_says(
    share: float, trained: int, tested: int
) -> None:
    whole = own_split(DATA, ALL, KEY, share)
    assert sorted([*whole.train.tolist(), *whole.test.tolist()]) == list(range(60))
    some = Shard(torch.arange(trained), torch.arange(40, 40 + tested))
    part = own_split(DATA, some, KEY, share)
    held = {*some.train.tolist(), *some.test.tolist()}
    assert set(part.test.tolist()) == set(whole.test.tolist()) & held
    assert set(part.train.tolist()) == set(whole.train.tolist()) & held


def test_a_split_follows_from_the_secret_of_the_node() -> None:
    splits = {tuple(own_split(DATA, ALL, bytes([k]) * 32, 0.5).test.tolist()) for k in range(8)}
    assert len(splits) == 8
    sizes = [len(test) for test in splits]
    assert 15 < sum(sizes) / 8 < 45


def test_a_record_that_a_shard_names_twice_is_split_once() -> None:
    twice = Shard(torch.arange(40), torch.arange(30, 60))
    split = own_split(DATA, twice, KEY, 0.3)
    assert sorted([*split.train.tolist(), *split.test.tolist()]) == list(range(60))


# --------------------------------------------------------------------------- marks


def test_marks_come_back_and_hide_exactly_the_marked_records(tmp_path: Path) -> None:
    assert read_marks(tmp_path) == Marks(Anchor(), frozenset())
    trained = frozenset(record_ids(DATA, torch.tensor([1, 41, 59])))
    marks = Marks(Anchor(7, "a" * 64), trained)
    write_marks(tmp_path, marks)
    assert read_marks(tmp_path) == marks
    unseen = without_marked(DATA, ALL, marks.ids)
    assert set(ALL.test.tolist()) - set(unseen.test.tolist()) == {41, 59}
    assert torch.equal(unseen.train, ALL.train)


@pytest.mark.parametrize("content", [b"cut", b"{}\nabc", b'{"entries": 1}x\n', b"\x00" * 32])
def test_marks_that_cannot_be_read_stop_the_node(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trained").write_bytes(content)
    with pytest.raises(RunError, match="unknown which records"):
        read_marks(tmp_path)


# --------------------------------------------------------------------------- the folder


def test_each_client_has_a_folder_of_its_own_and_no_other_client_may_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first, second = (folders.node_settings({"partition-id": i}) for i in (0, 1))
    assert first.folder != second.folder
    with pytest.raises(InputError, match="belongs to client 0, and this node is client 1"):
        folders.node_settings({"partition-id": 1, "folder": str(first.folder)})


@pytest.mark.parametrize("key", ["epsilon", "delta", "scores"])
def test_settings_that_moved_into_the_policy_are_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{key}=.*policy file; write one with: fedp3 node init"):
        folders.node_settings({"partition-id": 0, "folder": str(tmp_path), key: 1})


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({}, "does not know which client it is"),
        ({"partition-id": True}, "does not know which client"),
        ({"partition-id": 0, "capacity": 7.0}, "capacity=7.0 is not a share"),
        ({"partition-id": 0, "policy": "nowhere.toml"}, "there is no such file"),
    ],
)
def test_a_node_that_is_started_wrongly_says_why(
    node: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=text):
        folders.node_settings({"folder": str(tmp_path), **node})


def test_the_secret_of_a_node_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: keys.append(folders.secret_key(tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1 and len(keys[0]) == 32
    assert (tmp_path / "split.key").stat().st_mode & 0o077 == 0


def test_caches_can_be_listed_and_cleared_and_nothing_else_is_touched(tmp_path: Path) -> None:
    node = folders.node_settings({"partition-id": 0, "folder": str(tmp_path)})
    for path in ("prepared/a.safetensors", "runs/ab/state-1.safetensors", "ledger.jsonl"):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_bytes(b"1234")
    listed = folders.caches(node.folder)
    assert [(c.kind, c.bytes) for c in listed] == [("prepared", 4), ("states", 4)]
    for cache in listed:
        folders.clear(cache)
    assert not folders.caches(node.folder) and (tmp_path / "ledger.jsonl").exists()


def test_the_log_of_refusals_is_bounded(tmp_path: Path) -> None:
    for j in range(folders.LOG_LINES + 5):
        folders.log_refusal(tmp_path, "plan", f"refusal {j}\nsecond line")
    lines = (tmp_path / "refusals.log").read_text().splitlines()
    assert len(lines) == folders.LOG_LINES and lines[-1].endswith("plan: refusal 204 second line")


# --------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("path", "refused"),
    [("play.txt", False), ("a/b.txt", False), ("/etc/passwd", True), ("../x", True), ("~/x", True)],
)
def test_a_server_cannot_choose_which_file_of_a_node_trains(path: str, refused: bool) -> None:
    config = fedp3.make_config("data.name=text", f"data.path={path}")
    texts = [text for _, text in refused_configs(Policy(), config)]
    assert any("leaves this node's data folder" in text for text in texts) is refused


@pytest.mark.parametrize("policy", [Policy(), CAREFUL])
def test_a_policy_that_was_written_reads_back(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(policy_text(policy))
    assert load_policy(tmp_path / "policy.toml") == policy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[privacy]\nepsilom = 1", "epsilom"),
        ("[privacy]\nepsilon = -1", "greater than 0"),
        ("[secrets]\na = 1", "secrets"),
        ('[runs]\nowners = ["short"]', "owners"),
        ("[scores]\nlimit = -1", "limit"),
        ("epsilon: 3", "is not TOML"),
    ],
)
def test_a_policy_with_a_mistake_is_refused_and_never_read_in_part(
    text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(InputError, match=reason):
        load_policy(tmp_path / "policy.toml")


def test_a_finite_epsilon_means_ldp_is_required() -> None:
    assert CAREFUL.privacy.needs_ldp and not Policy().privacy.needs_ldp


# --------------------------------------------------------------------------- scores


def test_noise_on_scores_has_the_variance_that_is_accounted() -> None:
    metrics = {"correct": 5000, "tested": 10_000, "test_loss": 1.0}
    draws = torch.tensor(
        [noisy_scores(metrics, 20.0)["correct"] for _ in range(4000)], dtype=torch.float64
    )
    assert abs(float(draws.mean()) - 5000) < 6 * 20 / 4000**0.5
    assert abs(float(draws.var()) / 400 - 1) < 6 * (2 / 4000) ** 0.5
    assert noisy_scores(metrics, 0.0) == metrics
    assert noisy_scores({"density": 1.0}, 3.0) == {"density": 1.0}


# --------------------------------------------------------------------------- permits


def test_a_permit_holds_for_its_run_config_owner_and_time_alone(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    owner, stranger = (make_owner_key(tmp_path / name) for name in ("owner", "stranger"))
    assert (tmp_path / "owner").stat().st_mode & 0o077 == 0
    now = int(time.time())
    permit = sign_permit(tmp_path / "owner", "c" * 64, now + 60)
    assert read_permit(permit_text(permit)) == permit
    check_permit(permit, [owner], permit.run, "c" * 64, now)
    check_permit(None, [], "any", "any", now)
    forged = replace(permit, signature=sign_permit(tmp_path / "stranger", "c" * 64, 9).signature)
    for wrong, owners, run, config, when in (
        (None, [owner], permit.run, "c" * 64, now),
        (permit, [stranger], permit.run, "c" * 64, now),
        (permit, [owner], "0" * 32, "c" * 64, now),
        (permit, [owner], permit.run, "d" * 64, now),
        (permit, [owner], permit.run, "c" * 64, now + 61),
        (replace(permit, expires=now + 10**6), [owner], permit.run, "c" * 64, now + 61),
        (replace(permit, run="0" * 32), [owner], "0" * 32, "c" * 64, now),
        (forged, [owner], permit.run, "c" * 64, now),
        (replace(permit, signature="zz"), [owner], permit.run, "c" * 64, now),
    ):
        with pytest.raises(Refused) as refused:
            check_permit(wrong, owners, run, config, when)
        assert refused.value.code == RefusalCode.PERMIT


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": 5}', "x" * 9000])
def test_what_is_no_permit_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        read_permit(text)


# --------------------------------------------------------------------------- codes


def test_every_code_has_a_meaning_and_foreign_codes_are_not_repeated() -> None:
    assert set(MEANINGS) == set(RefusalCode)
    assert "unknown code" in meaning("<script>") and "<script>" not in meaning("<script>")
    assert code_of(ValueError("17")) == RefusalCode.TRAINING
    assert code_of(InputError("17")) == RefusalCode.SETUP


# --------------------------------------------------------------------------- charges at once


def test_tasks_at_once_lose_neither_a_charge_nor_a_mark(tmp_path: Path) -> None:
    node = folders.node_settings({"partition-id": 0, "folder": str(tmp_path)})
    mechanism, settings = Mechanism(noise_multiplier=4.0), PrivacySettings(epsilon=1e3)

    def work(t: int) -> None:
        task = Task(t=t, plan=ClientPlan(0, {}), weights={})
        mine = Shard(torch.arange(6 * t, 6 * t + 6), torch.arange(0))
        charge_update(node, f"run {t}", task, mechanism, 2, settings, DATA, mine)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(work, range(10)))
    assert sorted(c.t for c in read(tmp_path)) == list(range(10))
    assert read_marks(tmp_path).ids == set(record_ids(DATA, torch.arange(60)))
    assert read_marks(tmp_path).anchor.entries == 10
