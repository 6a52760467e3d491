"""From a config, or a user's own net and data, to everything a run needs; all checks happen here, before training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedp3 import data as datasets
from fedp3 import fit, fleet, methods, stacked
from fedp3.aggregate import Aggregation
from fedp3.checks import check_pruning
from fedp3.config import OWN, Config
from fedp3.cost import held_parameters, traffic_by_layer
from fedp3.data import Dataset
from fedp3.errors import InputError
from fedp3.layermap import layer_map
from fedp3.models import PADS_TO, Spec, build, channels_last
from fedp3.optimise import Server
from fedp3.partition import histogram, partition, split
from fedp3.partition_file import read_partition
from fedp3.plan import PlanRules, check_coverage, coverage, devices
from fedp3.privacy import rules as ldp
from fedp3.prune import SELECTORS
from fedp3.recipe import Recipe, Shard
from fedp3.server import Problem, ServerState, plans_for
from fedp3.types import ClientPlan, Compression, Layer, Local, Private, Pruning
from fedp3.work import Work, flops, measure, peak_bytes


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run that is ready to start."""

    problem: Problem
    recipe: Recipe
    shards: Mapping[int, Shard]
    start: ServerState
    config: Config

    @property
    def labels(self) -> np.ndarray:
        """Samples of each class at each client: (clients, classes)."""
        parts = [torch.cat([s.train, s.test]).numpy() for _, s in sorted(self.shards.items())]
        return histogram(self.recipe.data.y.numpy(), parts, self.recipe.data.classes)


def assemble(config: Config, data_dir: Path | None = None) -> Experiment:
    """The experiment a config describes."""
    if OWN in (config.data.name, config.model.name):
        raise InputError(
            "this config is of a run by fedp3.run, whose net and data are not in it: call fedp3.run again in your own "
            "program, with the same out=FOLDER to go on"
        )
    data = datasets.load(config.data.name, data_dir, PADS_TO[config.model.name])
    m = config.model
    spec = Spec(tuple(data.x.shape[1:]), data.classes, m.width, m.norm, m.stem, config.hooks.code)
    net = build(m.name, spec, config.run.seed)
    return assemble_own(config, net, data)


def assemble_own(
    config: Config,
    net: nn.Module,
    data: Dataset,
    layers: Mapping[Layer, Sequence[str]] | None = None,
    shards: Mapping[int, Shard] | None = None,
) -> Experiment:
    """The same with a net and data of the user's own; W_0 is what the net holds, `shards` who has which samples."""
    seed, p = config.run.seed, config.prune
    check_device(config.run.device)
    assert not isinstance(p.keep, str)  # files were read when the config was
    shards = _shards(config, data) if shards is None else shards
    fit.check(net, data, fit.smallest_batch(shards, config.local.batch), seed)
    mapped = layer_map(net, layers)
    _refuse_frozen(net)
    pruning = Pruning(p.selector, p.hold, p.stale, p.local, p.q, p.q_min, p.physical, p.q_of)
    compression, hooks = Compression(config.upload.compress, config.upload.share), methods.hooks(config.parts)
    rules = PlanRules(config.plan.layers, config.plan.redraw, config.plan.others, config.plan.head, p.upload)
    keep = devices(p.keep, len(shards), seed)
    examples = {i: len(s.train) for i, s in shards.items()}
    a, r = config.aggregate, config.run
    server = Server(a.server, a.server_lr, a.beta1, a.beta2, a.adapt)
    problem = Problem(
        mapped, rules, pruning, Aggregation(a.rule, a.tau, a.step, a.limit, a.start, a.sketch, server), keep, examples,
        r.rounds, r.clients_per_round, r.quorum, r.max_void, r.eval_every, seed, None, hooks, compression,
    )  # fmt: skip
    check_coverage(rules, mapped, keep, seed, r.rounds)
    check_problem(problem)
    held = net.state_dict()
    initial = {n: held[n].detach().cpu().clone(memory_format=torch.contiguous_format) for n in mapped.shapes}
    local = Local(**config.local.model_dump(), rounds=r.rounds, augment=config.data.augment)
    chain = stacked.choose(net, mapped, data, local, pruning, r.device)
    net = channels_last(net.to(r.device))
    recipe = Recipe(net, mapped, data, local, pruning, initial, seed, r.device, chain, None, hooks, compression)
    extra = hooks.exchange.begin(mapped, data.classes) if hooks.exchange else {}
    experiment = Experiment(problem, recipe, shards, ServerState(0, initial, extra=extra), config)
    return _under_ldp(experiment) if config.privacy.enabled else experiment


def check_problem(problem: Problem) -> None:
    """Refuse pruning that the plans cannot carry out; where one that never moves meets redrawn plans, all of them."""
    moves = problem.rules.redraw and problem.pruning.selector == "ordered"
    plans = [p for t in range(problem.rounds if moves else 1) for p in plans_for(problem, t)]
    check_pruning(problem.pruning, problem.layers, plans)


def _refuse_frozen(net: nn.Module) -> None:
    """A parameter that its owner froze would train all the same: plans speak of whole layers."""
    frozen = [n for n, p in net.named_parameters() if not p.requires_grad]
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        raise InputError(
            f"parameter {frozen[0]!r}{more} of the model does not require a gradient, but every parameter would train: "
            "run the frozen part over the data once and train the rest on what it says, or call model.requires_grad_()"
        )


def _under_ldp(e: Experiment) -> Experiment:
    """The experiment with its mechanism and budget; refused where the guarantee would not hold."""
    s = e.config.privacy
    broken = methods.under_ldp(e.config.parts)
    if broken:
        raise InputError("\n".join(f"LDP refused: {why}" for why in broken))
    ldp.check(e.recipe, e.shards, s.delta)
    asked = Private(s.clip, s.noise_multiplier, s.sample_rate, s.randomness, ldp.uses_ghost(e.recipe))
    budget = ldp.plan_budget(e.problem, e.recipe.local, asked, s.epsilon, s.delta)
    return replace(
        e, problem=replace(e.problem, budget=budget), recipe=replace(e.recipe, chain=(), private=budget.private)
    )


def _shards(config: Config, data: Dataset) -> dict[int, Shard]:
    p, seed = config.partition, config.run.seed
    if p.file:
        parts = read_partition(Path(p.file), len(data.y))
        if len(parts) != p.clients:
            raise InputError(f"{p.file} has {len(parts)} clients, [partition] clients says {p.clients}")
    else:
        parts = partition(p.kind, data.y.numpy(), p.clients, seed=seed, classes=p.classes, alpha=p.alpha, sizes=p.sizes)
    cuts = (split(part, seed=seed, client=i, share=p.train_share) for i, part in enumerate(parts))
    return {i: Shard(torch.from_numpy(train), torch.from_numpy(test)) for i, (train, test) in enumerate(cuts)}


def check_device(device: str) -> None:
    """Refuse a device this machine does not have."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"[run] device: {device!r} cannot be used here ({reason}); 'cpu' always works") from None


# --------------------------------------------------------------------------- what it will cost


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What one client is asked for, per round."""

    id: int
    layers: tuple[Layer, ...]  # L_i
    keep: Mapping[Layer, float]  # share of each layer it is sent
    examples: int
    parameters: int
    mflops_per_example: float
    peak_mb: float
    mb_down: float
    mb_up: float
    layer_bytes: Mapping[Layer, tuple[int, int]]  # down and up
    capacity: float = 1.0  # what its device can carry
    gflop: float = 0.0  # of its local training
    seconds: float = 0.0  # on such a device, as `fleet` models it


def costs(experiment: Experiment) -> tuple[list[ClientCost], dict[Layer, list[int]]]:
    """The cost of every client's plan in round 0, and which clients train each layer."""
    problem, recipe = experiment.problem, experiment.recipe
    work = measure(recipe.net, tuple(recipe.data.x.shape[1:]))
    plans = plans_for(problem, 0)
    known: dict[tuple[object, ...], ClientCost] = {}  # equal plans cost the same
    out = []
    for plan in plans:
        i, samples = plan.client, problem.examples[plan.client]
        rows = max(1, min(recipe.local.batch, samples))
        key = (*plan.layers.items(), plan.deal, rows)
        if key not in known:
            known[key] = _cost(plan, work, experiment, rows)
        c, keep = replace(known[key], id=i, examples=samples), problem.keep[i]
        gflop = fleet.round_gflop(work, plan, recipe, samples)
        took = fleet.seconds(keep, gflop, c.mb_down, c.mb_up)
        out.append(replace(c, capacity=keep, gflop=gflop, seconds=took))
    return out, coverage(plans)


def _cost(plan: ClientPlan, work: Work, experiment: Experiment, rows: int) -> ClientCost:
    layers, pruning, local = experiment.problem.layers, experiment.problem.pruning, experiment.recipe.local
    each = traffic_by_layer(plan, layers, pruning, experiment.problem.compression)
    extra = 4 * sum(w.numel() for w in experiment.start.extra.values())
    return ClientCost(
        id=plan.client,
        layers=plan.whole,
        keep={l: {"dense": 1.0, "pruned": p.keep, "none": 0.0, "skip": 0.0}[p.send] for l, p in plan.layers.items()},
        examples=0,
        parameters=held_parameters(plan, layers, pruning),
        mflops_per_example=flops(work, plan, layers, pruning) / 1e6,
        peak_mb=peak_bytes(work, plan, layers, pruning, rows, local.momentum > 0) / 1e6,
        mb_down=(sum(t.down for t in each.values()) + extra) / 1e6,
        mb_up=(sum(t.up for t in each.values()) + extra) / 1e6,
        layer_bytes={l: (t.down, t.up) for l, t in each.items()},
    )


def masked_units(experiment: Experiment) -> dict[str, str]:
    """Unit groups a structured selector would cut at some client but cannot, each with the reason."""
    problem = experiment.problem
    if SELECTORS[problem.pruning.selector].units is None:
        return {}
    pruned = {l for plan in plans_for(problem, 0) for l, p in plan.layers.items() if p.send == "pruned" and p.keep < 1}
    return {g: u.fixed for g, u in problem.layers.groups.items() if u.layer in pruned and u.fixed}
