"""Residual blocks that are left out of a network, which then computes without them.

A block that is left out passes its input on unchanged.  This is not the block with weights of zero:
behind a sum, a post-norm block (BERT) normalises once more, and a pre-norm block takes as long as
before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fedp3.core.types import ClientPlan, LayerMap


def pass_on(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward pass of a block that is left out."""
    return x


class PassOn(nn.Module):
    """A block without tensors, which passes its input on."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The input."""
        return x


def blocks_left_out(plan: ClientPlan, layers: LayerMap) -> tuple[str, ...]:
    """The residual blocks that a plan skips entirely, by path."""
    return tuple(
        path
        for path, inside in layers.residual.items()
        if all(plan.layers[l].send == "skip" for l in inside)
    )


@contextmanager
def left_out(net: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Inside this context, the network computes without these blocks; it still has their tensors.

    Args:
        net: the network.
        blocks: paths of residual blocks.
    """
    modules = [net.get_submodule(path) for path in blocks]
    for m in modules:
        m.forward = pass_on
    try:
        yield
    finally:
        for m in modules:
            del m.forward  # the method of the class is there again


def skipped_blocks(net: nn.Module) -> tuple[str, ...]:
    """The blocks without which this network computes at present."""
    return tuple(path for path, m in net.named_modules() if vars(m).get("forward") is pass_on)


def without_blocks(net: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """The network without these blocks and their tensors; it is changed in place.

    Args:
        net: the network.
        blocks: paths of residual blocks.
    """
    for path in blocks:
        parent, _, name = path.rpartition(".")
        net.get_submodule(parent).register_module(name, PassOn())
    return net
