"""A client whose plan names a code does what it would do in a run that has this code."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedp3.client.context import RunSpec
from fedp3.core.types import ClientUpdate, Task
from fedp3.costs.traffic import traffic
from fedp3.messages.codec import decode_task, decode_update, encode_task, encode_update
from fedp3.messages.compression import RESIDUAL, PackedUpload, UploadSettings, pack, unpack
from fedp3.messages.compressors import COMPRESSORS
from fedp3.messages.framing import payload_size
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.dispatch import dispatch
from fedp3.planning.prune_settings import PruneSettings
from fedp3.server.gate import expected_update
from worlds import world

SEED = 3
HERE = {kind: world(kind).context for kind in ("mlp", "batchnorm")}
INTEGERS = ("int8", "int4", "ternary")


def task_of(kind: str, selector: str, client: int = 0, t: int = 1) -> tuple[RunSpec, Task]:
    context = HERE[kind]
    pruning = PruneSettings(selector=selector)
    plan = client_plans(PlanSettings(layers="opu2"), context.layers, [0.5] * 6, SEED, t)[client]
    [(weights, masks)] = dispatch(context.initial, [plan], context.layers, pruning, t, SEED)
    task = Task(t=t, plan=plan, weights=weights, masks=masks)
    return replace(context.spec, pruning=pruning), task


def trained(spec: RunSpec, task: Task, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    names = [n for l in task.plan.uploaded for n in spec.layers.layers[l]]
    sent = {n: task.weights.get(n, torch.zeros(spec.layers.shapes[n])) for n in names}
    return {n: w + 0.1 * torch.randn(w.shape, generator=rng) for n, w in sent.items()}


def exchange(
    spec: RunSpec, task: Task, coding: UploadSettings, seed: int
) -> tuple[PackedUpload, bytes, dict[str, Tensor], int]:
    """An upload, its message, what the server makes of it, and its counted bytes."""
    layers, unfed = spec.layers, spec.pruning.unfed_columns
    packed = pack(trained(spec, task, seed), task, layers, unfed, coding, SEED, {})
    update = ClientUpdate(
        client=task.plan.client,
        t=task.t,
        tensors=packed.tensors,
        examples=4,
        extra=packed.scales,
    )
    data = encode_update(update, task, layers, unfed, coding)
    got = decode_update(data, task, layers, unfed, coding)
    values = unpack(got.tensors, got.extra, task, layers, unfed, coding)
    return packed, data, dict(values), traffic(task.plan, layers, spec.pruning, coding).up


@given(
    kind=st.sampled_from(sorted(HERE)),
    selector=st.sampled_from(("magnitude", "ordered")),
    code=st.sampled_from(sorted(COMPRESSORS)),
    of_run=st.sampled_from(("none", "int8", "ternary")),
    client=st.integers(0, 5),
    entropy=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_planned_code_is_the_code_of_a_run(
    kind: str, selector: str, code: str, of_run: str, client: int, entropy: bool
) -> None:
    spec, plain = task_of(kind, selector, client)
    coded = replace(plain, plan=replace(plain.plan, code=code))
    of_all = UploadSettings(compress=code, share=0.2, entropy=entropy)
    of_some = replace(of_all, compress=of_run)
    a, b = exchange(spec, plain, of_all, client), exchange(spec, coded, of_some, client)
    for x, y in ((a[0].tensors, b[0].tensors), (a[0].scales, b[0].scales), (a[2], b[2])):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[n], y[n]) for n in x)
    assert a[1] == b[1]
    assert a[3] == b[3]
    assert payload_size(b[1]) <= b[3] if entropy else payload_size(b[1]) == b[3]
    expected = expected_update(coded.plan, replace(spec, compression=of_some), {})
    assert expected == expected_update(plain.plan, replace(spec, compression=of_all), {})
    assert {n: (tuple(w.shape), w.dtype) for n, w in b[0].tensors.items()} == expected.tensors
    assert decode_task(
        encode_task(coded, spec.layers, spec.pruning), spec.layers, spec.pruning, SEED
    ).plan == replace(coded.plan)


@given(codes=st.lists(st.sampled_from(INTEGERS), min_size=2, max_size=8))
@settings(max_examples=30, deadline=None)
def test_what_a_code_left_out_is_sent_with_the_next_change_whichever_code_that_has(
    codes: list[str],
) -> None:
    """Over rounds, what arrived and what is left add up to all changes, but for random rounding."""
    spec, task = task_of("mlp", "magnitude")
    layers, unfed = spec.layers, spec.pruning.unfed_columns
    changes: dict[str, Tensor] = {}
    arrived: dict[str, Tensor] = {}
    rounding: dict[str, float] = {}
    state: dict[str, Tensor] = {}
    for t, code in enumerate(codes):
        now = replace(task, t=t, plan=replace(task.plan, code=code))
        tensors = trained(spec, now, t)
        packed = pack(tensors, now, layers, unfed, UploadSettings(compress="int8"), SEED, state)
        values = unpack(packed.tensors, packed.scales, now, layers, unfed, UploadSettings())
        for n, w in tensors.items():
            sent = now.weights[n]
            changes[n] = changes.get(n, 0) + (w - sent)
            arrived[n] = arrived.get(n, 0) + (values[n] - sent)
            if code == "int8":
                rounding[n] = rounding.get(n, 0.0) + float(packed.scales[f"scale/{n}"])
                residual = packed.residual.get(f"{RESIDUAL}{n}", torch.zeros(()))
                assert not residual.any(), "all of it was sent"
        state = dict(packed.residual)
    for n, total in changes.items():
        left = state.get(f"{RESIDUAL}{n}", torch.zeros_like(total))
        error = float((total - arrived[n] - left).abs().max())
        assert error <= rounding.get(n, 0.0) + 1e-4


@pytest.mark.parametrize("code", ["none", "fp16"])
def test_a_code_without_feedback_loses_no_residual(code: str) -> None:
    """Uncoded weights cannot carry it; then it waits for the next change."""
    spec, task = task_of("mlp", "magnitude")
    layers, unfed = spec.layers, spec.pruning.unfed_columns
    state = pack(
        trained(spec, task, 0), task, layers, unfed, UploadSettings(compress="ternary"), SEED, {}
    ).residual
    assert any(bool(w.any()) for w in state.values())
    now = replace(task, t=2, plan=replace(task.plan, code=code))
    after = pack(
        trained(spec, now, 1), now, layers, unfed, UploadSettings(compress="ternary"), SEED, state
    ).residual
    assert after.keys() == state.keys()
    waits = code == "none"
    assert all(torch.equal(after[n], state[n]) if waits else not after[n].any() for n in state)
