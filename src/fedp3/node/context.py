"""What a node trains with, and the fields of a message besides its task."""

from dataclasses import dataclass

from fedp3.client.context import ClientContext
from fedp3.config import Config
from fedp3.data.shards import Shard
from fedp3.node.permits import Permit
from fedp3.privacy.settings import Mechanism


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """What a node trains with.

    Args:
        client: which client it is.
        config: the run's config; the server's must have the same digest.
        context: network, data and settings, without a mechanism: the noise comes with each task.
        shard: its records, as the config splits them.
        ghost: under LDP, whether ghost clipping covers this network.
    """

    client: int
    config: Config
    context: ClientContext
    shard: Shard
    ghost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The fields of a message besides its task.

    Args:
        run: names the run on the node's disk.
        mechanism: what the server resolved the privacy settings to; None without LDP.
        permit: the permission of a run owner.
        bytes: the size of the task.
    """

    run: str
    mechanism: Mechanism | None = None
    permit: Permit | None = None
    bytes: int = 0
