"""The order in which an epoch reads its packs: what a step holds, and which rank reads what, by modelled cost.

The ranks of a micro-batch wait for the slowest of them, and packs with equally many tokens differ in attention by
an order of magnitude. A window of 16 optimizer steps is sorted by cost and cut into steps, so that the packs of a
step are alike. Within a step, packs of similar cost share a micro-batch. With one pack a rank,
no other grouping of a window's packs makes ranks wait less: the most expensive packs of n micro-batches cost at
least as much as every dp-th of the sorted packs.

    8 shuffled packs with costs 5 1 4 8 2 7 3 6, 2 packs a step, one window  ->  steps (5 6) (1 2) (7 8) (3 4)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .plan import Packing

LINEAR_COST = 55_000
"""What a token costs besides attention, in units of ℓ²: 6 · parameters / (6 · layers · heads · head_dim).

The backward pass included, a token costs 6 · parameters FLOPs, and causal attention over a document of ℓ tokens
6 · layers · heads · head_dim · ℓ². For a model of 8 billion parameters, 36 layers and 32 heads of 128 the quotient
is 54,000. Training takes that of its model, `longctx.training.dataset.linear_cost`.
"""

WINDOW_STEPS = 16
"""Optimizer steps that are sorted together: the fewer, the closer to a plain shuffle; the more, the better balanced."""


def pack_costs(packing: Packing, lengths: NDArray[np.integer], linear_cost: float = LINEAR_COST) -> NDArray[np.float64]:
    """Return the modelled cost of each pack, T · linear_cost + Σ ℓ² over its pieces of ℓ tokens, float64 [n_packs].

    Args:
        packing: the plan.
        lengths: tokens of each document, integers [n_documents].
        linear_cost: cost of a token besides attention, in units of ℓ².
    """
    pieces = packing.piece_lengths(lengths).astype(np.float64)
    sums = np.concatenate(([0.0], np.cumsum(pieces * (linear_cost + pieces))))
    return np.diff(sums[packing.offsets])


def shuffled_order(num_packs: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return every pack once, int64 [num_packs], in an order that depends on the seed and the epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_packs)


def balanced_order(
    costs: NDArray[np.floating], packs_per_step: int, *, seed: int, epoch: int, window_steps: int = WINDOW_STEPS
) -> NDArray[np.int64]:
    """Return every pack once, int64 [n_packs]: optimizer step i takes the i-th `packs_per_step` of them.

    The packs are shuffled and cut into windows of `window_steps` steps; each window is sorted by cost, and its steps
    are shuffled. So a step holds the same packs however it is spread over ranks and accumulation. Packs that do not
    fill a step come last. They are a random part of the last window, neither its cheapest nor its most expensive packs.

    Args:
        costs: of each pack, [n_packs].
        packs_per_step: micro-batch size × data-parallel ranks × accumulation steps.
        seed, epoch: of the shuffles.
        window_steps: optimizer steps that are sorted together.
    """
    order = shuffled_order(len(costs), seed=seed, epoch=epoch)
    rng = np.random.default_rng((seed, epoch, packs_per_step))
    window = window_steps * packs_per_step
    parts = [
        _arrange(order[start : start + window], costs, packs_per_step, rng) for start in range(0, len(order), window)
    ]
    return np.concatenate(parts) if parts else order


def _arrange(
    packs: NDArray[np.int64], costs: NDArray[np.floating], packs_per_step: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Sort one window by cost and shuffle its steps, with an incomplete step last."""
    packs = packs[np.argsort(costs[packs], kind="stable")]
    full, rest = divmod(len(packs), packs_per_step)
    first = packs_per_step * int(rng.integers(full + 1))
    incomplete = packs[first : first + rest]
    steps = np.delete(packs, np.s_[first : first + rest]).reshape(full, packs_per_step)
    return np.concatenate((rng.permutation(steps).ravel(), incomplete))


def spread_step(
    packs: NDArray[np.int64], costs: NDArray[np.floating], *, micro_batch_size: int, dp: int
) -> list[list[NDArray[np.int64]]]:
    """Return the packs of one optimizer step by micro-batch and data-parallel rank: result[micro_batch][dp_rank].

    The packs are sorted by cost and cut into micro-batches. In each, the most expensive packs go one to a rank, the
    next ones in the opposite direction, and so on, so that ranks with several packs have equal work.

        costs 1 2 3 4 5 6 7 8, micro_batch_size 2, dp 2  ->  [[4 1] [3 2]]  [[8 5] [7 6]]

    Args:
        packs: int64, at most accumulation steps × dp × micro_batch_size of them.
        costs: of each pack of the data set.
    """
    packs = packs[np.argsort(costs[packs], kind="stable")]
    size = micro_batch_size * dp
    return [_deal(packs[start : start + size][::-1], dp) for start in range(0, len(packs), size)]


def _deal(packs: NDArray[np.int64], dp: int) -> list[NDArray[np.int64]]:
    """Deal packs to ranks like cards, forwards and backwards in turn."""
    positions = np.arange(len(packs))
    ranks = positions % dp
    ranks = np.where(positions // dp % 2, dp - 1 - ranks, ranks)
    return [packs[ranks == rank] for rank in range(dp)]
