"""Layer maps without a network, and the layer sets that clients get of them."""

from collections.abc import Sequence

from hypothesis import strategies as st

from fedp3.core.types import LayerMap
from fedp3.planning.client_plans import PlanSettings, layer_sets

WINDOWS = {"lowerb": (1,), "opu2": (2,), "opu3": (3,), "opu1-2-3": (1, 2, 3), "opu2-3": (2, 3)}
seeds = st.integers(0, 10_000)
fleets = st.integers(1, 60)
depths = st.integers(0, 20)


def named(*layers: str) -> LayerMap:
    shapes = {f"{l}.weight": (2, 2) for l in layers}
    return LayerMap(
        layers={l: (f"{l}.weight",) for l in layers},
        shapes=shapes,
        axes={},
        groups={},
        prunable=frozenset(shapes),
        buffers=frozenset(),
    )


def deep(H: int) -> LayerMap:
    """H hidden layers and a head."""
    return named(*(f"h{j}" for j in range(H)), "out")


def resnet() -> LayerMap:
    return named(
        "conv0", *(f"b{b}.{r}.conv{c}" for b in (1, 2, 3, 4) for r in (0, 1) for c in (1, 2)), "ffc"
    )


def fitting(name: str, H: int) -> LayerMap:
    return resnet() if name.startswith("resnet") else deep(H)


def chosen(
    name: str, layers: LayerMap, n: int, seed: int = 0, t: int = 0, *, redraw: bool = False
) -> list[list[int]]:
    """The hidden layers of every client, by number."""
    sets = layer_sets(PlanSettings(layers=name, redraw=redraw), layers, n, seed, t)
    return [[layers.hidden.index(l) for l in L_i if l != layers.head] for L_i in sets]


def senders(sets: Sequence[Sequence[int]], H: int) -> list[int]:
    """How many clients train each hidden layer."""
    return [sum(j in L_i for L_i in sets) for j in range(H)]
