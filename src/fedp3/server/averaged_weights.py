"""The mean of the server's weights over rounds (Polyak averaging).

Clients train from W.  With `aggregate.average = N`, the model that is scored and exported is

    A_1 = W_1,   A_t = A_{t-1} + (W_t - A_{t-1}) / min(t, N)

which is the mean of the first N rounds, and from then on one in which older rounds count less and
less.  Where layers are trained in turn, N is best a multiple of their period.  N = 1 is W itself.
Running statistics are averaged like weights.
"""

from torch import Tensor

from fedp3.core.types import Params


def next_average(average: Params | None, W: Params, rounds: int, most: int) -> Params | None:
    """The average after one more round; None if the model is W itself.

    Args:
        average: after the round before; None before the first.
        W: the server's new weights.
        rounds: the number of finished rounds, this one included.
        most: N.
    """
    if most == 1:
        return None
    if average is None:
        return {n: w.clone() for n, w in W.items()}
    share = 1 / min(rounds, most)
    return {n: _towards(average[n], w, share) for n, w in W.items()}


def _towards(a: Tensor, w: Tensor, share: float) -> Tensor:
    before = a.double()
    return (before + share * (w.double() - before)).to(w.dtype)
