"""Messages are decoded as they were encoded, take the bytes that `costs` counts, or are refused."""

import contextlib
import hashlib
import io
import json
import math
import pickle
import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedp3.client.context import RunSpec
from fedp3.core import masks as M
from fedp3.core.errors import CodecError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.types import (
    ClientPlan,
    ClientUpdate,
    Kind,
    LayerMap,
    LayerPlan,
    Masks,
    Params,
    Rejection,
    RejectionCode,
    Task,
    Upload,
)
from fedp3.costs.traffic import traffic
from fedp3.messages.codec import (
    EXTRA_LIMIT,
    decode_task,
    decode_update,
    encode_task,
    encode_update,
)
from fedp3.messages.framing import HEADER_LIMIT, MAGIC, payload_size
from fedp3.messages.header_fields import MAX_DIMENSIONS, shape
from fedp3.messages.mask_code import mask_bytes, pack_mask, unpack_mask
from fedp3.models.layer_map import layer_map
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.planning.client_plans import HEADS, OTHERS, PlanSettings, client_plans
from fedp3.planning.dispatch import dispatch, global_tasks
from fedp3.planning.layer_sets import LAYER_SETS
from fedp3.planning.prune_settings import SELECTORS, PruneSettings, Selector
from fedp3.planning.selectors import random_weights
from worlds import judge

# --------------------------------------------------------------------------- nets and tasks


def _normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        norm(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 7),
        nn.Linear(7, 3),
    )


SEED = 4
MAGNITUDE, OPU2, PRUNE_ALL = (
    PruneSettings(),
    PlanSettings(layers="opu2"),
    PlanSettings(layers="prune-all", upload="retained"),
)
NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build(ModelSpec((1, 3, 3), 3, ModelSettings(name="mlp", width=0.01)), 0),
    "cnn": lambda: build(ModelSpec((1, 32, 32), 3, ModelSettings(name="cnn", width=1 / 32)), 0),
    "batch": lambda: _normed(nn.BatchNorm2d),
    "group": lambda: _normed(lambda c: nn.GroupNorm(3, c)),
    "resnet18": lambda: build(
        ModelSpec((1, 8, 8), 3, ModelSettings(name="resnet18", width=1 / 32)), 0
    ),
    "single": lambda: nn.Linear(4, 3),
    "not wired": lambda: nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 3)),
}


@lru_cache
def mapped(name: str) -> tuple[LayerMap, Params]:
    with layers_draw_from(stream(1, Stream.INIT)):
        net = NETS[name]()
    layers = layer_map(net)
    return layers, {n: net.state_dict()[n].clone() for n in layers.shapes}


def structured(selector: str) -> bool:
    return SELECTORS[selector].units is not None


@dataclass(frozen=True)
class Case:
    layers: LayerMap
    pruning: PruneSettings
    task: Task

    @property
    def down(self) -> bytes:
        return encode_task(self.task, self.layers, self.pruning)

    def up(self, update: ClientUpdate) -> bytes:
        return encode_update(update, self.task, self.layers, self.pruning.unfed_columns)

    def read(self, data: bytes) -> Task:
        return decode_task(data, self.layers, self.pruning, SEED)

    def read_update(self, data: bytes) -> ClientUpdate:
        return decode_update(data, self.task, self.layers, self.pruning.unfed_columns)

    def update(self, **fields: Any) -> ClientUpdate:
        """What a client might send: values everywhere, also where they are not uploaded."""
        rng = torch.Generator().manual_seed(5)
        names = (
            [n for l in self.task.plan.uploaded for n in self.layers.layers[l]]
            if self.task.kind == "train"
            else []
        )
        tensors = {n: torch.randn(self.layers.shapes[n], generator=rng) for n in names}
        return replace(
            ClientUpdate(
                client=self.task.plan.client,
                t=self.task.t,
                tensors=tensors,
                examples=17,
                metrics={"loss": 0.1},
            ),
            **fields,
        )


def case(
    net: str = "mlp",
    pruning: PruneSettings = MAGNITUDE,
    rules: PlanSettings = OPU2,
    keep: float = 0.4,
    client: int = 0,
    t: int = 2,
    upload: Upload | None = None,
) -> Case:
    """The task of one client of a fleet of six; `upload` replaces that of its pruned layers."""
    layers, W = mapped(net)
    plan = client_plans(rules, layers, [keep] * 6, SEED, t)[client]
    if upload is not None:
        changed = {
            l: replace(p, upload=upload) if p.send == "pruned" else p
            for l, p in plan.layers.items()
        }
        plan = replace(plan, layers=changed)
    [(weights, masks)] = dispatch(W, [plan], layers, pruning, t, SEED)
    return Case(
        layers, pruning, Task(t=t, plan=plan, weights=weights, masks=masks, state_from=t - 1)
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    net = draw(st.sampled_from(sorted(NETS)))
    rules = st.builds(
        PlanSettings,
        layers=st.sampled_from(
            [name for name in LAYER_SETS if net == "resnet18" or not name.startswith("resnet")]
        ),
        others=st.sampled_from(sorted(OTHERS)),
        head=st.sampled_from(sorted(HEADS)),
    )
    pruning = st.builds(
        PruneSettings,
        selector=st.sampled_from(sorted(SELECTORS)),
        unfed_columns=st.sampled_from(("abstain", "vote")),
    )
    keep = st.one_of(st.floats(0.001, 1), st.sampled_from((0.5, 0.9, 1.0)))
    made = case(
        net,
        draw(pruning),
        draw(rules),
        draw(keep),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 5)),
        draw(st.sampled_from(get_args(Upload))),
    )
    kind, evaluate = draw(st.sampled_from(get_args(Kind))), draw(st.booleans())
    return replace(made, task=replace(made.task, kind=kind, evaluate=evaluate))


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)) for n in a
    )


def same_masks(a: Masks, b: Masks) -> bool:
    return all(
        list(x) == list(y) and all(torch.equal(x[k], y[k]) for k in x)
        for x, y in ((a.units, b.units), (a.weights, b.weights))
    )


# --------------------------------------------------------------------------- round trips and sizes


@given(cases())
def test_a_task_comes_back_bit_for_bit(c: Case) -> None:
    got = c.read(c.down)
    assert same(got.weights, c.task.weights)
    assert same_masks(got.masks, c.task.masks)
    assert replace(got, weights={}, masks=Masks()) == replace(c.task, weights={}, masks=Masks())
    assert list(got.plan.layers) == list(c.task.plan.layers)


@given(cases(), st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3))
def test_an_update_comes_back_bit_for_bit_where_it_is_uploaded(
    c: Case, extras: list[list[int]]
) -> None:
    extra = {f"x{i}": torch.rand(shape) for i, shape in enumerate(extras)}
    sent = c.update(metrics={"loss": 0.1, "correct": 3, "tiny": 5e-324}, extra=extra)
    got = c.read_update(c.up(sent))
    masks = {
        n: M.uploaded(n, l, c.task.plan, c.task.masks, c.layers, c.pruning.unfed_columns)
        for l in c.task.plan.uploaded
        for n in c.layers.layers[l]
    }
    assert same(got.tensors, {n: M.zero_pruned(w, masks[n]) for n, w in sent.tensors.items()})
    assert same(got.extra, extra)
    assert replace(got, tensors={}, extra={}) == replace(sent, tensors={}, extra={})


@given(cases())
def test_payloads_weigh_exactly_what_the_plan_says(c: Case) -> None:
    cost = traffic(c.task.plan, c.layers, c.pruning)
    assert payload_size(c.down) == cost.down
    update = c.update(extra={"x": torch.ones(3, 5)})
    assert payload_size(c.up(update)) == (cost.up if c.task.kind == "train" else 0) + 60


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("keep", [0.05, 0.5, 0.97, 1.0])
def test_the_down_payload_is_values_and_underivable_masks_alone(
    net: str, selector: str, keep: float
) -> None:
    """Counted by loops: four bytes per value that is not pruned, and one mask per choice."""
    c = case(net, PruneSettings(selector=selector), keep=keep)
    bits = [(m.numel(), int(m.sum())) for m in c.task.masks.weights.values()]
    if SELECTORS[selector].across_tensors:
        bits = [(sum(n for n, _ in bits), sum(k for _, k in bits))]
    bits += [(c.layers.groups[g].units, len(at)) for g, at in c.task.masks.units.items()]
    masks = (
        0
        if SELECTORS[selector].derivable
        else sum(min(-(-n // 8), 4 * k, 4 * (n - k)) for n, k in bits)
    )
    values = 0
    for n in c.task.weights:
        values += 4 * int(M.as_bool(M.active(n, c.task.masks, c.layers), c.layers.shapes[n]).sum())
    assert payload_size(c.down) == values + masks
    assert traffic(c.task.plan, c.layers, c.pruning).masks == masks
    assert masks <= sum(-(-n // 8) for n, _ in bits)
    if keep < 1 and not structured(selector):
        assert bits or not any(p.send == "pruned" for p in c.task.plan.layers.values())


def test_a_derivable_mask_across_tensors_takes_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No selector of the package is of this kind, but a registered one may be."""
    selector = Selector(weights=random_weights, draws=True, across_tensors=True)
    monkeypatch.setitem(SELECTORS._table, "random_all", selector)
    c = case(pruning=PruneSettings(selector="random_all"))
    cost = traffic(c.task.plan, c.layers, c.pruning)
    assert (payload_size(c.down), cost.masks) == (cost.down, 0)
    assert same(c.read(c.down).weights, c.task.weights)


def test_the_server_model_is_sent_dense_for_evaluation() -> None:
    c = case(rules=PlanSettings(head="personal"))
    (task,) = global_tasks(mapped("mlp")[1], [c.task.plan], 2, {})
    got = c.read(encode_task(task, c.layers, c.pruning))
    assert set(got.weights) == {n for l in c.layers.hidden for n in c.layers.layers[l]}
    assert same(got.weights, {n: task.weights[n] for n in got.weights}) and got.kind == "evaluate"


def test_metrics_that_are_no_numbers_arrive_and_are_left_to_the_gate() -> None:
    c = case()
    got = c.read_update(
        c.up(c.update(metrics={"loss": math.nan, "best": math.inf, "worst": -math.inf}))
    )
    assert math.isnan(got.metrics["loss"]) and (got.metrics["best"], got.metrics["worst"]) == (
        math.inf,
        -math.inf,
    )
    spec = RunSpec(layers=c.layers, pruning=c.pruning, seed=SEED, rounds=3)
    accepted, result = judge([got], [c.task], spec, {0: 17})
    assert accepted == []
    assert result.rejected == {
        0: Rejection(RejectionCode.NOT_FINITE, "metric 'loss' and 2 more is not a finite number")
    }


# --------------------------------------------------------------------------- masks


@given(st.integers(1, 300), st.data())
def test_a_mask_comes_back_in_as_many_bytes_as_announced(n: int, data: st.DataObject) -> None:
    k = data.draw(st.one_of(st.integers(0, n), st.sampled_from((0, 1, n - 1, n))))
    on = data.draw(st.permutations(range(n)))[:k]
    mask = torch.zeros(n, dtype=torch.bool)
    mask[on] = True
    packed = pack_mask(mask)
    assert len(packed) == mask_bytes(n, k) <= min(math.ceil(n / 8), 4 * k, 4 * (n - k))
    assert torch.equal(unpack_mask(packed, n, k), mask)


SHORTEST = {
    (0, 0): 0,
    (1, 0): 0,
    (1, 1): 0,
    (8, 0): 0,
    (8, 8): 0,
    (9, 4): 2,
    (64, 1): 4,
    (64, 63): 4,
    (64, 2): 8,
}
SHORTEST |= {(10_000, 30): 120, (10_000, 5_000): 1_250, (10_000, 9_999): 4}


@pytest.mark.parametrize(("n", "k", "size"), [(*mask, size) for mask, size in SHORTEST.items()])
def test_a_mask_takes_the_shortest_of_bits_and_indices(n: int, k: int, size: int) -> None:
    assert mask_bytes(n, k) == size


@pytest.mark.parametrize("n", [1, 2, 7, 9])
def test_no_two_masks_look_alike(n: int) -> None:
    for k in range(n + 1):
        packed = set()
        for on in combinations(range(n), k):
            mask = torch.zeros(n, dtype=torch.bool)
            mask[list(on)] = True
            packed.add(pack_mask(mask))
        assert len(packed) == math.comb(n, k)


@pytest.mark.parametrize(
    ("data", "n", "k", "text"),
    [
        (b"\xff", 8, 3, "retains 8 of 8 coordinates, the plan says 3"),
        (b"\x00", 8, 3, "retains 0 of 8"),
        (b"", 8, 3, "takes 1 bytes, got 0"),
        (b"\xff\xff", 8, 3, "takes 1 bytes, got 2"),
        (struct.pack("<I", 64), 64, 1, "index is 64, beyond 64"),
        (struct.pack("<I", 2**32 - 1), 64, 63, "beyond 64"),
        (struct.pack("<II", 5, 5), 1000, 2, "retains 1 of 1000"),
        (struct.pack("<II", 5, 5), 1000, 998, "retains 999 of 1000"),
    ],
)
def test_a_mask_that_breaks_the_plan_is_refused(data: bytes, n: int, k: int, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        unpack_mask(data, n, k)


@given(st.binary(max_size=40), st.integers(0, 300), st.integers(0, 300))
def test_any_bytes_are_a_mask_of_the_planned_size_or_refused(data: bytes, n: int, k: int) -> None:
    k = min(k, n)
    with contextlib.suppress(CodecError):
        assert int(unpack_mask(data, n, k).sum()) == k


# --------------------------------------------------------------------------- what is refused


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<I", data[4:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def signed(header: Any, payload: bytes = b"") -> bytes:
    """A message whose checksum is right, whatever it says."""
    if isinstance(header, dict):
        header = {**header, "sha256": hashlib.sha256(payload).hexdigest()}
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(head)) + head + payload


def claims(**fields: Any) -> Callable[[bytes], bytes]:
    """The message with other claims in its header."""

    def change(data: bytes) -> bytes:
        header, payload = opened(data)
        return signed({**header, **fields}, payload)

    return change


def lacks(field: str) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header, payload = opened(data)
        return signed({k: v for k, v in header.items() if k != field}, payload)

    return change


def payload(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """The message with another payload, the checksum made to fit."""

    def message(data: bytes) -> bytes:
        header, old = opened(data)
        return signed(header, change(old))

    return message


def zipped(data: bytes) -> bytes:
    """Ten megabytes of zeros in ten kilobytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("weights", bytes(10_000_000))
    return out.getvalue()


def planned(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """The task with another plan in its header."""

    def message(data: bytes) -> bytes:
        header, old = opened(data)
        return signed({**header, "plan": change(header["plan"])}, old)

    return message


def layer_says(at: int, value: Any) -> Callable[[bytes], bytes]:
    """The task with one entry of one layer's plan changed."""
    return planned(
        lambda p: {**p, "fc1": [value if i == at else v for i, v in enumerate(p["fc1"])]}
    )


BROKEN: dict[str, Callable[[bytes], bytes]] = {  # of tasks and of updates
    "nothing": lambda data: b"",
    "one byte": lambda data: data[:1],
    "the magic alone": lambda data: data[:4],
    "no payload": lambda data: data[: len(data) - payload_size(data)],
    "all but one byte": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"\0",
    "half": lambda data: data[: len(data) // 2],
    "another magic": lambda data: b"fp3\x02" + data[4:],
    "zeros": lambda data: bytes(len(data)),
    "a pickle": lambda data: pickle.dumps({"a": 1}),
    "a zip": zipped,
    "a zip as payload": payload(zipped),
    "a flipped bit in the payload": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a flipped bit in the checksum": lambda data: data.replace(b'sha256":"', b'sha256":"0', 1),
    "a header of 4 GB": lambda data: MAGIC + b"\xff\xff\xff\xff" + data[8:],
    "a header beyond the end": lambda data: MAGIC + struct.pack("<I", len(data) - 7) + data[8:],
    "a header of 0 bytes": lambda data: MAGIC + bytes(4) + data[8:],
    "a header over the limit": lambda data: signed(b" " * HEADER_LIMIT + b"{}"),
    "no JSON": lambda data: signed(b"hello"),
    "half a JSON": lambda data: signed(b'{"kind":"'),
    "no UTF-8": lambda data: signed(b'{"kind":"\xff\xfe"}'),
    "deep JSON": lambda data: signed(b"[" * 500_000 + b"]" * 500_000),
    "deep dictionaries": lambda data: signed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a number too long": lambda data: signed(b'{"kind":' + b"9" * 100_000 + b"}"),
    "a list as header": lambda data: signed([1, 2]),
    "null as header": lambda data: signed(b"null"),
    "no checksum": lambda data: MAGIC + struct.pack("<I", 16) + b'{"kind":"task"} ' + data[-20:],
    "of another kind": claims(kind="theft"),
    "of no kind": lacks("kind"),
    "kind is a list": claims(kind=["task", "update"]),
    "short payload": payload(lambda p: p[:-4]),
    "long payload": payload(lambda p: p + bytes(4)),
    "huge payload": payload(lambda p: p + bytes(8_000_000)),
    "empty payload": payload(lambda p: b""),
    **{f"no {field}": lacks(field) for field in ("t", "client")},
    **{
        f"{field} = {str(v)[:12]}": claims(**{field: v})
        for field in ("t", "client")
        for v in (None, "1", 1.5, 1.0, True, -1, 2**31, 10**400, 1e400, math.nan, [1], {"a": 1})
    },
}
BROKEN_TASKS: dict[str, Callable[[bytes], bytes]] = {
    "an update": lambda data: case().up(case().update()),
    "no plan": lacks("plan"),
    "a plan of nothing": claims(plan={}),
    "a list as plan": claims(plan=[1]),
    "a layer missing": planned(lambda p: {l: v for l, v in p.items() if l != "fc2"}),
    "a layer too many": planned(lambda p: {**p, "fc9": p["fc1"]}),
    "another layer": planned(lambda p: {l.replace("fc2", "fc9"): v for l, v in p.items()}),
    "a layer not sent": layer_says(0, "none"),
    "a layer sent dense": planned(lambda p: {l: ["dense", *v[1:]] for l, v in p.items()}),
    "a layer pruned more": planned(lambda p: {l: [v[0], v[1] / 2, *v[2:]] for l, v in p.items()}),
    "short of an entry": planned(lambda p: {**p, "fc1": p["fc1"][:3]}),
    "an entry too many": planned(lambda p: {**p, "fc1": [*p["fc1"], 1]}),
    "text as entries": planned(lambda p: {**p, "fc1": "dense"}),
    **{f"send = {v}": layer_says(0, v) for v in ("everything", "", None, 1, ["dense"])},
    **{
        f"keep = {str(v)[:12]}": layer_says(1, v)
        for v in (0, -1, 1.01, math.nan, math.inf, -1e308, 10**400)
    },
    **{f"keep = {v!r}": layer_says(1, v) for v in ("1", None, [0.5])},
    **{f"train = {v}": layer_says(2, v) for v in (1, 0, "yes", None)},
    **{f"upload = {v}": layer_says(3, v) for v in ("everything", None, 0, ["all"])},
    **{f"evaluate = {v}": claims(evaluate=v) for v in (0, 1, "false", None)},
    **{f"task = {v}": claims(task=v) for v in ("steal", None, 0, ["train"], {"a": 1})},
    **{f"state_from = {v}": claims(state_from=v) for v in (-2, 0.5, None, "0", 1e400)},
    **{f"code = {v}": claims(code=v) for v in ("int7", None, 0, ["int8"], {"int8": 1})},
    "no code": lacks("code"),
}
BROKEN_UPDATES: dict[str, Callable[[bytes], bytes]] = {
    "a task": lambda data: case().down,
    **{f"no {field}": lacks(field) for field in ("examples", "metrics", "extra")},
    **{f"metrics = {v}": claims(metrics=v) for v in (None, [1], "loss", 1)},
    **{
        f"loss = {str(v)[:12]}": claims(metrics={"loss": v})
        for v in (None, "1", "nan", [1], {"a": 1}, True, 10**400)
    },
    **{f"extra = {v}": claims(extra=v) for v in (None, [1], "x", 1)},
    **{
        f"an extra of shape {str(v)[:24]}": claims(extra={"x": v})
        for v in (
            [1],
            [-1],
            [2**31],
            [10**400],
            [1.0],
            ["1"],
            [True],
            None,
            "12",
            {"1": 1},
            [2**30] * 9,
            [[1]],
        )
    },
    "extras that would share": claims(extra={"a": [-1], "b": [1]}),
    "empty extras of absurd shape": claims(extra={"a": [0, 2**30, 2**30, 2**30]}),
}


def refuses(read: Callable[[bytes], Any], data: bytes) -> str:
    """The reason a message is refused; it must come at once and take next to no memory."""
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(CodecError) as error:
            read(data)
        seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 1 and peak < 1_000_000 + 4 * HEADER_LIMIT, (seconds, peak)
    assert len(str(error.value)) < 250
    return str(error.value)


@pytest.mark.parametrize("selector", ["magnitude", "random", "neuron_norm"])
@pytest.mark.parametrize(
    "change", (BROKEN | BROKEN_TASKS).values(), ids=(BROKEN | BROKEN_TASKS).keys()
)
def test_a_broken_task_is_refused(change: Callable[[bytes], bytes], selector: str) -> None:
    c = case(pruning=PruneSettings(selector=selector), rules=PlanSettings(layers="lowerb"))
    c.read(c.down)
    refuses(c.read, change(c.down))


@pytest.mark.parametrize("selector", [name for name, s in SELECTORS.items() if not s.derivable])
def test_a_mask_that_keeps_another_number_than_planned_is_refused(selector: str) -> None:
    c = case(pruning=PruneSettings(selector=selector), rules=PlanSettings(layers="lowerb"))
    assert "the plan says" in refuses(c.read, payload(lambda p: bytes(2) + p[2:])(c.down))


@pytest.mark.parametrize(
    "change", (BROKEN | BROKEN_UPDATES).values(), ids=(BROKEN | BROKEN_UPDATES).keys()
)
def test_a_broken_update_is_refused(change: Callable[[bytes], bytes]) -> None:
    c = case()
    data = c.up(c.update())
    c.read_update(data)
    refuses(c.read_update, change(data))


def test_the_reason_names_what_is_wrong() -> None:
    c = case()
    data = c.up(c.update())
    assert refuses(c.read_update, b"PK\3\4garbage") == "these bytes are no fedp3 message"
    assert (
        refuses(c.read_update, data[:-1])
        == "the payload does not match its checksum: truncated or changed on the way"
    )
    assert (
        refuses(c.read_update, MAGIC + b"\xff" * 4)
        == "a header of 4294967295 bytes does not fit a message of 8 bytes"
    )
    assert (
        refuses(c.read_update, payload(lambda p: p[:-4])(data)) == "the payload ends 4 bytes early"
    )
    assert (
        refuses(c.read_update, payload(lambda p: p + b"1234")(data))
        == "4 bytes too many in the payload"
    )
    assert refuses(c.read_update, claims(t=-1)(data)).endswith(
        "ValueError: want an integer of at least 0"
    )
    assert refuses(c.read, c.up(c.update())) == "this is no message of kind 'task'"


def test_a_payload_larger_than_any_expected_one_is_refused_before_it_is_read() -> None:
    c = case()
    cost = traffic(c.task.plan, c.layers, c.pruning).up
    data = signed({"kind": "update"}, bytes(cost + EXTRA_LIMIT + 1))
    assert refuses(c.read_update, data).endswith(
        f"bytes, at most {cost + EXTRA_LIMIT} are accepted"
    )
    assert "at most" in refuses(c.read, signed({"kind": "task"}, bytes(1_000_000)))


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    c, marker = case(), tmp_path / "opened"
    trap = pickle.dumps(Trap(marker))
    buffer = io.BytesIO()
    torch.save(Trap(marker), buffer)
    for data in (trap, buffer.getvalue(), signed(trap), payload(lambda p: trap)(c.up(c.update()))):
        refuses(c.read_update, data)
        refuses(c.read, data)
    assert not marker.exists()
    pickle.loads(trap)
    assert marker.exists(), "the trap works"


# --------------------------------------------------------------------------- fuzz


def survives(read: Callable[[bytes], Any], data: bytes) -> None:
    """Either refused on purpose or read: never another exception."""
    with contextlib.suppress(CodecError):
        read(data)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    c = case()
    for message in (data, MAGIC + data, MAGIC + struct.pack("<I", len(data)) + data, signed(data)):
        survives(c.read, message)
        survives(c.read_update, message)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4),
    st.integers(0, 10**6),
)
def test_changed_bytes_raise_nothing_else(flips: list[tuple[int, int]], end: int) -> None:
    c = case("batch", rules=PRUNE_ALL)
    for read, message in ((c.read, c.down), (c.read_update, c.up(c.update()))):
        changed = bytearray(message)
        for at, by in flips:
            changed[at % len(changed)] ^= by
        survives(read, bytes(changed))
        survives(read, message[: end % len(message)])
        survives(
            read, payload(lambda p, changed=changed: bytes(changed[-len(p) :]) if p else p)(message)
        )


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from((2**31, -1, 0.5)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(
            (
                "t",
                "client",
                "plan",
                "task",
                "evaluate",
                "state_from",
                "examples",
                "metrics",
                "extra",
                "kind",
                "new",
            )
        ),
        anything,
        min_size=1,
    ),
    st.sampled_from(sorted(SELECTORS)),
)
def test_any_claim_in_a_signed_header_raises_nothing_else(
    header: dict[str, Any], selector: str
) -> None:
    c = case("batch", PruneSettings(selector=selector), PRUNE_ALL)
    survives(c.read, claims(**header)(c.down))
    survives(c.read_update, claims(**header)(c.up(c.update())))


@given(
    st.dictionaries(
        st.sampled_from(("0", "5", "7")), st.lists(anything, min_size=4, max_size=4), min_size=1
    )
)
def test_any_layer_plan_in_a_signed_header_raises_nothing_else(
    layers: dict[str, list[Any]],
) -> None:
    for selector in SELECTORS:
        c = case("batch", PruneSettings(selector=selector), PRUNE_ALL)
        survives(c.read, planned(lambda p: {**p, **layers})(c.down))


def test_a_round_trip_by_hand() -> None:
    """One of 2x2 weights pruned: one byte of mask (an index would take four), then the values."""
    layers = LayerMap(
        {"l": ("l.w",), "h": ("h.w",)},
        {"l.w": (2, 2), "h.w": (1,)},
        {},
        {},
        frozenset({"l.w"}),
        frozenset(),
    )
    plan = ClientPlan(0, {"l": LayerPlan(send="pruned", keep=0.75), "h": LayerPlan()})
    mask = torch.tensor([[True, False], [True, True]])
    weights = {"l.w": torch.tensor([[1.0, 0.0], [3.0, 4.0]]), "h.w": torch.tensor([5.0])}
    data = encode_task(
        Task(t=0, plan=plan, weights=weights, masks=Masks(weights={"l.w": mask})),
        layers,
        PruneSettings(),
    )
    assert opened(data)[1] == bytes([0b10110000]) + struct.pack("<4f", 1, 3, 4, 5)


def test_an_extra_with_endless_dimensions_is_refused_in_few_words():
    assert shape([1] * MAX_DIMENSIONS, 10) == [1] * MAX_DIMENSIONS
    with pytest.raises(ValueError, match=f"300000 dimensions, at most {MAX_DIMENSIONS}"):
        shape([1] * 300_000, 10)
