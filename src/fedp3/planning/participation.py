"""The participants C_t of a round (Alg. 1, l. 4)."""

from collections.abc import Callable, Mapping, Sequence

import torch

from fedp3.core.randomness import Stream, stream
from fedp3.core.settings import RunSettings

# (client, round) -> whether the client's privacy budget allows one more task
CanPay = Callable[[int, int], bool]


def eligible_clients(
    examples: Mapping[int, int], t: int, can_pay: CanPay | None = None
) -> list[int]:
    """Clients that have training samples and, under LDP, budget for one more task.

    Args:
        examples: the number of training samples of each client.
        t: the round, from 0.
        can_pay: whether a client's privacy budget allows one more task; None without LDP.
    """
    clients = [i for i in sorted(examples) if examples[i] > 0]
    if can_pay is None:
        return clients
    return [i for i in clients if can_pay(i, t)]


def sample_clients(eligible: Sequence[int], settings: RunSettings, t: int) -> list[int]:
    """The participants of round t, in ascending order."""
    size = settings.clients_per_round or len(eligible)
    order = torch.randperm(len(eligible), generator=stream(settings.seed, Stream.SAMPLE, t))
    return sorted(eligible[j] for j in order[:size].tolist())
