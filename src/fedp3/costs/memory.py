"""The memory that a client needs for a round: a training step, and its copy of the weights."""

from fedp3.client.context import ClientContext
from fedp3.client.optimizers import slots_of
from fedp3.core.types import ClientPlan
from fedp3.costs.compute import ComputeProfile, peak_bytes
from fedp3.costs.traffic import traffic
from fedp3.messages.versions import is_coded
from fedp3.privacy.mechanism import mechanism_of


def client_bytes(
    context: ClientContext, profile: ComputeProfile, plan: ClientPlan, rows: int
) -> int:
    """The peak memory of a client, in tensors.

    Args:
        context: what all clients share.
        profile: the FLOPs and memory of the network.
        plan: the client's plan.
        rows: the samples in a batch.
    """
    spec, slots = context.spec, slots_of(context.local)
    step = peak_bytes(profile, plan, spec.layers, spec.pruning, rows, slots, mechanism_of(context))
    if not is_coded(spec.download):
        return step
    # The next changes apply to what was sent, which training overwrites.
    return step + traffic(plan, spec.layers, spec.pruning, download=spec.download).copy
