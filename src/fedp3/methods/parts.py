"""From names and numbers to hooks, and which of them do not go together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fedp3.hooks import Answer, Exchange, Hooks, Loss, Pass
from fedp3.local_prune import BY_UNITS
from fedp3.lookup import pick
from fedp3.methods.fedcr import GAUSSIANS, code_loss
from fedp3.methods.losses import only_present, present
from fedp3.methods.scaffold import SCAFFOLD


@dataclass(frozen=True, slots=True)
class Parts:
    """Which hooks a run uses: what the [hooks] section of a config says."""

    passes: str = "joint"
    mu: float = 0.0
    head_share: float = 1.0
    tune: float = 1.0
    loss: str = "cross_entropy"
    scale: bool = False
    static_norm: bool = False
    distil: bool = False
    exchange: str = "none"
    code: int = 0
    beta: float = 0.001
    samples: int = 8


Passes = tuple[Pass, ...]
PASSES: Mapping[str, Callable[[Parts], tuple[Passes, Passes]]] = {  # of a round, and of the probe that P is taken after
    "joint": lambda p: ((Pass(mu=p.mu),), (Pass(mu=p.mu, share=p.tune),)),
    "head-body": lambda p: (
        (Pass("head", share=p.head_share), Pass("body", mu=p.mu)),
        (Pass("head", share=p.head_share * p.tune), Pass("body", mu=p.mu, share=p.tune)),
    ),
    "body": lambda p: ((Pass("body", mu=p.mu),), (Pass(share=p.tune),)),
    "head-last": lambda p: ((Pass(mu=p.mu),), (Pass("head", share=p.tune),)),
    "own": lambda p: ((Pass(), Pass(own=True, mu=p.mu)), (Pass(own=True, mu=p.mu, share=p.tune),)),
}
LOSSES: Mapping[str, Callable[[Parts], tuple[Loss | None, Answer | None]]] = {  # and what a client so trained answers
    "cross_entropy": lambda p: (None, None),
    "present": lambda p: (present, only_present),
    "code": lambda p: (partial(code_loss, beta=p.beta, samples=p.samples), None),
}
EXCHANGES: Mapping[str, Exchange | None] = {"none": None, "scaffold": SCAFFOLD, "gaussians": GAUSSIANS}


def hooks(p: Parts) -> Hooks:
    """The record of hooks that these parts make."""
    train, probe = pick(PASSES, p.passes, "sequence of passes")(p)
    loss, answer = pick(LOSSES, p.loss, "loss")(p)
    exchange = pick(EXCHANGES, p.exchange, "exchange")
    return Hooks(train, probe, loss, answer, p.scale, p.static_norm, p.distil, exchange)


@dataclass(frozen=True, slots=True)
class Around:
    """What of the rest of a config the parts must agree with."""

    layers: str  # [plan] layers
    head: str
    local: str  # [prune] local
    physical: bool
    momentum: float


def clashes(p: Parts, at: Around) -> list[str]:
    """Parts that cannot work together or with the rest of a config, each with what to do about it."""
    whole = at.layers == "full"
    found = {
        "[hooks] passes: 'own' keeps a whole model at every client; set [plan] layers to 'full'": (
            p.passes == "own" and not whole
        ),
        "[hooks] exchange: 'scaffold' corrects whole models; set [plan] layers to 'full' and head to 'shared'": (
            p.exchange == "scaffold" and not (whole and at.head == "shared")
        ),
        "[hooks] exchange: 'scaffold' takes the mean gradient from what a client moved; set [local] momentum to 0": (
            p.exchange == "scaffold" and at.momentum > 0
        ),
        "[hooks] exchange: 'scaffold' takes one pass over the whole model; set [hooks] passes to 'joint'": (
            p.exchange == "scaffold" and p.passes != "joint"
        ),
        "[hooks] code: the loss 'code' and the exchange 'gaussians' need a stochastic code; set code above 0": (
            "code" in (p.loss, *(["code"] if p.exchange == "gaussians" else [])) and not p.code
        ),
        "[hooks] loss: 'code' needs the class Gaussians; set [hooks] exchange to 'gaussians'": (
            p.loss == "code" and p.exchange != "gaussians"
        ),
        "[hooks] distil: widths that learn from each other need [prune] local='ordered_dropout', hold and physical": (
            p.distil and not (at.local in BY_UNITS and at.physical)
        ),
        "[hooks] distil: the drawn width learns from the whole one by cross-entropy; leave [hooks] loss alone": (
            p.distil and p.loss != "cross_entropy"
        ),
    }
    return [text for text, wrong in found.items() if wrong]


def under_ldp(p: Parts) -> list[str]:
    """Why these parts would break the guarantee of LDP: what leaves or trains without noise."""
    found = {
        "the method's own tensors leave the client without noise (hooks.exchange)": p.exchange != "none",
        "only the gradient of the cross-entropy is clipped by record (hooks.loss)": p.loss != "cross_entropy",
        "the second gradient of a distilled step carries no noise (hooks.distil)": p.distil,
        "statistics of whole batches tell on single records (hooks.static_norm)": p.static_norm,
        "clipping by record does not know of scaled units (hooks.scale)": p.scale,
        "the accountant counts one pass per task (hooks.passes)": p.passes != "joint",
        "fine-tuning takes more steps than a task is charged for (hooks.tune)": p.tune > 1,
    }
    return [text for text, wrong in found.items() if wrong]
