"""Mistakes that keys make together where rounds depend on each other: codes, schedules, memory."""

from fedp3.config.schema import Config
from fedp3.devices.round_ends import ROUND_ENDS
from fedp3.messages.compressors import COMPRESSORS
from fedp3.planning.layer_sets import AUTO
from fedp3.planning.schedules import SCHEDULES


def wrong_over_rounds(c: Config) -> list[str]:
    """What published weights, schedules, recycled layers and weak clients do not allow."""
    mistakes = wrong_downloads(c) + _wrong_schedules(c) + _wrong_recycling(c)
    return mistakes + _wrong_intervals(c) + _wrong_weak(c)


def _overlaps(c: Config) -> bool:
    """Whether rounds begin before others have ended."""
    return c.devices.described and ROUND_ENDS.pick(c.devices.round_end).end is None


def wrong_downloads(c: Config) -> list[str]:
    """What coded changes of published weights do not allow."""
    code = c.download.compress
    if code == "none":
        return []
    sparse = (compressor := COMPRESSORS.pick(code)) is not None and compressor.sparse
    prunes = c.plan.layers != "full" and c.prune.keep != 1.0
    reasons = {
        f"[download] compress: {code!r} sends changes of the newest weights, and with [devices] "
        "round_end = 'buffered' clients start from several; set compress to 'none', or another "
        "round_end": _overlaps(c),
        f"[download] compress: {code!r} lets clients start from other weights than the server's, "
        "which client-level DP does not account for; set 'none'": c.client_privacy.enabled,
        f"[download] compress: {code!r} sends some coordinates of each change, of which a client "
        "with pruned layers may need none; use another code, or set [prune] keep to 1": (
            sparse and prunes
        ),
        "[plan] upload: 'zeros' uploads zeros, not changes of what was sent; with [download] "
        "compress set 'retained'": c.plan.upload == "zeros",
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_schedules(c: Config) -> list[str]:
    """Schedules of layers under plans that have no layers to schedule."""
    plan = c.plan
    if not SCHEDULES.pick(plan.schedule).changes:
        return []
    reasons = {
        f"[plan] schedule: {plan.schedule!r} says when layers are trained, and [plan] layers = "
        "'auto' chooses windows of layers for devices; set [devices] planner to 'manual', or "
        "schedule to 'always'": plan.layers == AUTO,
        f"[plan] schedule: {plan.schedule!r} says when a layer is uploaded in full, and with "
        f"[plan] upload = {plan.upload!r} pruned layers are uploaded in every round; set upload to "
        "'none', or schedule to 'always'": plan.upload != "none",
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_recycling(c: Config) -> list[str]:
    """Where layers cannot be left out of a round's uploads."""
    if not c.aggregate.recycle:
        return []
    overlap = _overlaps(c)
    reasons = {
        "[aggregate] recycle: a round's layers are chosen after the round before, and with "
        "[devices] round_end = 'buffered' rounds overlap; set 'wait' or 'deadline'": overlap,
        "[aggregate] recycle: layers are left out of every L_i, and [plan] layers = 'auto' chooses "
        "windows of layers for devices; set [devices] planner to 'manual'": c.plan.layers == AUTO,
        "[aggregate] recycle: a recycled layer is outside L_i, and with [plan] upload = "
        f"{c.plan.upload!r} it would be uploaded nevertheless; set upload to 'none'": (
            c.plan.upload != "none"
        ),
        "[aggregate] recycle: a recycled layer is outside L_i for a round, and personal layers "
        "must be the same for the entire run; set [plan] others to 'train' or 'freeze'": (
            c.plan.others == "personal"
        ),
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_intervals(c: Config) -> list[str]:
    """Where clients cannot continue to train a layer from round to round."""
    interval = c.aggregate.interval
    if interval == 1:
        return []
    overlap = _overlaps(c)
    reasons = {
        f"[aggregate] interval: {interval} rounds in which clients continue to train a layer need "
        "full models; set [plan] layers to 'full', schedule to 'always' and head to 'shared'": (
            c.plan.layers != "full" or c.plan.changes or c.plan.head != "shared"
        ),
        "[aggregate] interval: with [devices] round_end = 'buffered' rounds overlap; set 'wait' or "
        "'deadline'": overlap,
        "[aggregate] interval: recycled layers are not trained on by clients; set recycle to 0, "
        "or interval to 1": c.aggregate.recycle > 0,
        f"[aggregate] interval: {c.upload.compress!r} sends changes of what was sent in the same "
        "round, and a layer that a client continues to train was sent earlier; set [upload] "
        "compress to 'none'": c.upload.compress != "none",
        f"[aggregate] interval: with [download] compress = {c.download.compress!r} clients start "
        "from published weights, and a layer that a client continues to train does not; set "
        "[download] compress to 'none'": c.download.compress != "none",
        "[aggregate] interval: personal models ([hooks] passes = 'own') and exchanged tensors "
        "belong to one round; set interval to 1": (
            c.hooks.passes == "own" or c.hooks.exchange != "none"
        ),
    }
    return [text for text, applies in reasons.items() if applies]


def _wrong_weak(c: Config) -> list[str]:
    """What weak clients cannot do, or nobody is there to do."""
    plan, local = c.plan, c.local
    less_work = plan.weak_steps > 0 or plan.weak_depth < 1
    if not less_work:
        return []
    reasons = {
        "[plan] weak_below: 0 means that no client is weak; set the share prune.keep below which "
        "weak_steps and weak_depth apply": plan.weak_below == 0,
        f"[plan] weak_steps: {plan.weak_steps} steps are not fewer than all others take; set 1 to "
        f"{local.steps - 1}, and [local] steps instead of epochs": (
            plan.weak_steps > 0 and (local.epochs > 0 or plan.weak_steps >= local.steps)
        ),
        "[plan] weak_steps: under LDP every client is charged for all local steps; set 0": (
            plan.weak_steps > 0 and c.privacy.enabled
        ),
        "[plan] weak_depth: a backward pass ends early only if the layers below are frozen; set "
        "[plan] others to 'freeze'": plan.weak_depth < 1 and plan.others not in ("freeze", "hold"),
        "[plan] weak_below: [devices] planner = 'auto' chooses steps and layers for each device; "
        "set planner to 'manual', or weak_steps to 0 and weak_depth to 1": c.devices.plans,
    }
    return [text for text, applies in reasons.items() if applies]
