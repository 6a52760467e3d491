"""Checks before training.

Rejected are plans under which no client trains some layer, and pruning that is not possible.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.errors import PlanError
from fedp3.core.types import ClientPlan, Layer, LayerMap
from fedp3.planning.client_plans import PlanSettings, client_plans
from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS, PruneSettings
from fedp3.planning.pruning import masks_for, pruned_layers
from fedp3.planning.residual_blocks import skippable_blocks


def coverage(plans: Iterable[ClientPlan]) -> dict[Layer, list[int]]:
    """For each layer the clients that train it and upload something of it."""
    covered: dict[Layer, dict[int, None]] = {}  # a client may have plans of several rounds
    for plan in plans:
        for l, p in plan.layers.items():
            clients = covered.setdefault(l, {})
            if p.train and p.upload != "none":
                clients[plan.client] = None
    return {l: list(clients) for l, clients in covered.items()}


def check_coverage(
    settings: PlanSettings, layers: LayerMap, keep: Sequence[float], seed: int, rounds: int
) -> None:
    """Reject plans under which no client trains and uploads some layer in any round.

    Layers that are personal at all clients are exempt.
    """
    orphans = set(layers.layers) - layers.constant
    for t in range(rounds if settings.changes else 1):
        plans = client_plans(settings, layers, keep, seed, t)
        _check_skips(plans, layers)
        for l, clients in coverage(plans).items():
            if clients or _is_personal(l, plans):
                orphans.discard(l)
        if not orphans:
            return
    raise PlanError(
        f"no client trains and uploads {', '.join(sorted(orphans))} under "
        f"layers={settings.layers!r}: they would keep their initial values for the entire run; "
        f"widen [plan] layers, add clients{_or_rounds(settings, rounds)}, or set [plan] upload to "
        "'retained'"
    )


def _or_rounds(settings: PlanSettings, rounds: int) -> str:
    if not settings.changes:
        return ""
    return f", run more than {rounds} rounds"


def _is_personal(l: Layer, plans: Iterable[ClientPlan]) -> bool:
    """Whether a layer is neither sent to nor uploaded by any client."""
    return all(plan.layers[l].send == plan.layers[l].upload == "none" for plan in plans)


def _check_skips(plans: Iterable[ClientPlan], layers: LayerMap) -> None:
    """Reject plans that skip a layer without which the network does not work."""
    blocks = skippable_blocks(layers)
    block_of = {l: inside for inside in blocks.values() for l in inside}
    for plan in plans:
        skipped = {l for l, p in plan.layers.items() if p.send == "skip"}
        for l in sorted(skipped):
            if l not in block_of:
                raise PlanError(
                    f"others='skip' would skip layer {l!r}, but no shortcut leads around it; only "
                    "residual blocks of transformers and of resnet18 (with an identity shortcut) "
                    "can be skipped, with layers = 'blocks-K'"
                )
            if layers.residual and not skipped.issuperset(block_of[l]):
                raise PlanError(
                    f"others='skip' would skip layer {l!r} and not the rest of its block "
                    f"({', '.join(block_of[l])}); blocks are skipped entirely: use "
                    "layers = 'blocks-K'"
                )


def check_pruning(settings: PruneSettings, layers: LayerMap, plans: Sequence[ClientPlan]) -> None:
    """Reject pruning that is not possible, or that leaves coordinates untrained in all rounds."""
    selector = SELECTORS.pick(settings.selector)
    structured = selector.units is not None or LOCAL_PRUNERS.pick(settings.local_pruner).by_units
    if structured and layers.note and any(pruned_layers(plan) for plan in plans):
        raise PlanError(f"pruning by units must trace them through the network, but {layers.note}")
    if structured and settings.heads and not any(g.heads for g in layers.groups.values()):
        raise PlanError(
            "[prune] heads: this network has no attention heads that can be pruned; the blocks of "
            "gpt, vit and of the kinds of [model] name = 'hf' have them"
        )
    if selector.units is not None and settings.physical and not settings.freeze_pruned:
        raise PlanError(
            f"with the {settings.selector} selector clients train a smaller network, in which "
            "pruned weights cannot grow back: set prune.freeze_pruned=true, or "
            "prune.physical=false to train the full network under masks"
        )
    if selector.static:
        _check_reach(settings, layers, plans)


def _check_reach(settings: PruneSettings, layers: LayerMap, plans: Sequence[ClientPlan]) -> None:
    """Refuse a static selector that prunes some coordinates at all clients that upload their layer.

    Such coordinates would never be updated.
    """
    zeros = {n: torch.zeros(shape) for n, shape in layers.shapes.items()}
    reached: dict[str, Tensor] = {}
    distinct = {tuple(plan.layers.items()): plan for plan in plans}  # equal plans, equal masks
    for plan in distinct.values():
        masks = masks_for(plan, zeros, layers, settings, 0, 0)
        for l in plan.uploaded:
            for n in layers.layers[l]:
                mask = M.as_bool(M.active(n, masks, layers), layers.shapes[n])
                reached[n] = reached[n] | mask if n in reached else mask
    untrained = {
        n: 1 - float(mask.float().mean()) for n, mask in reached.items() if not bool(mask.all())
    }
    if untrained:
        worst = max(untrained, key=lambda n: untrained[n])
        raise PlanError(
            f"the {settings.selector} selector retains the same units in every "
            "round, so no client would train "
            f"{untrained[worst]:.0%} of {worst} (and parts of {len(untrained) - 1} other tensors); "
            "use 'rolling' or 'neuron', or give some clients keep = 1"
        )
