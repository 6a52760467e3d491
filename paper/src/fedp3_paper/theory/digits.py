"""Problems on handwritten digits (8 x 8, part of scikit-learn).

Logistic regression has f_ij(w) = log(1 + exp(x'w)) - y x'w + lam sum_j w_j^2 / (1 + w_j^2), which
the regulariser makes nonconvex.  Since ||x|| <= 1, L_i <= lambda_max(X_i'X_i) / (4 m) + 2 lam, and
every sample's gradient is shorter than C = 1 + lam sqrt(d) 3 sqrt(3) / 8, without clipping.

The network has tanh layers 16-8-8-10 on 4 x 4 means of the digits, with cross-entropy.  It has no
global smoothness constant: L_i is the largest curvature around a gradient descent path, times a
margin.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedp3.core.errors import InputError
from fedp3_paper.theory.draws import Array, For, Ints, draw
from fedp3_paper.theory.problems import Problem, Samples, everywhere, gradient


@dataclass(frozen=True, slots=True)
class Split:
    """Digits dealt to n clients of m samples each."""

    x: Array  # (n, m, 64), centred, rows of norm 1
    y: Ints  # (n, m), the digit


def split_digits(seed: int, n: int, heterogeneity: float, most: int = 1797) -> Split:
    """Deal the digits to n clients in equal shares.

    Args:
        seed: the seed of the deal.
        n: the number of clients.
        heterogeneity: 0 deals at random, 1 in order of the digit.
        most: the largest number of samples per client.
    """
    from sklearn.datasets import load_digits

    if not 0 <= heterogeneity <= 1:
        raise InputError(f"digits: want heterogeneity in [0, 1], got {heterogeneity}")
    x, y = load_digits(return_X_y=True)
    x = x - x.mean(axis=0)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    noise = draw(seed, For.PROBLEM, 1).random(y.size)
    order = np.argsort(heterogeneity * y / 10 + (1 - heterogeneity) * noise, kind="stable")
    m = y.size // n
    dealt = order[: n * m].reshape(n, m)[:, :most]
    return Split(x=x[dealt], y=y[dealt].astype(np.int64))


# Half of the digits, chosen so that a few components separate them well from the others.
POSITIVE = (1, 4, 6, 7, 8)


def logistic(
    seed: int, n: int, heterogeneity: float, *, lam: float = 0.01, components: int = 64
) -> Problem:
    """Logistic regression: is the digit in POSITIVE?

    Args:
        seed: the seed of the deal.
        n: the number of clients.
        heterogeneity: 0 deals the digits at random, 1 in order of the digit.
        lam: the weight of the regulariser.
        components: the number of principal components that are the features.
    """
    split = split_digits(seed, n, heterogeneity)
    axes = np.linalg.svd(split.x.reshape(-1, split.x.shape[2]), full_matrices=False)[2][:components]
    x, y = split.x @ axes.T, np.isin(split.y, POSITIVE).astype(np.float64)
    m, d = x.shape[1:]

    def regulariser_grad(w: Array) -> Array:
        return np.asarray(2 * lam * w / np.square(1 + np.square(w)))

    def losses(w: Array) -> Array:
        z = np.einsum("nmd,rnd->rnm", x, w, optimize=True)
        fit = (np.logaddexp(0, z) - y * z).mean(axis=2)
        return np.asarray(fit + lam * (np.square(w) / (1 + np.square(w))).sum(axis=2))

    def grads(w: Array) -> Array:
        z = np.einsum("nmd,rnd->rnm", x, w, optimize=True)
        return np.asarray(
            np.einsum("rnm,nmd->rnd", sigmoid(z) - y, x, optimize=True) / m + regulariser_grad(w)
        )

    def sample_grads(w: Array, chosen: Ints) -> Array:
        i = np.arange(n)[:, None]
        xs = x[i, chosen]  # (R, n, b, d)
        residual = sigmoid(np.einsum("rnbd,rd->rnb", xs, w, optimize=True)) - y[i, chosen]
        return np.asarray(residual[..., None] * xs + regulariser_grad(w)[:, None, None, :])

    return Problem(
        name="logistic",
        losses=losses,
        grads=grads,
        smooth=np.linalg.eigvalsh(np.einsum("nma,nmb->nab", x, x) / (4 * m))[:, -1] + 2 * lam,
        lower=np.zeros(n),
        start=np.zeros(d),
        blocks=(1,) * d,
        samples=Samples(m=m, grads=sample_grads, bound=1 + lam * sqrt(d) * 3 * sqrt(3) / 8),
    )


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)); z is clipped to where the result is 0 or 1, lest exp overflow."""
    return np.asarray(1 / (1 + np.exp(-np.clip(z, -500, 500))))


WIDTHS = (16, 8, 8, 10)
LAYERS = tuple((a + 1) * b for a, b in pairwise(WIDTHS))


def network_loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy of the tanh network with flat parameters w on one client's samples."""
    parts = torch.split(w, list(LAYERS))
    for l, (a, b) in enumerate(pairwise(WIDTHS)):
        W = parts[l].reshape(a + 1, b)
        x = x @ W[:-1] + W[-1]
        x = torch.tanh(x) if l + 1 < len(parts) else x
    return torch.nn.functional.cross_entropy(x, y)


def network(seed: int, n: int, heterogeneity: float, margin: float = 1.5) -> Problem:
    """The small network; its blocks are its three layers, weights and biases together."""
    split = split_digits(seed, n, heterogeneity, most=40)
    pooled = (
        split.x.reshape(*split.x.shape[:2], 4, 2, 4, 2)
        .mean(axis=(3, 5))
        .reshape(*split.x.shape[:2], 16)
    )
    x, y = torch.from_numpy(8 * pooled), torch.from_numpy(split.y)
    client_losses = vmap(vmap(network_loss), in_dims=(0, None, None))
    slopes = vmap(vmap(grad(network_loss)), in_dims=(0, None, None))
    sample_slopes = vmap(vmap(vmap(grad(network_loss), in_dims=(None, 0, 0)), in_dims=(None, 0, 0)))

    def losses(w: Array) -> Array:
        return np.asarray(client_losses(torch.tensor(w), x, y))

    def grads(w: Array) -> Array:
        return np.asarray(slopes(torch.tensor(w), x, y))

    def sample_grads(w: Array, chosen: Ints) -> Array:
        i, j = torch.arange(n)[:, None], torch.tensor(chosen)
        return np.asarray(sample_slopes(torch.tensor(w), x[i, j][..., None, :], y[i, j][..., None]))

    scale = np.concatenate([np.full((a + 1) * b, a**-0.5) for a, b in pairwise(WIDTHS)])
    start = scale * draw(seed, For.PROBLEM, 2).standard_normal(scale.size)
    rough = Problem(
        name="network",
        losses=losses,
        grads=grads,
        smooth=np.ones(n),
        lower=np.zeros(n),
        start=start,
        blocks=LAYERS,
        samples=Samples(m=x.shape[1], grads=sample_grads, bound=float("inf")),
    )
    return replace(rough, smooth=margin * path_curvature(rough, seed))


def path_curvature(problem: Problem, seed: int, steps: int = 60, gamma: float = 0.5) -> Array:
    """The largest |curvature| of each f_i at ten points of a gradient descent path, (n,)."""
    w = problem.start[None]
    points = [w]
    for k in range(1, steps):
        w = w - gamma * gradient(problem, w)
        if k % (steps // 9) == 0:
            points.append(w)
    path = everywhere(problem, np.concatenate(points))
    return np.asarray(curvature(problem.grads, path, seed).max(axis=0))


def curvature(grads: Callable[[Array], Array], w: Array, seed: int, rounds: int = 30) -> Array:
    """The largest |eigenvalue| of every client's Hessian at w (R, n, d), as (R, n).

    It is found by power iteration on differences of gradients.
    """
    step = 1e-4
    v = draw(seed, For.VECTORS, 9).standard_normal(w.shape)
    size = np.zeros(w.shape[:2])
    for _ in range(rounds):
        v = v / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-30)
        v = (grads(w + step * v) - grads(w - step * v)) / (2 * step)
        size = np.linalg.norm(v, axis=-1)
    return np.asarray(size)
