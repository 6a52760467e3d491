"""What server and clients both know before the first task, and what only clients need."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedp3.client.batching import LocalSettings
from fedp3.client.hooks import NO_HOOKS, Hooks
from fedp3.client.objectives import CLASSIFICATION, Objective
from fedp3.client.step_source import PLAIN_STEPS, StepSource
from fedp3.core.types import Group, LayerMap, Params
from fedp3.data import Dataset
from fedp3.messages.compression import (
    PLAIN_DOWNLOAD,
    UNCOMPRESSED,
    DownloadSettings,
    UploadSettings,
)
from fedp3.models import shrinking
from fedp3.models.adapters import NO_ADAPTER, AdapterSettings
from fedp3.planning.prune_settings import PruneSettings

DEFAULT_PRUNING = PruneSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What server and clients both know about a run."""

    layers: LayerMap
    pruning: PruneSettings = DEFAULT_PRUNING
    compression: UploadSettings = UNCOMPRESSED
    download: DownloadSettings = PLAIN_DOWNLOAD
    hooks: Hooks = NO_HOOKS  # what the method adds to local training
    objective: Objective = CLASSIFICATION  # what is minimised, and what models are scored by
    seed: int = 0
    rounds: int = 30  # T
    # whether clients store layers that they trained and did not upload, to continue from them
    continues: bool = False
    adapter: AdapterSettings = NO_ADAPTER


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContext:
    """What all clients of a run share.

    Args:
        spec: what the server knows too.
        net: a scratch network to compute with; between two tasks its values have no meaning.
        data: all samples; a `Shard` has the indices of one client's samples.
        local: how a client trains.
        initial: W_0, from which personal layers start.
        device: where clients compute.
        stacked: clients train stacked, as one computation; only for small MLPs.
        steps: where batches and gradients come from; LDP has another source than plain SGD.
    """

    spec: RunSpec
    net: nn.Module
    data: Dataset
    local: LocalSettings
    initial: Params
    device: str = "cpu"
    stacked: bool = False
    steps: StepSource = PLAIN_STEPS

    @property
    def layers(self) -> LayerMap:
        """The layers of `net`."""
        return self.spec.layers

    @property
    def pruning(self) -> PruneSettings:
        """How layers outside L_i are pruned."""
        return self.spec.pruning

    @property
    def hooks(self) -> Hooks:
        """What the method adds to local training."""
        return self.spec.hooks

    @property
    def objective(self) -> Objective:
        """What clients minimise, and what models are scored by."""
        return self.spec.objective

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.spec.seed


def shrink_context(context: ClientContext, units: Mapping[Group, Tensor]) -> ClientContext:
    """The context of the smaller network that has only these units."""
    if not units:
        return context
    counts = shrinking.counts_of(units)
    net = shrinking.small_net(context.net, context.layers, counts)
    shrinking.load_frozen(net, context.net, units, context.layers)
    layers = shrinking.shrink_map(context.layers, counts)
    return replace(context, net=net, spec=replace(context.spec, layers=layers))
