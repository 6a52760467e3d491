"""Every method against its twin: the same rounds, written from the paper with plain loops."""

from collections.abc import Callable, Mapping

import pytest
import torch

from fedp3.experiment import Experiment
from fedp3.passes import METHOD, OWN
from fedp3.rng import Use, stream
from worlds import CLASSES

from . import reference as twins
from .fleet import bench, experiment, trained

ROUNDS = 2
KEEPS = (1.0, 0.5, 0.25, 0.5)
KEEP = f"prune.keep={list(KEEPS)}"


def close(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    assert want and want.keys() <= got.keys()
    for n, w in want.items():
        assert torch.allclose(got[n], w, rtol=1e-4, atol=2e-6), (n, float((got[n] - w).abs().max()))


def leading(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
    return list(range(twins.ceil_share(keep, width)))


def window(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
    return [(t + j) % width for j in range(twins.ceil_share(keep, width))]


def drawn(e: Experiment) -> Callable[..., list[int]]:
    """Layer after layer from one stream per client and round."""
    streams: dict[tuple[int, int], torch.Generator] = {}

    def units(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
        rng = streams.setdefault((t, i), stream(e.problem.seed, Use.GLOBAL_PRUNE, t, i))
        return torch.randperm(width, generator=rng).tolist()[: twins.ceil_share(keep, width)]

    return units


def dealt(e: Experiment) -> Callable[..., list[int]]:
    """One shuffled deck of units per layer and round; client i of four takes its quarter."""
    decks: dict[int, dict[str, list[int]]] = {}

    def units(t: int, i: int, width: int, layer: str, keep: float) -> list[int]:
        if t not in decks:
            rng = stream(e.problem.seed, Use.DEAL, t)
            decks[t] = {l: torch.randperm(width, generator=rng).tolist() for l in twins.HIDDEN}
        return decks[t][layer][i * width // 4 : (i + 1) * width // 4]

    return units


MODEL: Mapping[str, tuple[tuple[str, ...], Callable[[Experiment], twins.Round]]] = {
    "fedavg": ((), lambda e: twins.fedavg(bench(e))),
    "fedavg-ft": ((), lambda e: twins.fedavg(bench(e))),
    "fedprox": (("hooks.mu=0.7",), lambda e: twins.fedavg(bench(e), mu=0.7)),
    "fedper": ((), lambda e: twins.own_head(bench(e), [twins.BODY + twins.OUT])),
    "fedrep": ((), lambda e: twins.own_head(bench(e), [twins.OUT, twins.BODY])),
    "fedbabu": ((), lambda e: twins.own_head(bench(e), [twins.BODY])),
    "ditto": (("hooks.mu=0.7",), lambda e: twins.ditto(bench(e), 0.7)),
    "local": ((), lambda e: twins.alone(bench(e))),
    "fedrop": (("prune.keep=0.75",), lambda e: twins.sliced(bench(e), [0.75] * 4, drawn(e))),
    "heterofl": ((KEEP,), lambda e: twins.sliced(bench(e), KEEPS, leading, aids=True)),
    "fedrolex": ((KEEP,), lambda e: twins.sliced(bench(e), KEEPS, window, aids=True)),
    "ist": ((), lambda e: twins.sliced(bench(e), [0.25] * 4, dealt(e))),
    "fjord": ((KEEP,), lambda e: twins.fjord(bench(e), KEEPS, (0.2, 0.4, 0.6, 0.8, 1.0))),
    "fiarse": ((KEEP,), lambda e: twins.fiarse(bench(e), KEEPS)),
    "scaffold": ((), lambda e: twins.scaffold(bench(e))[0]),
    "fedavg-fp16": ((), lambda e: twins.compressed(bench(e), lambda d, rng: d.half().float())),
    "fedavg-int8": ((), lambda e: twins.compressed(bench(e), twins.eight_bits)),
    "fedavg-topk": (("upload.share=0.1",), lambda e: twins.compressed(bench(e), twins.top_share(0.1), feedback=True)),
    "fedavgm": ((), lambda e: twins.served(bench(e), "momentum", 1.0, 0.9, 0.99, 1e-3)),
    "fedadam": ((), lambda e: twins.served(bench(e), "adam", 0.01, 0.9, 0.99, 1e-3)),
    "fedcr": (("hooks.samples=3", "hooks.beta=0.1"), lambda e: twins.fedcr(bench(e), 0.1, 3, CLASSES)[0]),
}  # fmt: skip


@pytest.mark.parametrize("method", MODEL)
def test_the_model_is_the_twins(method: str) -> None:
    overrides, twin = MODEL[method]
    e = experiment(method, *overrides)
    state, _ = trained(e, ROUNDS)
    want, _ = twins.run(bench(e), ROUNDS, twin(e))
    close(state.W, want)
    moved = max(float((state.W[n] - e.start.W[n]).abs().max()) for n in state.W)
    assert (moved > 1e-3) == (method != "local"), "a model that never moved agrees with any twin"


@pytest.mark.parametrize("physical", ["true", "false"])
@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "fedrop", "ist", "fjord"])
def test_a_smaller_net_and_a_masked_one_are_the_same_method(method: str, physical: str) -> None:
    overrides, twin = MODEL[method]
    e = experiment(method, *overrides, f"prune.physical={physical}")
    close(trained(e, 1)[0].W, twins.run(bench(e), 1, twin(e))[0])


def test_fjord_with_distillation_is_the_twins() -> None:
    e = experiment("fjord", KEEP, "hooks.distil=true")
    want, _ = twins.run(bench(e), ROUNDS, twins.fjord(bench(e), KEEPS, (0.2, 0.4, 0.6, 0.8, 1.0), distil=True))
    close(trained(e, ROUNDS)[0].W, want)


# --------------------------------------------------------------------------- what stays, what is exchanged


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu"])
def test_the_heads_that_stay_are_the_twins(method: str) -> None:
    e = experiment(method)
    _, states = trained(e, ROUNDS)
    _, clients = twins.run(bench(e), ROUNDS, MODEL[method][1](e))
    for i, client in enumerate(clients):
        close(states.of[i][ROUNDS - 1].tensors, client.kept)


@pytest.mark.parametrize(("method", "prefix"), [("ditto", OWN), ("scaffold", METHOD)])
def test_what_a_client_keeps_is_the_twins(method: str, prefix: str) -> None:
    overrides, twin = MODEL[method]
    e = experiment(method, *overrides)
    _, states = trained(e, ROUNDS)
    _, clients = twins.run(bench(e), ROUNDS, twin(e))
    for i, client in enumerate(clients):
        close({n.removeprefix(prefix): w for n, w in states.of[i][ROUNDS - 1].tensors.items()}, client.kept)


def test_the_own_models_of_local_training_are_the_twins() -> None:
    e = experiment("local")
    _, states = trained(e, ROUNDS)
    _, clients = twins.run(bench(e), ROUNDS, twins.alone(bench(e)))
    for i, client in enumerate(clients):
        close(states.of[i][ROUNDS - 1].tensors, client.kept)


def test_the_control_variates_of_the_server_are_the_twins() -> None:
    e = experiment("scaffold")
    twin, c = twins.scaffold(bench(e))
    twins.run(bench(e), ROUNDS, twin)
    close(trained(e, ROUNDS)[0].extra, c)


def test_the_class_gaussians_are_the_twins() -> None:
    e = experiment("fedcr", "hooks.samples=3", "hooks.beta=0.1")
    twin, held = twins.fedcr(bench(e), 0.1, 3, CLASSES)
    twins.run(bench(e), ROUNDS, twin)
    state, _ = trained(e, ROUNDS)
    close(state.extra, held)
    assert float((state.extra["std"] - 1).abs().max()) > 0.1
