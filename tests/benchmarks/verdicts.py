"""Compute the difference between two arms that several seeds ran and that answer the same prompts, its 95 %
interval, and the verdict on a claim.

A table of differences has a row per seed s and a column per prompt p:

    d_sp = mean + seed_s + prompt_p + residual_sp
    Var(mean of d) = Var(means of seeds) / S + Var(means of prompts) / P - Var(residual) / (S P)

because both variances of means contain the residual, which would otherwise count twice. The interval by prompts alone
(each a cluster, its seeds' mean inside) has the second term only; the wider of the two is taken. Three or
four seeds say little about their variance, so that part is pooled over all arms of a group: an arm's seed means
have a part that all arms of a seed share (the first policy, and the luck of its answers) and a part of their own.
Where arms differ in how much their seeds vary, pooling misleads. So there is another interval that pools nothing,
Difference.own, and a verdict is on with_own_seeds.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import torch

T = {  # degrees of freedom: the 97.5 % quantile of Student's t
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 15: 2.131, 20: 2.086,
    30: 2.042, 60: 2.000, 120: 1.980, math.inf: 1.960,
}  # fmt: skip
POWER = 0.842  # the normal distribution's 80 % quantile
VERDICTS = ("holds", "opposite", "no difference", "inconclusive")


class Difference(NamedTuple):
    mean: float
    low: float
    """Ends of the 95 % interval."""
    high: float
    seen: float
    """The true difference that the interval would separate from 0 with a probability of 80 %, if its width were certain;
    with two seeds in 71 % of cases, with five in 77 %, with ten in 79 %."""
    by_seed: list[float]
    own: tuple[float, float, float]
    """low, high and seen from the two compared arms alone."""


def quantile(df: float) -> float:
    """The 97.5 % quantile of Student's t with df degrees of freedom, 1 or more: T, linear in 1 / df between
    its entries, at most 3 % too large from 2 on."""
    below = max(n for n in T if n <= df)
    above = min(n for n in T if n >= df)
    if below == above:
        return T[below]
    share = (1 / below - 1 / df) / (1 / below - 1 / above)
    return (1 - share) * T[below] + share * T[above]


def seed_variances(arms: torch.Tensor, first: torch.Tensor) -> tuple[float, float]:
    """(variance over seeds of the arms' mean gain, variance of one arm's seed mean about the arms' mean,
    pooled over the arms: the interaction's mean square). arms: (arms, seeds, prompts); first: (seeds,
    prompts)."""
    gains = (arms - first).mean(-1)  # (arms, seeds)
    shared = gains.mean(0)
    n_arms, n_seeds = gains.shape
    residual = gains - shared - gains.mean(1, keepdim=True) + gains.mean()
    of_arm = residual.square().sum() / max(1, (n_arms - 1) * (n_seeds - 1))
    return shared.var().item(), of_arm.item()


def difference(weights: torch.Tensor, arms: torch.Tensor, first: torch.Tensor) -> Difference:
    """Weigh the arms and subtract the first policy times the sum of the weights: mean, and the wider of the module's
    two intervals. weights: (arms, seeds), 1 and -1 for arm over arm, a single 1 for arm over first, and shares of
    two arms for a point between them on a curve. arms: (arms, seeds, prompts); first: (seeds,
    prompts), any numbers if no arm is compared with it. Raises ValueError if a number is not finite, or if there is
    only one."""
    table = torch.einsum("as,asp->sp", weights, arms) - weights.sum(0)[:, None] * first
    if not arms.isfinite().all() or not table.isfinite().all() or table.numel() < 2:
        raise ValueError(f"no interval from {table.numel()} numbers, or from some that are not finite")
    low, high, seen = ends(weights, arms, first, table)
    own = ends(torch.ones_like(weights[:1]), table[None], torch.zeros_like(table), table)  # as if it were an only arm
    return Difference(table.mean().item(), low, high, seen, table.mean(1).tolist(), own)


def ends(weights, arms, first, table) -> tuple[float, float, float]:
    """low, high and seen of difference, whose weighted numbers are in `table`, (seeds, prompts)."""
    total = weights.sum(0).mean().item()  # 1 over the first policy, 0 between arms
    n_arms, n_seeds, n_prompts = arms.shape
    mean = table.mean().item()
    prompts = table.mean(0).var().item() / n_prompts if n_prompts > 1 else 0.0
    terms = [(prompts, n_prompts - 1)]  # (variance, degrees of freedom)
    counted_twice = 0.0
    if n_seeds > 1:
        shared, of_arm = seed_variances(arms, first)
        squares = weights.square().sum(0).mean().item()
        terms.append((total**2 * shared / n_seeds, n_seeds - 1))
        terms.append(((squares - total**2 / n_arms) * of_arm / n_seeds, (n_arms - 1) * (n_seeds - 1)))
        residual = table - table.mean(1, keepdim=True) - table.mean(0) + mean
        counted_twice = residual.square().sum().item() / max(1, (n_seeds - 1) * (n_prompts - 1))
        counted_twice /= n_seeds * n_prompts
    seeds = sum(variance for variance, _ in terms[1:])
    variance = max(prompts + seeds - counted_twice, prompts, seeds)
    squared = sum(part**2 / df for part, df in terms if df and part)  # Satterthwaite's
    df = max(1.0, variance**2 / squared) if squared else math.inf
    ways = [(quantile(df), math.sqrt(variance)), (quantile(max(1, n_prompts - 1)), math.sqrt(prompts))]
    t, error = max(ways, key=math.prod)
    return mean - t * error, mean + t * error, (t + POWER) * error


def of_seeds(values: list[float]) -> Difference:
    """The mean of a number that two seeds or more have, with Student's interval by their own spread: the luck of the
    prompts, which all seeds share, is not included."""
    arms = torch.tensor(values, dtype=torch.float64)[None, :, None]
    return difference(torch.ones_like(arms[..., 0]), arms, torch.zeros_like(arms[0]))


def with_own_seeds(x: Difference) -> Difference:
    """Widen a difference to both of its intervals: the one pooled over the arms of a group, and `own`. A verdict stands
    only if both give it, because arms of a group may differ in how much seeds vary."""
    low, high, seen = x.own
    return x._replace(low=min(x.low, low), high=max(x.high, high), seen=max(x.seen, seen))


def at_kl(kl: torch.Tensor, level: float | torch.Tensor) -> torch.Tensor | None:
    """Weights of a curve's arms, (arms, seeds), that give its value at a KL of `level` by interpolation between two
    neighbours, linear in log KL; None if in some seed no two neighbours lie on both sides of it. Where a curve folds
    back and has several values there, the first one counts. kl: (arms, seeds), nats; arms by strength, the weakest
    penalty first. level: nats, or (seeds,)."""
    weights = torch.zeros_like(kl)
    levels = torch.as_tensor(level, dtype=kl.dtype).expand(kl.shape[1])
    for seed, (column, x) in enumerate(zip(kl.T.tolist(), levels.tolist())):
        neighbours = [sorted(pair, key=column.__getitem__) for pair in pairwise(range(len(column)))]
        around = [(below, above) for below, above in neighbours if 0 < column[below] <= x <= column[above]]
        if not around:
            return None
        below, above = around[0]
        span = math.log(column[above] / column[below])
        share = math.log(x / column[below]) / span if span else 0.0
        weights[below, seed] = 1 - share
        weights[above, seed] = share
    return weights


def verdict(low: float, high: float, says: str, margin: float) -> str:
    """One of VERDICTS on a claim, from the interval of the difference. says: "more", "less", or "no less",
    which holds if the interval is above -margin, or "no more", if it is below margin."""
    if says == "no more":
        return verdict(-high, -low, "no less", margin)
    if says == "no less":
        return "holds" if low > -margin else "opposite" if high < -margin else "inconclusive"
    if low > 0 or high < 0:
        return "holds" if (low > 0) == (says == "more") else "opposite"
    return "no difference" if -margin <= low and high <= margin else "inconclusive"
