"""A private step against the plain step, and against Opacus' ghost clipping.

Network, batch, clip and noise are the same.  Ours and the plain step use the memory layout of a
run, Opacus that in which PyTorch makes the network.
"""

import copy
import warnings
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ratio import Work, compare, shown
from fedp3.client.batching import LocalSettings
from fedp3.models.zoo import ModelSettings, ModelSpec, build, channels_last
from fedp3.privacy.mechanism import private_gradient
from fedp3.privacy.settings import Mechanism

BATCH, LR = 48, 1e-3


def plain_step(net: nn.Module, x: Tensor, y: Tensor) -> Work:
    """One SGD step without privacy."""
    W = [w for w in net.parameters() if w.requires_grad]

    def step() -> None:
        grads = torch.autograd.grad(F.cross_entropy(net(x), y), W)
        with torch.no_grad():
            torch._foreach_add_(W, list(grads), alpha=-LR)

    return step


def private_step(net: nn.Module, x: Tensor, y: Tensor, ghost: bool = True) -> Work:
    """One private step of ours, with ghost clipping or by torch.func."""
    W = {n: w for n, w in net.named_parameters() if w.requires_grad}
    gradient = private_gradient(
        Mechanism(clip=1.0, noise_multiplier=1.0, sample_rate=0.1, ghost=ghost),
        LocalSettings(batch=BATCH),
        10 * BATCH,
        0,
        0,
        0,
    )

    def step() -> None:
        grads = gradient(net, x, y, W, {})[1]
        with torch.no_grad():
            torch._foreach_add_(list(W.values()), grads, alpha=-LR)

    return step


def opacus_step(net: nn.Module, x: Tensor, y: Tensor) -> Work:
    """One private step of Opacus with ghost clipping."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, use_ghost_clipping=True)
    sgd = torch.optim.SGD([w for w in net.parameters() if w.requires_grad], lr=LR)
    optimizer = DPOptimizerFastGradientClipping(
        sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=BATCH
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        with warnings.catch_warnings(action="ignore"):
            optimizer.zero_grad()
            criterion(wrapped(x), y).backward()
            optimizer.step()

    return step


def network(model: str, width: float = 1.0) -> tuple[nn.Module, Tensor, Tensor]:
    """An "mlp" or a "cnn", with a batch of records and their labels."""
    shape = {"mlp": (1, 28, 28), "cnn": (3, 32, 32)}[model]
    net = build(ModelSpec(shape, 10, ModelSettings(name=model, width=width)), 0)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(BATCH, *shape, generator=rng), torch.randint(10, (BATCH,), generator=rng)
    return net, x, y


def pair(
    model: str, layers: tuple[str, ...], reference: Callable[[nn.Module, Tensor, Tensor], Work]
) -> tuple[Work, Work]:
    """Ours and a reference on copies of one network.

    Args:
        model: "mlp" or "cnn".
        layers: the layers that train; empty means all.
        reference: makes the step that ours is compared with.
    """
    net, x, y = network(model)
    for n, w in net.named_parameters():
        w.requires_grad_(not layers or n.partition(".")[0] in layers)
    theirs = copy.deepcopy(net) if reference is opacus_step else channels_last(copy.deepcopy(net))
    return private_step(channels_last(net), x, y), reference(theirs, x, y)


def line(model: str, *layers: str) -> Callable[[int], str]:
    """A row of the table: our private step against both references."""

    def measured(pairs: int) -> str:
        plain, theirs = (
            compare(*pair(model, layers, step), pairs) for step in (plain_step, opacus_step)
        )
        return f"{shown(plain)} of the plain step, {shown(theirs)} of Opacus' ghost clipping"

    return measured


def overflowing(pairs: int) -> str:
    """A row: a step in which one record's gradient is not finite, against a step without it."""
    texts = []
    for name, model, width, ghost in (
        ("MLP", "mlp", 1.0, True),
        ("CNN", "cnn", 1.0, True),
        ("MLP by torch.func", "mlp", 0.25, False),
    ):
        net, x, y = network(model, width)
        broken = x.clone()
        broken[BATCH // 2] = torch.inf
        nets = (channels_last(copy.deepcopy(net)) for _ in range(2))
        ratio = compare(*(private_step(next(nets), w, y, ghost) for w in (broken, x)), pairs)
        texts.append(f"{name} {shown(ratio)}")
    return ", ".join(texts)


ROWS: Mapping[str, Callable[[int], str]] = {
    "P1 private step, MLP 784-1024x3-10": line("mlp"),
    "P2 private step, MLP, fc2 and head": line("mlp", "fc2", "ffc"),
    "P3 private step, CNN 3x32x32": line("cnn"),
    "P4 private step, CNN, conv2 and head": line("cnn", "conv2", "ffc"),
    "P5 private step with a record that overflows, of one without": overflowing,
}
