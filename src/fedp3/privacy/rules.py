"""Before training: what LDP refuses, what a reader is warned of, and what one run may cost each client.

Refused: trained layers without noise (E1, in the config), statistics of a batch (E2), records that the sampler would
draw otherwise than the accountant thinks (E3), a delta that allows to publish a record outright (E4).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedp3.errors import InputError
from fedp3.privacy import account
from fedp3.privacy.clip import func_pieces, ghost_agrees
from fedp3.privacy.ledger import Budget, Ledger
from fedp3.privacy.mechanism import local_steps
from fedp3.recipe import Recipe, Shard
from fedp3.rng import Use, layers_draw_from, stream
from fedp3.server import Problem, rehearse
from fedp3.types import ClientPlan, Local, Private

WEAK = 10.0  # epsilon above which a guarantee says little
DRAWS = 32  # under which a net that draws is tried out
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
UNACCOUNTED = (
    "the number of training records of each client, which also divides its gradients",
    "scores on each client's own test records (G, D, P); this run's training records are not in them",
    "which clients answered, late or not at all",
    "the mean and deviation that normalise inputs, where a data set brings them",
    "settings that were tuned on these data: learning rate, clip, rounds",
    "samples of each class at each client, where a report of a simulation draws them",
)

# --------------------------------------------------------------------------- refusals


def check(recipe: Recipe, shards: Mapping[int, Shard], delta: float) -> None:
    """Raise one error with every reason not to start under LDP."""
    found = [*_batch_statistics(recipe), *_samplers(shards), *_deltas(shards, delta), *_extras(recipe)]
    if found:
        raise InputError("\n".join(f"LDP refused: {why}" for why in found))
    mixed = _mixes(recipe)
    if mixed:
        raise InputError(f"LDP refused: {mixed}")


def _batch_statistics(recipe: Recipe) -> list[str]:
    kinds = nn.modules.batchnorm._BatchNorm
    bad = [path or "the net" for path, m in recipe.net.named_modules() if isinstance(m, kinds)]
    bad += sorted({n.rpartition(".")[0] for n in recipe.layers.buffers} - set(bad))
    if not bad:
        return []
    more = f" and {len(bad) - 1} more layers" if len(bad) > 1 else ""
    return [
        f"{bad[0]}{more} keep statistics of whole batches, which tell on single records; normalise by record instead "
        "(resnet18: model.norm='group')"
    ]


def _samplers(shards: Mapping[int, Shard]) -> list[str]:
    twice = [i for i, s in shards.items() if len(set(s.train.tolist())) < len(s.train)]
    if not twice:
        return []
    return [
        f"client {twice[0]} holds a training record twice: two coins would draw it where the accountant counts one; "
        "name every sample once in [partition] file"
    ]


def _deltas(shards: Mapping[int, Shard], delta: float) -> list[str]:
    m, i = max((len(s.train), i) for i, s in shards.items())
    if not m or delta < 1 / m:
        return []
    return [
        f"privacy.delta={delta:g} is not below 1/m: client {i} has {m} training records, and such a delta would allow "
        f"to publish one of them; set it to {min(1e-5, 0.1 / m):.1g} or less"
    ]


def _extras(recipe: Recipe) -> list[str]:
    if recipe.hooks.plain("train") and recipe.hooks.plain("probe"):
        return []
    return [
        "this method trains or sends more than clipped and noised gradients (losses, passes or tensors of its own), "
        "which no epsilon here covers; choose a method that only plans, such as fedp3 or fedavg"
    ]


def _mixes(recipe: Recipe) -> str:
    """Why single records have no gradient of their own in this net; empty if they have.

    Each record in turn becomes another one, which must not move the others; a net that draws is tried under many draws.
    """
    net, x = recipe.net.train(), _made_up(recipe, 3)

    def answer(records: Tensor, draw: int) -> Tensor:
        with torch.no_grad(), layers_draw_from(stream(recipe.seed, Use.LAYER, draw)):
            logits: Tensor = net(records)
        return logits

    for draw in range(DRAWS if _draws(net, x) else 1):
        before = answer(x, draw)
        if not draw and not _close(answer(x, draw), before):
            return "the net draws from elsewhere than torch's generator, so what it does to a record cannot be checked"
        for j in range(len(x)):
            other, rest = x.clone(), torch.arange(len(x)) != j
            other[j] *= -3  # neither its sign nor its size
            if not _close(answer(other, draw)[rest], before[rest]):
                return (
                    "what the net says of one record depends on the others in its batch; "
                    "no clip can bound a record's part"
                )
    return ""


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _draws(net: nn.Module, x: Tensor) -> bool:
    """Whether the net, as it is set up, takes anything from torch's generator."""
    with torch.no_grad(), layers_draw_from(stream(0, Use.LAYER)):
        before = torch.random.get_rng_state()
        net(x)
        return not torch.equal(before, torch.random.get_rng_state())


def _made_up(recipe: Recipe, records: int) -> Tensor:
    shape = (records, *recipe.data.x.shape[1:])
    return torch.randn(shape, generator=stream(recipe.seed, Use.INIT)).to(recipe.device)


def uses_ghost(recipe: Recipe) -> bool:
    """Whether ghost clipping knows every way this net uses its tensors in training; asked with made-up records.

    Ghost clipping shows the net whole batches, `torch.func` single records.  So a net that draws must not take it,
    since a draw could mix records once in a while, unless all that draws are the Dropout layers of torch.
    """
    net, x, W = recipe.net, _made_up(recipe, 3), dict(recipe.net.named_parameters())
    y = torch.zeros(len(x), dtype=torch.int64, device=recipe.device)
    asked = {n: p.requires_grad for n, p in W.items()}
    net.train().requires_grad_(True)
    try:
        with layers_draw_from(stream(recipe.seed, Use.LAYER)):
            with _without_dropout(net):
                if not _draws(net, x) and ghost_agrees(net, x, y, W):
                    return True
            func_pieces(net, x, y, W, {})
    except Exception as error:  # torch.func raises many kinds
        raise InputError(
            f"LDP refused: this net has no per-example gradients that torch.func can make: {error}"
        ) from None
    finally:
        for n, p in W.items():
            p.requires_grad_(asked[n])
    return False


@contextmanager
def _without_dropout(net: nn.Module) -> Iterator[None]:
    """Inside, the Dropout layers of a net in training are idle; those of torch are known to draw for each record."""
    layers = [m for m in net.modules() if type(m) in DROPOUTS]
    for m in layers:
        m.eval()
    try:
        yield
    finally:
        for m in layers:
            m.train()


# --------------------------------------------------------------------------- the budget


def plan_budget(problem: Problem, local: Local, private: Private, epsilon: float, delta: float) -> Budget:
    """What each client may spend; without a multiplier, the least noise under which all rounds fit."""
    steps, by = local_steps(local, private), account.best()
    if not private.noise:
        most = steps * max(rehearse(problem).values(), default=0)
        if not most:
            raise InputError(
                "LDP refused: how many records the clients hold is not known here, so neither is the noise for "
                f"epsilon={epsilon:g}; find it with `fedp3 privacy sigma` and set privacy.noise_multiplier"
            )
        private = replace(private, noise=account.noise_multiplier(epsilon, delta, private.rate, most, by))
    allowed = account.allowed_steps(private.noise, private.rate, epsilon, delta, by)
    if allowed < steps:
        raise InputError(
            f"LDP refused: one task of {steps} steps with noise multiplier {private.noise:g} and sample rate "
            f"{private.rate:g} costs more than epsilon={epsilon:g}; {allowed} steps would fit. Take more noise, fewer "
            "local steps, or leave privacy.noise_multiplier out"
        )
    return Budget(private, steps, epsilon, delta, by, allowed)


def planned(problem: Problem) -> dict[int, float]:
    """The epsilon of each client at the end, if nothing fails and nothing is redone."""
    assert problem.budget is not None
    ledger = Ledger(problem.budget)
    rehearse(problem, ledger)
    return dict.fromkeys(range(len(problem.keep)), 0.0) | ledger.epsilons()


# --------------------------------------------------------------------------- warnings


def warnings(recipe: Recipe, plans: Sequence[ClientPlan], budget: Budget | None) -> dict[str, str]:
    """What a reader must know, by its id."""
    return _of_uploads(recipe, plans) if budget is None else _of_budget(budget)


def _of_uploads(recipe: Recipe, plans: Sequence[ClientPlan]) -> dict[str, str]:
    """Without noise: what an upload tells.  Fewer layers are less traffic, and no guarantee."""
    shapes, local = recipe.layers.shapes, recipe.local
    matrices = {l: [n for n in names if len(shapes[n]) == 2] for l, names in recipe.layers.layers.items()}
    uploaded = {l for plan in plans for l in plan.uploaded}
    first = next(iter(recipe.layers.layers))
    found = {}
    if first in uploaded and matrices[first]:
        found["W1"] = (
            f"{first} reads the samples themselves and is uploaded: training samples can be computed from its update "
            "(one sample a step exactly, small batches mostly)"
        )
    if recipe.layers.head in uploaded:
        found["W2"] = f"{recipe.layers.head} is uploaded: its update shows how many samples of each label were used"
    few = local.batch * local.steps
    if few <= 16 and not local.epochs and any(matrices[l] for l in uploaded):
        found["W3"] = f"an update comes from {few} samples: so few can be told apart in any fully connected layer"
    found["W4"] = (
        "the server chooses weights and layer sets; a dishonest one can choose them to see more. Fewer layers are "
        "sent, which saves traffic; no formal guarantee follows"
    )
    return found


def _of_budget(budget: Budget) -> dict[str, str]:
    found = {}
    if budget.private.randomness == "seeded":
        found["W5"] = "simulation only: the noise is drawn from run.seed, so whoever knows the seed can take it away"
    if budget.epsilon > WEAK:
        found["W6"] = f"an epsilon of {budget.epsilon:g} is a weak guarantee: above {WEAK:g} little is promised"
    found["W7"] = "released and not in epsilon: " + "; ".join(UNACCOUNTED)
    return found


def described(budget: Budget) -> dict[str, object]:
    """Everything that gives an epsilon its meaning."""
    p = budget.private
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "noise_multiplier": p.noise,
        "sample_rate": p.rate,
        "clip": p.clip,
        "accountant": account.describe(budget.accountant),
        "adjacency": account.ADJACENCY,
        "sampling": account.SAMPLING,
        "randomness": p.randomness,
        "clipping": "ghost" if p.ghost else "torch.func",
        "steps_per_task": budget.steps,
        "allowed_steps": min(budget.allowed, 1 << 53),
        "unaccounted": list(UNACCOUNTED),
    }
