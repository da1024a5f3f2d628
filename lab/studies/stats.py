"""Intervals of means, and how well gradients of batches point where a reference does.

    half_width(values)     half of a mean's interval, by Student's t
    gain_of_cosine(...)    cosines with the reference less the usual gradients', with an interval
    signal_to_noise(...)   |mean|^2 over the variance, without bias
    cosine_of_means(...)   the cosine of two expected gradients, without bias

Gradients are (N, K): N batches of K numbers. The first arm of a test is `grpo`, whose gradients are
the usual ones.
"""

import math

import pandas as pd
import torch
from scipy import stats
from torch import Tensor


def half_width(values: pd.Series, level: float = 0.9) -> float:
    """Half the width of a mean's interval by Student's t; NaN for one value, or with a NaN."""
    quantile = stats.t.ppf((1 + level) / 2, len(values) - 1)
    return float(quantile * values.sem(skipna=False))


def gain_of_cosine(batches: Tensor, usual: Tensor, references: Tensor) -> tuple[float, float]:
    """How much larger cosines with the mean reference are than the usual ones, and its half-width.

    Gradients are (N, K), (N, K) and (M, K). The half-width of the 90% interval has the noise of the
    N batches and, by the jackknife, of the M references.
    """
    differences = gaps(batches, usual, references.mean(0))  # (N,)
    count = len(references)
    without_one = (references.sum(0) - references) / (count - 1)  # (M, K)
    estimates = gaps(batches, usual, without_one).mean(0)  # (M,)
    of_reference = (count - 1) / math.sqrt(count) * estimates.std().item()
    quantile = stats.t.ppf(0.95, min(count, len(batches)) - 1)
    half = math.hypot(half_width(pd.Series(differences)), quantile * of_reference)
    return differences.mean().item(), half


def gaps(batches: Tensor, usual: Tensor, references: Tensor) -> Tensor:
    """The cosines of gradients less those of the usual ones (N, ...)."""
    return cosines(batches, references) - cosines(usual, references)


def cosines(batches: Tensor, references: Tensor) -> Tensor:
    """The cosines of gradients (N, K) with one reference (K,) or several (M, K): (N,) or (N, M)."""
    ours = torch.nn.functional.normalize(batches.double(), dim=-1)
    others = torch.nn.functional.normalize(references.double(), dim=-1)
    return torch.einsum("nk,...k->n...", ours, others)


def product_of_means(ours: Tensor, others: Tensor) -> float:
    """The dot product of two expected gradients, from products of different batches (N, K)."""
    a = ours.double()
    b = others.double()
    products = a.sum(0) @ b.sum(0) - (a * b).sum()
    return products.item() / (len(a) * (len(a) - 1))


def signal_to_noise(batches: Tensor) -> float:
    """|mean|^2 over the variance of one batch's gradient (N, K), both without bias."""
    return product_of_means(batches, batches) / batches.double().var(0).sum().item()


def cosine_of_means(ours: Tensor, others: Tensor) -> float:
    """The cosine of two expected gradients; NaN where noise hides one of them."""
    squares = product_of_means(ours, ours), product_of_means(others, others)
    if min(squares) <= 0:
        return math.nan
    return product_of_means(ours, others) / math.sqrt(squares[0] * squares[1])
