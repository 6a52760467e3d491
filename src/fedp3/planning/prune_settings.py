"""The settings of pruning, and the tables of selectors (P_i) and local pruners (Q_i) they name."""

from collections.abc import Callable
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedp3.core.registry import NameIn, Registry
from fedp3.core.settings import STRICT, Share
from fedp3.core.types import ClientPlan, LayerMap, Masks

# (w, k, generator) -> bool mask
SelectWeights = Callable[[Tensor, int, torch.Generator | None], Tensor]
# (norms, k, t, generator) -> indices
SelectUnits = Callable[[Tensor, int, int, torch.Generator | None], Tensor]


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A way to choose what P_i retains: single weights or entire units.

    Exactly one of `weights` and `units` is given.

    Args:
        weights: takes a weight tensor, the number of weights to retain and a generator; returns a
            bool mask.
        units: takes the norm of each unit's incoming weights, the number of units to retain, the
            round and a generator; returns the retained indices in ascending order.
        draws: the choice is random and differs between clients of the same `keep`.
        deals: the units are divided among the clients of a round; `units` returns all units in
            the order in which they are divided.
        across_tensors: one choice over all pruned tensors together instead of one per tensor.
        static: the choice is the same in every round, so what no client retains is never trained.
        derivable: a client can compute the mask itself, so it need not be sent.
    """

    weights: SelectWeights | None = None
    units: SelectUnits | None = None
    draws: bool = False
    deals: bool = False
    across_tensors: bool = False
    static: bool = False
    derivable: bool = True


# (q, plan, masks of P_i, layers, generator) -> masks of one local step
DrawStepMasks = Callable[[float, ClientPlan, Masks, LayerMap, torch.Generator], Masks]


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class LocalPruner:
    """A way to prune at every local step (Q_i).

    Args:
        draw: the masks that one step trains under.
        by_units: entire units are pruned, so that a step can run on a smaller network.
    """

    draw: DrawStepMasks
    by_units: bool = False


SELECTORS: Registry[Selector] = Registry("selector")
LOCAL_PRUNERS: Registry[LocalPruner] = Registry("local pruner")


@dataclass(config=STRICT, frozen=True, slots=True, kw_only=True)
class PruneSettings:
    """How layers outside L_i are pruned: P_i when they are sent, Q_i at each local step."""

    keep: Share | tuple[Share, ...] | dict[Share, Share] | str = Field(
        default=0.9,
        description="share of a pruned layer that a device can hold, in (0, 1]: one number for all "
        "clients; a list with one number per client; a shorter list of device classes, assigned at "
        "random to equally many clients each; a table such as {'0.125' = 0.2, '1.0' = 0.8} of "
        "device classes and their share of the clients; a CSV file with the columns client,keep; "
        "or auto: chosen for each device of [devices]",
    )
    selector: Annotated[str, NameIn(SELECTORS)] = Field(
        default="magnitude", description="which weights or units of a pruned layer are retained"
    )
    freeze_pruned: bool = Field(
        default=True,
        description="pruned coordinates stay zero while a client trains; false lets them grow back",
    )
    unfed_columns: Literal["abstain", "vote"] = Field(
        default="abstain",
        description="columns of layers in L_i whose inputs are all pruned, so that they get no "
        "gradient: abstain leaves them out of both messages, vote averages their unchanged values "
        "as in the paper's text",
    )
    local_pruner: Annotated[str, NameIn(LOCAL_PRUNERS)] = Field(
        default="fixed",
        description="further pruning of the layers outside L_i, drawn anew at each local step "
        "(Q_i); fixed means none, uniform prunes single weights, ordered_dropout retains leading "
        "units, ordered_matched leading units with as many weights as uniform",
    )
    q: Share | tuple[Share, ...] = Field(
        default=(),
        description="share that a local step retains: a number, a list to draw from, or [] for "
        "shares drawn uniformly from [q_min, 1]",
    )
    q_min: Share = Field(
        default=0.5, description="lower end of the shares that are drawn if q is []"
    )
    q_relative_to: Literal["retained", "layer"] = Field(
        default="retained",
        description="what the numbers of a list q are shares of: what P_i retained, or the full "
        "layer (then only numbers up to keep are drawn)",
    )
    heads: bool = Field(
        default=False,
        description="structured selectors also prune attention heads, each with its queries, keys, "
        "values and projection; heads that share keys and values are pruned together",
    )
    physical: bool = Field(
        default=True,
        description="where entire units are pruned, train a physically smaller network instead of "
        "a masked one",
    )

    @property
    def shrinks(self) -> bool:
        """Whether clients train smaller networks where units are pruned.

        A smaller network equals a masked one only while pruned weights stay zero.
        """
        return self.physical and self.freeze_pruned
