"""One small fleet for every method, entered as users enter it: through a config."""

from collections.abc import Sequence
from dataclasses import replace

from fedp3 import config
from fedp3.data import Dataset
from fedp3.engines.base import Engine, States
from fedp3.engines.in_process import sequential
from fedp3.experiment.assemble import assemble_from
from fedp3.experiment.experiment import Experiment
from fedp3.methods import METHODS
from fedp3.methods.fedcr import coded_tail
from fedp3.models.zoo import ModelSettings, ModelSpec, build
from fedp3.server.context import ServerContext, ServerState
from fedp3.server.rounds import run
from worlds import CLASSES, world

from . import reference as ref

SMALL = (
    "partition.clients=4", "run.clients_per_round=0", "run.rounds=3", "run.eval_every=0",
    "run.seed=5", "local.steps=3", "local.batch=4", "local.lr=0.1", "local.clip_norm=0",
    "local.augment=false",
)  # fmt: skip
# for methods that have more device classes than there are clients here
FOUR = "prune.keep=[1.0, 0.5, 0.25, 0.125]"
# for methods of adapters, whose usual targets are projections of attention
ADAPTERS = {
    "mlp": ("adapter.targets=['fc2', 'fc3']", "adapter.rank=4"),
    "vit": ("adapter.rank=3",),
}
# input shape and width: twelve hidden units, and a code of three numbers
NETS = {"mlp": ((1, 3, 3), 0.012), "resnet": ((1, 8, 8), 1 / 16), "vit": ((1, 8, 8), 0.25)}
NAMES = {"mlp": "mlp", "resnet": "resnet18", "vit": "vit"}
KINDS = {"resist": "resnet", "fedra": "vit"}


def kind_of(method: str) -> str:
    return KINDS.get(method, "mlp")


def samples_of(kind: str) -> str:
    """The samples that a network reads."""
    return "resnet" if kind == "vit" else kind


def experiment(method: str, *overrides: str, stacked: bool = False) -> Experiment:
    """A method on four clients; clients are not stacked unless `stacked` is set."""
    many = isinstance(METHODS[method].settings.get("prune", {}).get("keep"), list)
    lora = ADAPTERS[kind_of(method)] if "adapter" in METHODS[method].settings else ()
    c = config.parse({"method": method}, [*SMALL, *([FOUR] if many else []), *lora, *overrides])
    fleet = world(samples_of(kind_of(method)), seed=5)
    shape, width = NETS[kind_of(method)]
    model = ModelSettings(name=NAMES[kind_of(method)], width=width, heads=2)
    net = build(ModelSpec(shape, CLASSES, model, coded_tail(c.hooks.code, model)), 7)
    e = assemble_from(c, net, data(method), shards=fleet.shards)
    return e if stacked else replace(e, client=replace(e.client, stacked=False))


def data(method: str) -> Dataset:
    return world(samples_of(kind_of(method))).data


def with_rounds(server: ServerContext, rounds: int, **run_settings: int) -> ServerContext:
    """The same server over another number of rounds, and with other settings of [run]."""
    return replace(
        server,
        run=replace(server.run, rounds=rounds, **run_settings),
        spec=replace(server.spec, rounds=rounds),
    )


def trained(
    e: Experiment, rounds: int = 2, engine: Engine | None = None
) -> tuple[ServerState, States]:
    engine = engine or sequential(e.client, e.shards)
    *_, (state, _) = run(with_rounds(e.server, rounds), e.start, engine.execute)
    return state, engine.states


def bench(e: Experiment) -> ref.Bench:
    """The same fleet for the reference implementations."""

    def lists(parts: Sequence[str]) -> list[dict[int, list[int]]]:
        return [{i: getattr(s, part).tolist() for i, s in e.shards.items()} for part in parts]

    train, test = lists(["train", "test"])
    local = e.client.local
    return ref.Bench(
        x=e.client.data.x,
        y=e.client.data.y,
        train=train,
        test=test,
        W=dict(e.start.W),
        seed=e.server.spec.seed,
        steps=local.steps,
        batch=local.batch,
        lr=local.lr,
    )
