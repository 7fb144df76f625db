"""How evenly data-parallel ranks work: modelled cost of the dearest rank over the mean, in random and balanced order.

    python -m benchmarks.balance

Cost of a pack: T · 55,000 + Σ ℓ² over its documents (longctx.packing.balance). One pack a rank and micro-batch.
"time" is Σ max / Σ mean over the micro-batches of an epoch, what waiting adds to its length; "mean", "p90" and
"max" are of max / mean over optimizer steps; "no less" is what the dearest pack of a window makes of "max" in any
order of its packs: beside it stand at best the dp - 1 next ones. Documents longer than L are cut to L.
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from longctx.packing import balanced_order, pack, pack_costs, shuffled_order, spread_step
from longctx.packing.balance import WINDOW_STEPS

from .packing import DISTRIBUTIONS, device, line

HEADER = ["L", "lengths", "packs", "dp", "accumulation", "order", "time", "mean", "p90", "max", "no less"]


def step_ratios(costs: NDArray[np.floating], order: NDArray[np.int64], dp: int, accumulation: int) -> tuple[float, ...]:
    """(Σ max / Σ mean, then mean, p90 and max over steps) of an order that `spread_step` need not rearrange."""
    steps = len(order) // (dp * accumulation)
    ranks = costs[order[: steps * dp * accumulation]].reshape(steps, accumulation, dp)
    dearest, mean = ranks.max(-1).sum(-1), ranks.mean(-1).sum(-1)
    ratio = dearest / mean
    return dearest.sum() / mean.sum(), ratio.mean(), float(np.quantile(ratio, 0.9)), ratio.max()


def side_by_side(
    costs: NDArray[np.floating], order: NDArray[np.int64], dp: int, accumulation: int
) -> NDArray[np.int64]:
    """The order with each step spread over micro-batches and ranks as training does it."""
    size = dp * accumulation
    steps = [order[start : start + size] for start in range(0, len(order), size)]
    spread = [spread_step(step, costs, micro_batch_size=1, dp=dp) for step in steps]
    return np.concatenate([rank for step in spread for ranks in step for rank in ranks])


def least_worst(costs: NDArray[np.floating], dp: int, seed: int) -> float:
    """The dearest step's max / mean that no order within windows gets below, without accumulation."""
    shuffled = costs[shuffled_order(len(costs), seed=seed, epoch=0)]
    size = dp * WINDOW_STEPS
    windows = -np.sort(-shuffled[: len(shuffled) // size * size].reshape(-1, size), axis=1)
    return float((windows[:, 0] / windows[:, :dp].mean(1)).max())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--lengths", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS))
    parser.add_argument("--capacity", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    print(f"{device()}; Python {platform.python_version()}, numpy {version('numpy')}\n")
    print(line(HEADER), line(["---"] * len(HEADER)), sep="\n", flush=True)
    for capacity in options.capacity:
        for name in options.lengths:
            rng = np.random.default_rng([options.documents, capacity])
            lengths = np.minimum(DISTRIBUTIONS[name](rng, options.documents, capacity), capacity)
            costs = pack_costs(pack(lengths, capacity), lengths)
            for dp in options.dp:
                for accumulation in options.accumulation:
                    orders = {
                        "random": shuffled_order(len(costs), seed=options.seed, epoch=0),
                        "balanced": side_by_side(
                            costs,
                            balanced_order(costs, dp * accumulation, seed=options.seed, epoch=0),
                            dp,
                            accumulation,
                        ),
                    }
                    for kind, order in orders.items():
                        ratios = [f"{value:.3f}" for value in step_ratios(costs, order, dp, accumulation)]
                        can_be_seen = kind == "balanced" and accumulation == 1
                        ratios.append(f"{least_worst(costs, dp, options.seed):.3f}" if can_be_seen else "")
                        case = [f"{capacity:,}", name, f"{len(costs):,}", str(dp), str(accumulation), kind]
                        print(line([*case, *ratios]), flush=True)


if __name__ == "__main__":
    main()
