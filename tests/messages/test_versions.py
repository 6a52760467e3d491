"""Published weights: what clients hold is what the server published, to the bit and to the byte."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedp3.core.errors import CodecError, CopyError
from fedp3.core.trees import flatten, unflatten
from fedp3.core.types import ClientPlan, ClientState, LayerMap, LayerPlan, Params, Task
from fedp3.costs.traffic import traffic
from fedp3.messages.codec import decode_task, encode_task
from fedp3.messages.compression import DownloadSettings
from fedp3.messages.compressors import COMPRESSORS
from fedp3.messages.copies import as_copies, copy_in, copy_tensors, initial_copy, split_copy
from fedp3.messages.framing import MAGIC, payload_size
from fedp3.messages.published_file import restored, saved
from fedp3.messages.versions import (
    Published,
    begin,
    copy_bytes_of,
    download_of,
    publish,
    with_holders,
)
from fedp3.planning.dispatch import dispatch
from fedp3.planning.prune_settings import PruneSettings
from worlds import world

SEED = 0
CODES = [name for name in COMPRESSORS if name != "none"]
DENSE_ONLY = ("topk",)  # refused where layers are pruned


@dataclass
class Fleet:
    """A server and clients that exchange real messages: naive, every client has its own copy."""

    settings: DownloadSettings
    pruning: PruneSettings
    known: bool = True
    kind: str = "batchnorm"
    seen: dict[int, int] = field(default_factory=dict)
    stored: dict[int, ClientState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = world(self.kind, pruning=self.pruning)
        self.layers: LayerMap = self.world.layers
        self.W: dict[str, torch.Tensor] = dict(self.world.W)
        self.published: Published = begin(self.W, self.layers, self.settings, known=self.known)
        self.t = 0
        self.bytes: list[int] = []

    def task(self, client: int, keep: float) -> Task:
        """What the server sends to one client."""
        rest = LayerPlan(send="pruned", keep=keep) if keep < 1 else LayerPlan()
        plan = ClientPlan(client, dict.fromkeys(self.layers.hidden, rest))
        plan = replace(plan, layers={**plan.layers, self.layers.head: LayerPlan()})
        R, layers = self.published.R, self.layers
        ((weights, masks),) = dispatch(R, [plan], layers, self.pruning, self.t, SEED)
        task = Task(
            t=self.t,
            plan=plan,
            weights=weights,
            masks=masks,
            state_from=self.seen.get(client, -1),
        )
        mask_bytes = traffic(plan, layers, self.pruning).masks
        download = download_of(
            self.published, plan, masks, layers, "abstain", self.settings, mask_bytes
        )
        return replace(task, download=download)

    def receive(self, task: Task) -> Task:
        """A message to a client, and what the client makes of it with its own copy."""
        client = task.plan.client
        data = encode_task(task, self.layers, self.pruning, self.settings)
        assert task.download is not None
        assert payload_size(data) == task.download.bytes, "what is counted is what is sent"
        self.bytes.append(task.download.bytes)

        def find(t: int):
            if t < 0:
                return initial_copy(self.world.W, self.layers, self.settings)
            return copy_in(self.stored.get(client)) if self.stored[client].t == t else None

        return decode_task(data, self.layers, self.pruning, SEED, 0, self.settings, find)

    def round(self, participants: Mapping[int, float], change: float = 0.1) -> None:
        """One round: everybody who takes part gets a task and is accepted."""
        accepted = {}
        for client, keep in participants.items():
            task = self.task(client, keep)
            got = self.receive(task)
            assert got.weights.keys() == task.weights.keys()
            for n, w in task.weights.items():
                assert torch.equal(got.weights[n], w), "a client knows R to the bit"
            copy = copy_tensors(got, self.layers, "abstain", self.settings)
            self.stored[client] = ClientState(self.t, copy)
            self.seen[client] = self.t
            accepted[client] = (task.plan, task.masks)
        self.publish(accepted, change)

    def publish(self, accepted: Mapping[int, tuple] = {}, change: float = 0.1) -> None:
        rng = torch.Generator().manual_seed(self.t)
        changed = [l for j, l in enumerate(self.layers.layers) if (self.t + j) % 3]
        for l in changed:
            for n in self.layers.layers[l]:
                self.W[n] = self.W[n] + change * torch.randn(self.W[n].shape, generator=rng).abs()
        published = with_holders(self.published, accepted, self.layers, "abstain")
        self.published = publish(
            published, self.W, changed, self.layers, self.settings, SEED, self.t
        )
        self.t += 1


SELECTORS = ("ordered", "neuron", "rolling", "magnitude", "random", "magnitude_all")


@settings(max_examples=25)
@given(st.data())
def test_every_client_knows_the_published_weights_to_the_bit(data: st.DataObject) -> None:
    """Whoever was absent, for however long, with any code, selector and mixture of devices."""
    code = data.draw(st.sampled_from(CODES))
    fleet = Fleet(
        DownloadSettings(
            compress=code,
            share=0.3,
            entropy=data.draw(st.booleans()),
            copy=data.draw(st.sampled_from(["fp16", "fp32"])),
        ),
        PruneSettings(selector=data.draw(st.sampled_from(SELECTORS))),
        known=data.draw(st.booleans()),
    )
    keeps = [1.0] if code in DENSE_ONLY else [1.0, 0.5, 0.25]
    for _ in range(data.draw(st.integers(1, 7))):
        clients = data.draw(st.sets(st.integers(0, 3), max_size=4))
        fleet.round({i: data.draw(st.sampled_from(keeps)) for i in sorted(clients)})


@pytest.mark.parametrize("code", CODES)
def test_absences_of_thirty_rounds_and_joiners_in_mid_run(code: str) -> None:
    fleet = Fleet(DownloadSettings(compress=code), PruneSettings())
    fleet.round({0: 1.0, 1: 1.0})
    for _ in range(30):
        fleet.round({0: 1.0})
    steady = fleet.bytes[-1]
    fleet.round({0: 1.0, 1: 1.0, 2: 1.0})
    of_0, of_1, of_2 = fleet.bytes[-3:]
    copy = copy_bytes_of(list(fleet.layers.shapes), fleet.layers, fleet.settings)
    assert of_0 <= max(fleet.bytes[1:31])
    assert of_1 <= copy and of_2 <= copy, "nobody is ever sent more than a copy"
    assert steady < copy


def test_a_client_that_is_up_to_date_is_sent_nothing() -> None:
    fleet = Fleet(DownloadSettings(compress="ternary"), PruneSettings())
    fleet.round({0: 1.0})
    assert fleet.bytes == [0], "it makes W_0 itself"
    fleet.published = with_holders(fleet.published, {}, fleet.layers, "abstain")
    before = fleet.t
    fleet.round({0: 1.0})
    assert fleet.bytes[-1] > 0
    # A layer that did not change costs nothing: only every third one is left out in each round.
    changed = [l for j, l in enumerate(fleet.layers.layers) if (before - 1 + j) % 3]
    plan = ClientPlan(0, {l: LayerPlan() for l in fleet.layers.layers})
    sizes = {l: t for l, t in _by_layer(plan, fleet).items() if l in changed}
    assert fleet.bytes[-1] == sum(sizes.values())


def _by_layer(plan: ClientPlan, fleet: Fleet) -> dict[str, int]:
    from fedp3.costs.traffic import traffic_by_layer
    from fedp3.messages.compression import UNCOMPRESSED

    by_layer = traffic_by_layer(plan, fleet.layers, fleet.pruning, UNCOMPRESSED, fleet.settings)
    return {l: t.down for l, t in by_layer.items()}


def test_where_the_client_cannot_make_the_initial_weights_they_are_sent_and_counted() -> None:
    fleet = Fleet(DownloadSettings(compress="ternary"), PruneSettings(), known=False)
    fleet.round({0: 1.0})
    copy = copy_bytes_of(list(fleet.layers.shapes), fleet.layers, fleet.settings)
    assert fleet.bytes == [copy]


@pytest.mark.parametrize("code", CODES)
def test_what_a_code_loses_is_sent_later(code: str) -> None:
    """With unchanged weights, publishing again and again brings R to W."""
    fleet = Fleet(DownloadSettings(compress=code, copy="fp32", share=0.2), PruneSettings())
    fleet.publish(change=1.0)
    names = [n for n in fleet.W if n not in fleet.layers.buffers]

    def off() -> float:
        return max(float((fleet.W[n] - fleet.published.R[n]).abs().max()) for n in names)

    first = off()
    for t in range(1, 60):
        fleet.published = publish(
            fleet.published, fleet.W, list(fleet.layers.layers), fleet.layers, fleet.settings, 0, t
        )
    assert off() < 0.05 * first


def test_half_precision_copies_hold_exactly_what_is_published() -> None:
    fleet = Fleet(DownloadSettings(compress="int4"), PruneSettings())
    for _ in range(5):
        fleet.round({0: 1.0})
    for n, w in fleet.published.R.items():
        if n not in fleet.layers.buffers:
            assert torch.equal(w.half().float(), w)
            assert not ((w == 0) & w.signbit()).any(), "-0.0 does not survive a scattered copy"


# --------------------------------------------------------------------------- damage


def prepared() -> tuple[Fleet, Task, bytes]:
    """A fleet with a client that was sent weights, its next task, and that task's message."""
    fleet = Fleet(DownloadSettings(compress="ternary"), PruneSettings())
    fleet.round({0: 1.0})
    fleet.round({0: 1.0})
    task = fleet.task(0, 1.0)
    return fleet, task, encode_task(task, fleet.layers, fleet.pruning, fleet.settings)


def decoded(fleet: Fleet, data: bytes, copy: object) -> Task:
    return decode_task(data, fleet.layers, fleet.pruning, SEED, 0, fleet.settings, lambda t: copy)


def test_a_client_without_its_copy_says_so() -> None:
    fleet, _, data = prepared()
    with pytest.raises(CopyError, match="holds no copy"):
        decoded(fleet, data, None)


def test_a_client_whose_copy_changed_says_so() -> None:
    fleet, _, data = prepared()
    copy = dict(copy_in(fleet.stored[0]) or {})
    n = next(iter(copy))
    values = copy[n][0].clone()
    values.view(-1)[0] += 0.25
    with pytest.raises(CopyError, match="not what the server published"):
        decoded(fleet, data, {**copy, n: (values, None)})
    # afterwards it is sent copies, which need nothing that it holds
    fleet.published = replace(fleet.published, held={0: None})
    fleet.round({0: 1.0})


def test_copies_stand_for_the_same_weights() -> None:
    fleet, task, _ = prepared()
    copied = as_copies(task, fleet.layers, "abstain", fleet.settings)
    data = encode_task(copied, fleet.layers, fleet.pruning, fleet.settings)
    assert copied.download is not None and payload_size(data) == copied.download.bytes
    got = decoded(fleet, data, None)
    assert all(torch.equal(got.weights[n], w) for n, w in task.weights.items())


def test_a_run_that_sends_weights_refuses_changes() -> None:
    fleet, _, data = prepared()
    with pytest.raises(CodecError, match="sends weights"):
        decode_task(data, fleet.layers, fleet.pruning, SEED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"missed":[1', b'"missed":[9'),  # more changes than rounds
        (b'"missed":[1', b'"missed":[-'),  # not JSON
        (b'"missed":[', b'"missed":["x",'),
        (b'"missed":[1,', b'"missed":['),
        (b'"missed":[', b'"missed":[[],'),
    ],
)
def test_an_impossible_number_of_changes_is_refused(old: bytes, new: bytes) -> None:
    fleet, _, data = prepared()
    start = data.index(b'"missed"')
    part = data[start : start + 40]
    old = old if old in part else old.replace(b"1", part[len(b'"missed":[') :][:1])
    changed = data.replace(old, new, 1)
    length = int.from_bytes(data[4:8], "little") + len(new) - len(old)
    changed = MAGIC + length.to_bytes(4, "little") + changed[8:]
    with pytest.raises(CodecError):
        decoded(fleet, changed, copy_in(fleet.stored[0]))


# --------------------------------------------------------------------------- stored


@pytest.mark.parametrize("selector", ["ordered", "magnitude", "magnitude_all"])
def test_a_checkpoint_stores_what_is_published_and_held(selector: str) -> None:
    from safetensors.torch import load, save

    fleet = Fleet(DownloadSettings(compress="ternary"), PruneSettings(selector=selector))
    for _ in range(3):
        fleet.round({0: 1.0, 1: 0.5, 2: 0.5})
    fleet.published = replace(fleet.published, held={**fleet.published.held, 2: None})
    plain, tensors = flatten(saved(fleet.published), "published")
    again = restored(unflatten(plain, load(save(tensors))))
    assert again is not None and again.versions == fleet.published.versions
    assert again.held[2] is None
    before, fleet.published = fleet.published, again
    task = fleet.task(1, 0.5)
    fleet.published = before
    original = fleet.task(1, 0.5)
    assert task.download is not None and original.download is not None
    assert task.download.bytes == original.download.bytes
    assert all(torch.equal(task.weights[n], w) for n, w in original.weights.items())


def test_nothing_published_is_stored_as_nothing() -> None:
    assert saved(None) is None and restored(None) is None


def test_a_state_is_separated_from_its_copy() -> None:
    fleet, _, _ = prepared()
    own: Params = {"residual/x": torch.ones(2)}
    state = ClientState(1, {**own, **fleet.stored[0].tensors})
    without, copy = split_copy(state)
    assert without.tensors == own
    assert copy.tensors.keys() == fleet.stored[0].tensors.keys()
