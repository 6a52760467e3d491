"""One small fleet for every method, through the same door as users come in: a config."""

from collections.abc import Sequence
from dataclasses import replace

from fedp3 import config
from fedp3.data import Dataset
from fedp3.engines.inprocess import Engine, States, sequential
from fedp3.experiment import Experiment, assemble_own
from fedp3.methods import METHODS
from fedp3.models import Spec, build
from fedp3.server import ServerState, run
from worlds import CLASSES, world

from . import reference as twins

SMALL = (
    "partition.clients=4", "run.clients_per_round=0", "run.rounds=3", "run.eval_every=0", "run.seed=5",
    "local.steps=3", "local.batch=4", "local.lr=0.1", "local.clip_norm=0", "data.augment=false",
)  # fmt: skip
FOUR = "prune.keep=[1.0, 0.5, 0.25, 0.125]"  # where a method has more device classes than we have clients
NETS = {"mlp": ((1, 3, 3), 0.012), "resnet": ((1, 8, 8), 1 / 16)}  # twelve hidden units; a code of three


def kind_of(method: str) -> str:
    return "resnet" if method == "resist" else "mlp"


def experiment(method: str, *overrides: str, stacked: bool = False) -> Experiment:
    """A method on four clients; unless asked for, clients are not stacked, so that all methods compute alike."""
    more = [FOUR] if isinstance(METHODS[method].settings.get("prune", {}).get("keep"), list) else []
    c = config.parse({"method": method}, [*SMALL, *more, *overrides])
    here = world(kind_of(method), seed=5)
    shape, width = NETS[kind_of(method)]
    name = {"mlp": "mlp", "resnet": "resnet18"}[kind_of(method)]
    net = build(name, Spec(shape, CLASSES, width, code=c.hooks.code), 7)
    e = assemble_own(c, net, data(method), shards=here.shards)
    return e if stacked else replace(e, recipe=replace(e.recipe, chain=()))


def data(method: str) -> Dataset:
    return world(kind_of(method)).data


def trained(e: Experiment, rounds: int = 2, engine: Engine | None = None) -> tuple[ServerState, States]:
    engine = engine or sequential(e.recipe, e.shards)
    *_, (state, _) = run(replace(e.problem, rounds=rounds), e.start, engine.execute)
    return state, engine.states


def bench(e: Experiment) -> twins.Bench:
    """The same for the twins."""

    def lists(parts: Sequence[str]) -> list[dict[int, list[int]]]:
        return [{i: getattr(s, part).tolist() for i, s in e.shards.items()} for part in parts]

    train, test = lists(["train", "test"])
    local, pictures = e.recipe.local, e.recipe.data
    how = (e.problem.seed, local.steps, local.batch, local.lr)
    return twins.Bench(pictures.x, pictures.y, train, test, dict(e.start.W), *how)
