"""Every method against its reference implementation: the same rounds as plain loops."""

from collections.abc import Callable, Mapping

import pytest
import torch

from fedp3.client.passes import METHOD, PERSONAL
from fedp3.core.randomness import Stream, stream
from fedp3.experiment.experiment import Experiment
from worlds import CLASSES

from . import reference as ref
from .fleet import bench, experiment, trained

ROUNDS = 2
KEEPS = (1.0, 0.5, 0.25, 0.5)
KEEP = f"prune.keep={list(KEEPS)}"


def close(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    assert want and want.keys() <= got.keys()
    for n, w in want.items():
        assert torch.allclose(got[n], w, rtol=1e-4, atol=2e-6), (n, float((got[n] - w).abs().max()))


def leading(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
    return list(range(ref.ceil_share(keep, width)))


def window(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
    return [(t + j) % width for j in range(ref.ceil_share(keep, width))]


def drawn(e: Experiment) -> Callable[..., list[int]]:
    """Layer after layer from one stream per client and round."""
    streams: dict[tuple[int, int], torch.Generator] = {}

    def units(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
        rng = streams.setdefault((t, i), stream(e.server.spec.seed, Stream.GLOBAL_PRUNE, t, i))
        return torch.randperm(width, generator=rng).tolist()[: ref.ceil_share(keep, width)]

    return units


def dealt(e: Experiment) -> Callable[..., list[int]]:
    """One shuffled deck of units per layer and round; client i of four takes its quarter."""
    decks: dict[int, dict[str, list[int]]] = {}

    def units(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
        if t not in decks:
            rng = stream(e.server.spec.seed, Stream.DEAL, t)
            decks[t] = {l: torch.randperm(width, generator=rng).tolist() for l in ref.HIDDEN}
        return decks[t][layer][i * width // 4 : (i + 1) * width // 4]

    return units


MODEL: Mapping[str, tuple[tuple[str, ...], Callable[[Experiment], ref.Round]]] = {
    "fedavg": ((), lambda e: ref.fedavg(bench(e))),
    "fedavg-ft": ((), lambda e: ref.fedavg(bench(e))),
    "fedprox": (("hooks.mu=0.7",), lambda e: ref.fedavg(bench(e), mu=0.7)),
    "fedper": ((), lambda e: ref.own_head(bench(e), [ref.BODY + ref.OUT])),
    "fedrep": ((), lambda e: ref.own_head(bench(e), [ref.OUT, ref.BODY])),
    "fedbabu": ((), lambda e: ref.own_head(bench(e), [ref.BODY])),
    "ditto": (("hooks.mu=0.7",), lambda e: ref.ditto(bench(e), 0.7)),
    "local": ((), lambda e: ref.alone(bench(e))),
    "fedrop": (("prune.keep=0.75",), lambda e: ref.sliced(bench(e), [0.75] * 4, drawn(e))),
    "heterofl": ((KEEP,), lambda e: ref.sliced(bench(e), KEEPS, leading, aids=True)),
    "fedrolex": ((KEEP,), lambda e: ref.sliced(bench(e), KEEPS, window, aids=True)),
    "ist": ((), lambda e: ref.sliced(bench(e), [0.25] * 4, dealt(e))),
    "fjord": ((KEEP,), lambda e: ref.fjord(bench(e), KEEPS, (0.2, 0.4, 0.6, 0.8, 1.0))),
    "fiarse": ((KEEP,), lambda e: ref.fiarse(bench(e), KEEPS)),
    "scaffold": ((), lambda e: ref.scaffold(bench(e))[0]),
    "fedavg-fp16": ((), lambda e: ref.compressed(bench(e), lambda d, rng: d.half().float())),
    "fedavg-int8": ((), lambda e: ref.compressed(bench(e), ref.eight_bits)),
    "fedavg-topk": (
        ("upload.share=0.1",),
        lambda e: ref.compressed(bench(e), ref.top_share(0.1), feedback=True),
    ),
    "fedavgm": ((), lambda e: ref.served(bench(e), "momentum", 1.0, 0.9, 0.99, 1e-3)),
    "fedadam": ((), lambda e: ref.served(bench(e), "adam", 0.01, 0.9, 0.99, 1e-3)),
    "fedcr": (
        ("hooks.samples=3", "hooks.beta=0.1"),
        lambda e: ref.fedcr(bench(e), 0.1, 3, CLASSES)[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", MODEL)
def test_the_model_is_that_of_the_reference(method: str) -> None:
    overrides, reference = MODEL[method]
    e = experiment(method, *overrides)
    state, _ = trained(e, ROUNDS)
    want, _ = ref.run(bench(e), ROUNDS, reference(e))
    close(state.W, want)
    moved = max(float((state.W[n] - e.start.W[n]).abs().max()) for n in state.W)
    assert (moved > 1e-3) == (method != "local"), (
        "a model that never moved agrees with any reference"
    )


@pytest.mark.parametrize("physical", ["true", "false"])
@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "fedrop", "ist", "fjord"])
def test_a_smaller_net_and_a_masked_one_are_the_same_method(method: str, physical: str) -> None:
    overrides, reference = MODEL[method]
    e = experiment(method, *overrides, f"prune.physical={physical}")
    close(trained(e, 1)[0].W, ref.run(bench(e), 1, reference(e))[0])


def test_fjord_with_distillation_is_the_reference() -> None:
    e = experiment("fjord", KEEP, "hooks.distil=true")
    want, _ = ref.run(
        bench(e), ROUNDS, ref.fjord(bench(e), KEEPS, (0.2, 0.4, 0.6, 0.8, 1.0), distil=True)
    )
    close(trained(e, ROUNDS)[0].W, want)


# -------------------------------------------------------------------- what stays, what is exchanged


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu"])
def test_personal_heads_are_those_of_the_reference(method: str) -> None:
    e = experiment(method)
    _, states = trained(e, ROUNDS)
    _, clients = ref.run(bench(e), ROUNDS, MODEL[method][1](e))
    for i, client in enumerate(clients):
        close(states.by_client[i][ROUNDS - 1].tensors, client.kept)


@pytest.mark.parametrize(("method", "prefix"), [("ditto", PERSONAL), ("scaffold", METHOD)])
def test_what_a_client_stores_is_that_of_the_reference(method: str, prefix: str) -> None:
    overrides, reference = MODEL[method]
    e = experiment(method, *overrides)
    _, states = trained(e, ROUNDS)
    _, clients = ref.run(bench(e), ROUNDS, reference(e))
    for i, client in enumerate(clients):
        close(
            {n.removeprefix(prefix): w for n, w in states.by_client[i][ROUNDS - 1].tensors.items()},
            client.kept,
        )


def test_personal_models_of_local_training_are_those_of_the_reference() -> None:
    e = experiment("local")
    _, states = trained(e, ROUNDS)
    _, clients = ref.run(bench(e), ROUNDS, ref.alone(bench(e)))
    for i, client in enumerate(clients):
        close(states.by_client[i][ROUNDS - 1].tensors, client.kept)


def test_the_control_variates_of_the_server_are_those_of_the_reference() -> None:
    e = experiment("scaffold")
    reference, c = ref.scaffold(bench(e))
    ref.run(bench(e), ROUNDS, reference)
    close(trained(e, ROUNDS)[0].extra, c)


def test_the_class_gaussians_are_those_of_the_reference() -> None:
    e = experiment("fedcr", "hooks.samples=3", "hooks.beta=0.1")
    reference, held = ref.fedcr(bench(e), 0.1, 3, CLASSES)
    ref.run(bench(e), ROUNDS, reference)
    state, _ = trained(e, ROUNDS)
    close(state.extra, held)
    assert float((state.extra["std"] - 1).abs().max()) > 0.1
