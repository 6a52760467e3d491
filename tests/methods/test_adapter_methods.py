"""Methods that train adapters: against plain loops, and in limit cases."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from fedp3.core.errors import ConfigError
from fedp3.experiment.experiment import Experiment
from fedp3.models.frozen import frozen_tensors
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.server.round_plans import plans_for
from worlds import CLASSES, same

from . import adapter_references as adapters
from . import reference as ref
from .fleet import NETS, bench, experiment, trained
from .test_references import KEEP, KEEPS, close

ROUNDS = 3
ONES = (1.0, 1.0, 1.0, 1.0)
Combine = Callable[[Experiment], adapters.Combine]
MODEL: Mapping[str, tuple[tuple[str, ...], tuple[float, ...], Combine]] = {
    "fedit": ((), ONES, lambda e: adapters.by_examples(bench(e))),
    "ffa-lora": ((), ONES, lambda e: adapters.by_examples(bench(e))),
    "hetlora": ((KEEP,), KEEPS, lambda e: adapters.by_norm),
    "flexlora": ((KEEP,), KEEPS, lambda e: adapters.by_product(bench(e), cut=True)),
    "flora": ((KEEP,), KEEPS, lambda e: adapters.by_product(bench(e), cut=False)),
}


def frozen_of(e: Experiment) -> dict[str, Tensor]:
    return {n: w.clone() for n, w in frozen_tensors(e.client.net).items()}


def merged(W: Mapping[str, Tensor], e: Experiment) -> ref.Values:
    return adapters.merged(dict(W), frozen_of(e))


@pytest.mark.parametrize("method", MODEL)
def test_the_model_is_that_of_the_reference(method: str) -> None:
    overrides, keeps, combine = MODEL[method]
    e = experiment(method, *overrides)
    state, _ = trained(e, ROUNDS)
    one = adapters.adapters(bench(e), frozen_of(e), keeps, combine(e))
    want, _ = ref.run(bench(e), ROUNDS, one)
    if method != "flexlora":  # whose matrices are known up to signs
        close(state.W, want)
    close(merged(state.W, e), merged(want, e))
    before = merged(e.start.W, e)
    for n, w in merged(state.W, e).items():
        expected = n.split(".")[0] in ("fc2", "fc3", "ffc") and not n.startswith(("fc2.b", "fc3.b"))
        assert bool((w - before[n]).abs().max() > 1e-4) == expected, n


@pytest.mark.parametrize("rule", ["freeze_a", "factors"])
@pytest.mark.parametrize("selector", ["ordered", "rolling", "neuron", "dealt", "neuron_norm"])
def test_a_client_of_rank_r_trains_matrices_of_rank_r_with_the_same_result(
    rule: str, selector: str
) -> None:
    ranks = (f"adapter.rule={rule}", f"prune.selector={selector}", "plan.upload=retained", KEEP)
    ranks = (*ranks, "adapter.weights=rule")
    small = trained(experiment("hetlora", *ranks))[0].W
    masked = trained(experiment("hetlora", *ranks, "prune.physical=false"))[0].W
    close(small, masked)
    assert not same(small, experiment("hetlora", *ranks).start.W)


@pytest.mark.parametrize("method", MODEL)
def test_one_client_of_full_rank_ends_where_its_own_training_ends(method: str) -> None:
    """After one round.  What is trained and how follows from the rule; the mean adds nothing."""
    one = ("run.clients_per_round=1", "prune.keep=1.0")
    e = experiment(method, *one)
    (got, _), (client,) = trained(e, 1), trained(e, 1)[0].seen
    combined: list[ref.Values] = []

    def keep(W: ref.Values, uploads: list[ref.Values], masks: list[ref.Values]) -> ref.Values:
        combined.extend(uploads)
        return W

    ref.run(bench(e), 1, adapters.adapters(bench(e), frozen_of(e), ONES, keep))
    close(merged(got.W, e), merged(combined[client], e))


def _uploads(e: Experiment) -> tuple[list[ref.Values], list[float]]:
    """What the clients of the first round upload, and their shares of all samples."""
    seen: list[ref.Values] = []

    def keep(W: ref.Values, uploads: list[ref.Values], masks: list[ref.Values]) -> ref.Values:
        seen.extend(uploads)
        return W

    b = bench(e)
    ref.run(b, 1, adapters.adapters(b, frozen_of(e), ONES, keep))
    total = sum(len(rows) for rows in b.train.values())
    return seen, [len(b.train[i]) / total for i in b.train]


@pytest.mark.parametrize(
    ("method", "more", "exact"),
    [
        ("ffa-lora", (), True),
        ("fedit", (), False),  # the control: the product of means is another one
        ("flexlora", ("prune.keep=1.0", "adapter.rank=12"), True),  # rank 12 is all of 12 x 12
        ("flexlora", ("prune.keep=1.0", "adapter.rank=1"), False),  # cut off
        ("flora", ("prune.keep=1.0", "adapter.rank=1"), True),  # nothing is cut off
    ],
)
def test_the_mean_of_merged_models_is_the_merged_mean(
    method: str, more: tuple[str, ...], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = experiment(method, *more)
    monkeypatch.setattr(adapters, "RANK", e.config.adapter.rank)
    uploads, shares = _uploads(e)
    dense = [merged(u, e) for u in uploads]
    got = merged(trained(e, 1)[0].W, e)
    worst = 0.0
    for n, w in got.items():
        mean = sum(share * d[n].double() for share, d in zip(shares, dense, strict=True))
        worst = max(worst, float((w - mean).abs().max()))
    assert (worst < 1e-6) == exact, worst


def test_hetlora_of_equal_ranks_and_weights_is_fedit() -> None:
    off = ("prune.keep=1.0", "aggregate.rule=examples", "adapter.weights=rule")
    assert same(trained(experiment("hetlora", *off))[0].W, trained(experiment("fedit"))[0].W)


def test_pairs_that_nobody_sent_keep_their_bits() -> None:
    """Rolling ranks without padding: each pair is averaged over those who sent it."""
    quarter = ("prune.keep=0.25", "prune.selector=rolling", "plan.upload=retained")
    e = experiment("hetlora", *quarter)
    W = trained(e, 1)[0].W
    for l in adapters.ADAPTED:
        changed = (W[f"{l}.b.weight"] != e.start.W[f"{l}.b.weight"]).any(0)
        assert changed.tolist() == [True, False, False, False]
        assert torch.equal(W[f"{l}.a.weight"][1:], e.start.W[f"{l}.a.weight"][1:])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["method=flexlora", "aggregate.server=momentum"], "no optimizer, damping"),
        (["method=flexlora", "aggregate.rule=distance"], "how much a client's product counts"),
        (["method=flexlora", "download.compress=ternary"], "do not add up"),
        (["method=ffa-lora", "adapter.weights=norm"], "two matrices that are both averaged"),
        (["method=hetlora", "aggregate.rule=attention"], "which layers without adapters follow"),
        (["method=fedavg", "adapter.rank=4"], r"\[adapter\] rank: there are no adapters"),
        (["method=fedit", "hooks.scale=true"], "not divided by its share"),
        (["method=flora", "devices.fleet=phones"], "'auto' does not count that"),
        (["method=flora", "aggregate.damp=0.5"], "under 'stack' the matrices of two rounds"),
    ],
)
def test_combinations_without_meaning_are_refused(overrides: list[str], text: str) -> None:
    from fedp3 import config

    with pytest.raises(ConfigError, match=text):
        config.parse({}, overrides)


def test_what_is_folded_is_sent_and_never_trained_or_uploaded() -> None:
    e = experiment("flora")
    layers = e.server.layers
    assert layers.constant == {"folded"} and list(layers.layers) == ["folded", "fc2", "fc3", "ffc"]
    assert layers.hidden == ("fc2", "fc3") and layers.head == "ffc"
    for plan in plans_for(e.server, 0):
        folded = plan.layers["folded"]
        assert (folded.send, folded.train, folded.upload) == ("dense", False, "none")
    state, _ = trained(e, 2)
    for l in adapters.ADAPTED:  # adapters begin anew in every round
        assert torch.equal(state.W[f"{l}.a.weight"], e.start.W[f"{l}.a.weight"])
        assert not state.W[f"{l}.b.weight"].any() and state.W[f"{l}.fold.weight"].any()
    windows = experiment("flora", "plan.layers=opu1", "prune.keep=1.0")
    assert {len(p.full_layers) for p in plans_for(windows.server, 0)} == {2}


# --------------------------------------------------------------------------- FedRA


def held_in(e: Experiment) -> Callable[[int, int], list[int]]:
    """The blocks are the package's own draw; what is done with them is the reference's."""

    def held(t: int, i: int) -> list[int]:
        plan = plans_for(e.server, t)[i]
        return [j for j in range(4) if plan.layers[f"blocks.{j}"].send == "dense"]

    return held


def test_fedra_is_that_of_the_reference_on_networks_without_the_other_blocks() -> None:
    e = experiment("fedra")
    shape, width = NETS["vit"]
    settings = ModelSettings(name="vit", width=width, heads=2)
    plain = build(ModelSpec(shape, CLASSES, settings), 7)
    state, _ = trained(e, 2)
    held = held_in(e)
    want, _ = ref.run(bench(e), 2, adapters.random_blocks(bench(e), plain, frozen_of(e), held))
    close(state.W, want)
    assert all(len(held(t, i)) == 2 for t in range(2) for i in range(4))
    assert held(0, 0) != held(1, 0) or held(0, 1) != held(1, 1), "drawn anew in every round"
    full = trained(experiment("fedra", "plan.layers=full"), 2)[0].W
    assert same(full, trained(experiment("fedra", "plan.layers=blocks-4"), 2)[0].W)
    assert not same(full, state.W)
