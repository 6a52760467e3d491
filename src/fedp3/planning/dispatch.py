"""What the server sends to each client, for training (Alg. 1, ll. 5-6) or evaluation."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedp3.core import masks as M
from fedp3.core.memo import once_per_plan
from fedp3.core.types import ClientPlan, Kind, Layer, LayerMap, LayerPlan, Masks, Params, Task
from fedp3.planning.prune_settings import SELECTORS, PruneSettings
from fedp3.planning.pruning import Memo, masks_for


def dispatch(
    W: Params,
    plans: Sequence[ClientPlan],
    layers: LayerMap,
    settings: PruneSettings,
    t: int,
    seed: int,
) -> list[tuple[Params, Masks]]:
    """What each client is sent: W_t^l for l in L_i, P_i ⊙ W_t^l elsewhere (Alg. 1, ll. 5-6).

    Clients with equal masks share the pruned tensors, which saves memory.
    """
    selector = SELECTORS.pick(settings.selector)
    memo: Memo = {}
    # (tensor name, id of its mask) -> P ⊙ W; ids stay valid because `memo` keeps the masks alive
    pruned: dict[tuple[str, int], Tensor] = {}

    def send(plan: ClientPlan) -> tuple[Params, Masks]:
        masks = masks_for(plan, W, layers, settings, t, seed, memo)
        weights = {}
        for l, p in plan.layers.items():
            if p.send not in ("dense", "pruned"):
                continue
            for n in layers.layers[l]:
                mask = M.sent(n, l, plan, masks, layers, settings.unfed_columns)
                if not memo or mask is None:
                    weights[n] = M.zero_pruned(W[n], mask)
                    continue
                key = (n, id(mask))
                if key not in pruned:
                    pruned[key] = M.zero_pruned(W[n], mask)
                weights[n] = pruned[key]
        return weights, masks

    send_each = send if selector.draws or selector.deals else once_per_plan(send)
    return [send_each(plan) for plan in plans]


# --------------------------------------------------------------------------- tasks that score


def global_tasks(
    W: Params, plans: Sequence[ClientPlan], t: int, seen: Mapping[int, int]
) -> list[Task]:
    """Tasks that score the server's model (G), with the client's personal layers if it has any.

    Args:
        W: the server's model.
        plans: the plans of the clients that score it.
        t: the round, from 0.
        seen: for each client the last round in which its update was accepted.
    """
    scored = once_per_plan(_sent_dense)
    return [
        Task(
            t=t,
            plan=ClientPlan(plan.client, scored(plan)),
            weights=W,
            kind="evaluate",
            evaluate=True,
            state_from=seen.get(plan.client, -1),
        )
        for plan in plans
    ]


def _sent_dense(plan: ClientPlan) -> dict[Layer, LayerPlan]:
    return {l: scored_layer_plan(p) for l, p in plan.layers.items()}


def scored_layer_plan(p: LayerPlan) -> LayerPlan:
    """A layer's plan where G is scored: sent dense unless it is personal; nothing is uploaded."""
    return p if p.send == "none" and p.upload == "none" else LayerPlan(upload="none")


def dispatched_tasks(
    W: Params,
    plans: Sequence[ClientPlan],
    layers: LayerMap,
    settings: PruneSettings,
    t: int,
    seed: int,
    seen: Mapping[int, int],
    *,
    probe: bool,
    extra: Params | None = None,
) -> list[Task]:
    """Tasks that score the dispatched model.

    Clients score it unchanged (D), or with `probe` after a local update that is discarded (P).
    """
    sent = dispatch(W, plans, layers, settings, t, seed)
    kind: Kind = "probe" if probe else "evaluate"
    return _pruned_tasks(plans, sent, t, seen, kind=kind, evaluate=True, extra=extra or {})


def training_tasks(
    W: Params,
    plans: Sequence[ClientPlan],
    layers: LayerMap,
    settings: PruneSettings,
    t: int,
    seed: int,
    seen: Mapping[int, int],
    *,
    evaluate: bool,
    extra: Params,
) -> list[Task]:
    """Tasks that train (Alg. 1, ll. 5-6); with `evaluate` clients also score the trained model."""
    sent = dispatch(W, plans, layers, settings, t, seed)
    return _pruned_tasks(plans, sent, t, seen, kind="train", evaluate=evaluate, extra=extra)


def _pruned_tasks(
    plans: Sequence[ClientPlan],
    sent: Sequence[tuple[Params, Masks]],
    t: int,
    seen: Mapping[int, int],
    *,
    kind: Kind,
    evaluate: bool,
    extra: Params,
) -> list[Task]:
    return [
        Task(
            t=t,
            plan=plan,
            weights=weights,
            masks=masks,
            kind=kind,
            evaluate=evaluate,
            state_from=seen.get(plan.client, -1),
            extra=extra,
        )
        for plan, (weights, masks) in zip(plans, sent, strict=True)
    ]
