"""Train one network over devices that cannot all hold, compute or upload it.

Start with `fedp3.run(model, data)` in Python, or with `fedp3 --help` on the command line.
The paper's algorithms are in `fedp3.server.rounds` (Algorithm 1), `fedp3.client.sgd` (Algorithm 2)
and `fedp3.server.aggregators` (Algorithm 3).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from fedp3.api import Plan as Plan
    from fedp3.api import load_config as load_config
    from fedp3.api import load_dataset as load_dataset
    from fedp3.api import make_config as make_config
    from fedp3.api import plan as plan
    from fedp3.api import register as register
    from fedp3.api import resume as resume
    from fedp3.api import run as run
    from fedp3.client.batching import LocalSettings as LocalSettings
    from fedp3.client.context import RunSpec as RunSpec
    from fedp3.client.hooks import Exchange as Exchange
    from fedp3.client.hooks import Hooks as Hooks
    from fedp3.client.hooks import LossInputs as LossInputs
    from fedp3.client.hooks import Pass as Pass
    from fedp3.client.objectives import Objective as Objective
    from fedp3.client.objectives import ratio as ratio
    from fedp3.config import Config as Config
    from fedp3.core.errors import ConfigError as ConfigError
    from fedp3.core.errors import FedP3Error as FedP3Error
    from fedp3.core.errors import InputError as InputError
    from fedp3.core.errors import RunError as RunError
    from fedp3.core.masks import as_bool as as_bool
    from fedp3.core.scores import Score as Score
    from fedp3.core.settings import RunSettings as RunSettings
    from fedp3.core.types import AcceptedUpdate as AcceptedUpdate
    from fedp3.core.types import ClientPlan as ClientPlan
    from fedp3.core.types import ClientUpdate as ClientUpdate
    from fedp3.core.types import LayerMap as LayerMap
    from fedp3.core.types import LayerPlan as LayerPlan
    from fedp3.core.types import Rejection as Rejection
    from fedp3.core.types import Task as Task
    from fedp3.data.catalogue import DataSettings as DataSettings
    from fedp3.data.dataset import Dataset as Dataset
    from fedp3.data.inputs import Batch as Batch
    from fedp3.data.partition import PartitionSettings as PartitionSettings
    from fedp3.data.user_data import from_tensors as from_tensors
    from fedp3.data.user_data import from_torch as from_torch
    from fedp3.messages.compression import DownloadSettings as DownloadSettings
    from fedp3.messages.compression import UploadSettings as UploadSettings
    from fedp3.messages.compressors import Compressor as Compressor
    from fedp3.methods.catalogue import Method as Method
    from fedp3.methods.hook_settings import HookSettings as HookSettings
    from fedp3.models.layer_map import layer_map as layer_map
    from fedp3.models.zoo import Architecture as Architecture
    from fedp3.models.zoo import ModelSettings as ModelSettings
    from fedp3.models.zoo import ModelSpec as ModelSpec
    from fedp3.planning.client_plans import PlanSettings as PlanSettings
    from fedp3.planning.prune_settings import LocalPruner as LocalPruner
    from fedp3.planning.prune_settings import PruneSettings as PruneSettings
    from fedp3.planning.prune_settings import Selector as Selector
    from fedp3.privacy.client_level.settings import ClientPrivacySettings as ClientPrivacySettings
    from fedp3.privacy.settings import PrivacySettings as PrivacySettings
    from fedp3.report.result import Result as Result
    from fedp3.runs.callbacks import Callback as Callback
    from fedp3.runs.callbacks import RunStart as RunStart
    from fedp3.runs.callbacks import log_to_mlflow as log_to_mlflow
    from fedp3.runs.callbacks import log_to_tensorboard as log_to_tensorboard
    from fedp3.runs.callbacks import log_to_wandb as log_to_wandb
    from fedp3.runs.callbacks import stop_after as stop_after
    from fedp3.runs.callbacks import stop_at as stop_at
    from fedp3.runs.callbacks import stop_early as stop_early
    from fedp3.runs.history import History as History
    from fedp3.server.aggregators import AggregateSettings as AggregateSettings
    from fedp3.server.aggregators import Aggregator as Aggregator
    from fedp3.server.aggregators import masked_mean as masked_mean
    from fedp3.server.aggregators import uploads_of as uploads_of
    from fedp3.server.aggregators import weighted_mean as weighted_mean
    from fedp3.server.context import RoundRecord as RoundRecord
    from fedp3.server.evaluation import Scores as Scores

_HOMES = {
    "fedp3.api": "Plan load_config load_dataset make_config plan register resume run",
    "fedp3.core.masks": "as_bool",
    "fedp3.client.batching": "LocalSettings",
    "fedp3.client.context": "RunSpec",
    "fedp3.client.hooks": "Exchange Hooks LossInputs Pass",
    "fedp3.client.objectives": "Objective ratio",
    "fedp3.config": "Config",
    "fedp3.core.errors": "ConfigError FedP3Error InputError RunError",
    "fedp3.core.scores": "Score",
    "fedp3.core.settings": "RunSettings",
    "fedp3.core.types": "AcceptedUpdate ClientPlan ClientUpdate LayerMap LayerPlan Rejection Task",
    "fedp3.data.catalogue": "DataSettings",
    "fedp3.data.dataset": "Dataset",
    "fedp3.data.inputs": "Batch",
    "fedp3.data.partition": "PartitionSettings",
    "fedp3.data.user_data": "from_tensors from_torch",
    "fedp3.messages.compression": "DownloadSettings UploadSettings",
    "fedp3.messages.compressors": "Compressor",
    "fedp3.methods.catalogue": "Method",
    "fedp3.methods.hook_settings": "HookSettings",
    "fedp3.models.layer_map": "layer_map",
    "fedp3.models.zoo": "Architecture ModelSettings ModelSpec",
    "fedp3.planning.client_plans": "PlanSettings",
    "fedp3.planning.prune_settings": "LocalPruner PruneSettings Selector",
    "fedp3.privacy.client_level.settings": "ClientPrivacySettings",
    "fedp3.privacy.settings": "PrivacySettings",
    "fedp3.report.result": "Result",
    "fedp3.runs.callbacks": "Callback RunStart log_to_mlflow log_to_tensorboard log_to_wandb "
    "stop_after stop_at stop_early",
    "fedp3.runs.history": "History",
    "fedp3.server.aggregators": "AggregateSettings Aggregator masked_mean uploads_of weighted_mean",
    "fedp3.server.context": "RoundRecord",
    "fedp3.server.evaluation": "Scores",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:  # so that torch is imported only when something needs it
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fedp3' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME_OF[name]), name)
