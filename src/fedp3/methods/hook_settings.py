"""The [hooks] section of a config, the hooks that it names, and which of them clash."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from fedp3.client.batching import LocalSettings, has_constant_rate
from fedp3.client.hooks import Exchange, Hooks, Loss, Pass, TransformOutputs
from fedp3.core.registry import NameIn, Registry
from fedp3.core.settings import STRICT
from fedp3.methods.fedcr import GAUSSIANS, code_loss
from fedp3.methods.fiarse import through_threshold
from fedp3.methods.fjord import DISTILLED
from fedp3.methods.gradient_norms import GRADIENT_NORMS
from fedp3.methods.heterofl import (
    masked_cross_entropy,
    recompute_statistics,
    scaled_outputs,
    zero_absent,
)
from fedp3.methods.scaffold import SCAFFOLD
from fedp3.planning.client_plans import PlanSettings
from fedp3.planning.prune_settings import LOCAL_PRUNERS, PruneSettings

Passes = tuple[Pass, ...]
# from the settings to the passes of a training task, and those after which P is measured
PASSES: "Registry[Callable[[HookSettings], tuple[Passes, Passes]]]" = Registry("sequence of passes")
# from the settings to a loss, and to what replaces the outputs when P is scored
LOSSES: "Registry[Callable[[HookSettings], tuple[Loss | None, TransformOutputs | None]]]" = (
    Registry("loss")
)
EXCHANGES: Registry[Exchange | None] = Registry("exchange")


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class HookSettings:
    """What the method adds to local training."""

    passes: Annotated[str, NameIn(PASSES)] = Field(
        default="joint",
        description="order of local training: joint; head-body (FedRep); body, without the head "
        "(FedBABU); head-last, where P is measured after training only the head (FedCR); own, with "
        "a personal model beside the global one (Ditto)",
    )
    mu: float = Field(
        default=0.0,
        ge=0,
        description="proximal coefficient: the pull towards the weights that were sent (FedProx); "
        "with passes = 'own' it pulls the personal model (Ditto)",
    )
    head_share: float = Field(
        default=1.0,
        gt=0,
        description="with passes = 'head-body': steps of the head, as a share of the local steps",
    )
    finetune_factor: float = Field(
        default=1.0,
        gt=0,
        description="P is measured after this many times the local steps of a round",
    )
    loss: Annotated[str, NameIn(LOSSES)] = Field(
        default="cross_entropy",
        description="cross_entropy; present, with the logits of labels that a client does not have "
        "set to zero (HeteroFL); code, over draws of a stochastic code (FedCR)",
    )
    scale: bool = Field(
        default=False,
        description="HeteroFL's scaler: while a client trains or evaluates, divide the outputs of "
        "each layer by the share of its units that is retained",
    )
    static_norm: bool = Field(
        default=False,
        description="after the local steps, recompute BatchNorm's running statistics over the "
        "client's training samples (HeteroFL)",
    )
    distil: bool = Field(
        default=False,
        description="under ordered dropout, the drawn width also learns from the client's full "
        "width (FjORD)",
    )
    through_threshold: bool = Field(
        default=False,
        description="under prune.selector = 'magnitude_all', gradients also flow through the "
        "threshold that decides which weights are retained (FIARSE)",
    )
    exchange: Annotated[str, NameIn(EXCHANGES)] = Field(
        default="none",
        description="further tensors that the method exchanges: none, scaffold (control "
        "variates), gaussians (one per class, FedCR) or norms (of gradients, layer by layer)",
    )
    code: int = Field(
        default=0,
        ge=0,
        description="FedCR: numbers of a stochastic code before the head, at width 1; 0: none",
    )
    beta: float = Field(
        default=0.001, ge=0, description="FedCR: weight of the divergence from the class's Gaussian"
    )
    samples: int = Field(default=8, ge=1, description="FedCR: draws of the code per sample")


def _joint(s: HookSettings) -> tuple[Passes, Passes]:
    return (Pass(mu=s.mu),), (Pass(mu=s.mu, share=s.finetune_factor),)


def _head_body(s: HookSettings) -> tuple[Passes, Passes]:
    factor = s.finetune_factor
    train = (Pass(layers="head", share=s.head_share), Pass(layers="body", mu=s.mu))
    probe = (
        Pass(layers="head", share=s.head_share * factor),
        Pass(layers="body", mu=s.mu, share=factor),
    )
    return train, probe


def _body(s: HookSettings) -> tuple[Passes, Passes]:
    return (Pass(layers="body", mu=s.mu),), (Pass(share=s.finetune_factor),)


def _head_last(s: HookSettings) -> tuple[Passes, Passes]:
    return (Pass(mu=s.mu),), (Pass(layers="head", share=s.finetune_factor),)


def _own(s: HookSettings) -> tuple[Passes, Passes]:
    train = (Pass(), Pass(personal=True, mu=s.mu))
    return train, (Pass(personal=True, mu=s.mu, share=s.finetune_factor),)


PASSES.add("joint", _joint)
PASSES.add("head-body", _head_body)
PASSES.add("body", _body)
PASSES.add("head-last", _head_last)
PASSES.add("own", _own)
LOSSES.add("cross_entropy", lambda s: (None, None))
LOSSES.add("present", lambda s: (masked_cross_entropy, zero_absent))
LOSSES.add("code", lambda s: (partial(code_loss, beta=s.beta, samples=s.samples), None))
EXCHANGES.add("none", None)
EXCHANGES.add("scaffold", SCAFFOLD)
EXCHANGES.add("gaussians", GAUSSIANS)
EXCHANGES.add("norms", GRADIENT_NORMS)


def make_hooks(settings: HookSettings) -> Hooks:
    """The hooks that these settings name."""
    train, probe = PASSES.pick(settings.passes)(settings)
    loss, transform_outputs = LOSSES.pick(settings.loss)(settings)
    return Hooks(
        passes=train,
        probe=probe,
        loss=loss,
        transform_outputs=transform_outputs,
        forward=scaled_outputs if settings.scale else None,
        after_pass=recompute_statistics if settings.static_norm else None,
        step=DISTILLED if settings.distil else None,
        gradient=through_threshold if settings.through_threshold else None,
        exchange=EXCHANGES.pick(settings.exchange),
    )


def clashes(
    s: HookSettings, plan: PlanSettings, prune: PruneSettings, local: LocalSettings
) -> list[str]:
    """Hooks that cannot work together or with the rest of a config, each with the remedy."""
    full = plan.layers == "full" and plan.schedule == "always"
    scaffold = s.exchange == "scaffold"
    needs_code = s.loss == "code" or s.exchange == "gaussians"
    widths = LOCAL_PRUNERS.pick(prune.local_pruner).by_units and prune.shrinks
    reasons = {
        "[hooks] passes: 'own' keeps a full model on every client; set [plan] layers to 'full' and "
        "schedule to 'always'": s.passes == "own" and not full,
        "[hooks] exchange: 'scaffold' corrects full models; set [plan] layers to 'full', schedule "
        "to 'always' and head to 'shared'": scaffold and not (full and plan.head == "shared"),
        "[hooks] exchange: 'scaffold' computes the mean gradient from the change of a client's "
        "weights; set [local] momentum to 0": scaffold and local.momentum > 0,
        "[hooks] exchange: 'scaffold' computes the mean gradient from steps of equal length along "
        "gradients; set [local] optimizer to 'sgd', warmup to 0 and step_schedule to 'constant'": (
            scaffold and (local.optimizer != "sgd" or not has_constant_rate(local))
        ),
        "[hooks] exchange: 'scaffold' needs one pass over the full model; set [hooks] passes to "
        "'joint'": scaffold and s.passes != "joint",
        "[hooks] code: the loss 'code' and the exchange 'gaussians' need a stochastic code; set "
        "code above 0": needs_code and not s.code,
        "[hooks] loss: 'code' needs the class Gaussians; set [hooks] exchange to 'gaussians'": (
            s.loss == "code" and s.exchange != "gaussians"
        ),
        "[hooks] distil: widths that learn from each other need [prune] "
        "local_pruner='ordered_dropout', freeze_pruned and physical": s.distil and not widths,
        "[hooks] distil: the drawn width learns from the full one by cross-entropy; leave [hooks] "
        "loss at 'cross_entropy'": s.distil and s.loss != "cross_entropy",
        "[hooks] through_threshold: one threshold on all weights decides which are retained under "
        "[prune] selector='magnitude_all' with freeze_pruned; set both": (
            s.through_threshold and not (prune.selector == "magnitude_all" and prune.freeze_pruned)
        ),
    }
    return [text for text, applies in reasons.items() if applies]
