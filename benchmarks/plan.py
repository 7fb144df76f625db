"""The ring planner against other ways to spread packed documents over ranks.

    python -m benchmarks.plan                    # all tables, 200 packs each where there are as many tokens
    python -m benchmarks.plan --packs 20         # quicker

Lengths are drawn from benchmarks/data/document_lengths.csv (a bin by its weight, then a length uniformly in
it), cut to the cap, packed best fit decreasing; the padding that closes a pack counts as a document.

- *imbalance*: attention work (legal query-key pairs of a rank's queries), largest rank over mean.
- *K/V*: K/V tokens sent over the p2p ring, over those of a full gather, T(P-1). For `plan_ring` what its
  prefixes send; for the others what would do if each token travelled exactly as far as it is needed (a ring
  without a plan sends everything, 1.00).
- *runs*: maximal contiguous ranges of original tokens on a rank, mean over ranks and packs, and largest.
- *padding*: tokens added because documents must be divisible by 2P, over all tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longctx.packing import pack
from longctx.ring.planner import plan_ring

from . import page
from .packing import bins_of_lengths, histogram

WORLD_SIZES = (2, 4, 8, 16, 32, 64)
CAPACITIES = (16384, 32768, 65536, 131072, 262144, 524288, 1048576)
CAPS = (4096, 8192, 16384, 32768, 65536)

Ints = NDArray[np.int64]


def draw_packs(capacity: int, cap: int, num_packs: int, seed: int = 0) -> list[Ints]:
    """Document lengths of about `num_packs` packs; every pack sums to `capacity`."""
    rng = np.random.default_rng(seed)
    low, high, weight = bins_of_lengths()
    mean = float((np.minimum((low + high) / 2, cap) * weight).sum() / weight.sum())
    lengths = np.minimum(histogram(rng, int(1.5 * num_packs * capacity / mean) + 1000, cap), cap)
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), num_packs * capacity * 0.999)))]
    packs = [lengths[np.asarray(documents)] for documents in pack(lengths, capacity).bins]
    return [np.append(p, capacity - p.sum()) if p.sum() < capacity else p for p in packs]


@dataclass(frozen=True)
class Layout:
    """Which rank owns which token."""

    lengths: Ints
    """int64 [n]: documents, with any padding an arrangement needs."""
    permutation: Ints
    """int64 [T]: sharded = tokens[permutation], ranks own equal slices."""
    kv_fraction: float
    padding: int = 0
    """Tokens added to the documents."""


def arrange_plan_ring(lengths: Ints, world_size: int) -> Layout:
    plan = plan_ring(np.append(0, np.cumsum(lengths)), world_size)
    return Layout(lengths, plan.permutation, plan.kv_tokens_sent / (plan.num_tokens * max(1, world_size - 1)))


def arrange_contiguous(lengths: Ints, world_size: int) -> Layout:
    permutation = np.arange(lengths.sum())
    return Layout(lengths, permutation, needed_fraction(lengths, permutation, world_size))


def zigzag_order(num_tokens: int, world_size: int) -> Ints:
    """int64 [2P, pieces' tokens] flattened: pieces r and 2P-1-r for r = 0..P-1."""
    pieces = np.arange(num_tokens).reshape(2 * world_size, -1)
    return np.stack([pieces[:world_size], pieces[: world_size - 1 : -1]], axis=1).reshape(-1)


def arrange_pack_zigzag(lengths: Ints, world_size: int) -> Layout:
    permutation = zigzag_order(int(lengths.sum()), world_size)
    return Layout(lengths, permutation, needed_fraction(lengths, permutation, world_size))


def arrange_document_zigzag(lengths: Ints, world_size: int) -> Layout:
    """Every document in 2P pieces, as the published ring kernels need it: padded to a multiple of 2P."""
    padded = -(-lengths // (2 * world_size)) * 2 * world_size
    starts = np.cumsum(padded) - padded
    shards = [
        start + zigzag_order(int(n), world_size).reshape(world_size, -1)
        for start, n in zip(starts, padded, strict=True)
    ]
    permutation = np.concatenate(shards, axis=1).reshape(-1)
    padding = int(padded.sum() - lengths.sum())
    return Layout(padded, permutation, needed_fraction(padded, permutation, world_size), padding)


def torch_layouts() -> dict[str, Callable[[Ints, int], Layout]]:
    """The load balancers of torch's context parallelism, where this torch has them."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers
    except ImportError:
        return {}

    def head_tail(lengths: Ints, world_size: int) -> Layout:
        balancer = balancers._HeadTailLoadBalancer(int(lengths.sum()), world_size, "cpu")
        permutation = balancer._generate_indices().numpy().reshape(-1).astype(np.int64)
        return Layout(lengths, permutation, needed_fraction(lengths, permutation, world_size))

    def per_document(lengths: Ints, world_size: int) -> Layout:
        padded = -(-lengths // (2 * world_size)) * 2 * world_size
        balancer = balancers._PerDocumentHeadTailLoadBalancer([padded.tolist()], world_size, "cpu")
        # Its indices go through the documents one after another, each with the pieces of all ranks; a rank's
        # tokens are then the rank's part of every document.
        flat, starts = balancer._generate_indices().numpy().reshape(-1).astype(np.int64), np.cumsum(padded) - padded
        parts = [flat[s : s + n].reshape(world_size, -1) for s, n in zip(starts, padded, strict=True)]
        permutation = np.concatenate(parts, axis=1).reshape(-1)
        fraction = needed_fraction(padded, permutation, world_size)
        return Layout(padded, permutation, fraction, int(padded.sum() - lengths.sum()))

    return {"torch head-tail": head_tail, "torch per-document head-tail": per_document}


def needed_fraction(lengths: Ints, permutation: Ints, world_size: int) -> float:
    """K/V tokens sent if each travels to the farthest rank with a later token of its document, over T(P-1)."""
    num_tokens = len(permutation)
    rank = np.empty(num_tokens, np.int64)
    rank[permutation] = np.arange(num_tokens) // (num_tokens // world_size)
    document = np.repeat(np.arange(len(lengths)), lengths)
    last = np.full((len(lengths), world_size), -1)
    np.maximum.at(last, (document, rank), np.arange(num_tokens))
    farthest = np.zeros(num_tokens, np.int64)
    pending = np.flatnonzero(last[document].max(axis=1) > np.arange(num_tokens)) if world_size > 1 else np.empty(0, int)
    for hop in range(world_size - 1, 0, -1):
        needed = last[document[pending], (rank[pending] + hop) % world_size] > pending
        farthest[pending[needed]] = hop
        pending = pending[~needed]
    return float(farthest.sum()) / (num_tokens * max(1, world_size - 1))


@dataclass(frozen=True)
class Measured:
    """Figures of one arrangement on some packs."""

    imbalance: list[float]
    kv_fraction: list[float]
    runs_mean: list[float]
    runs_most: list[int]
    padding: float

    def cells(self) -> list[str]:
        return [
            f"{np.mean(self.imbalance):.3f}",
            f"{np.max(self.imbalance):.3f}",
            f"{np.mean(self.kv_fraction):.2f}",
            f"{np.mean(self.runs_mean):.1f}",
            f"{np.max(self.runs_most)}",
            f"{self.padding:.1%}",
        ]


def measure(packs: list[Ints], world_size: int, arrange: Callable[[Ints, int], Layout]) -> Measured:
    """Figures counted from the permutation itself, the same way for every arrangement."""
    imbalance, kv, runs_mean, runs_most, padding = [], [], [], [], 0
    for lengths in packs:
        made = arrange(lengths, world_size)
        position = np.arange(made.lengths.sum()) - np.repeat(np.cumsum(made.lengths) - made.lengths, made.lengths)
        shards = made.permutation.reshape(world_size, -1)
        work = (position[shards] + 1).sum(axis=1)
        runs = 1 + (np.diff(shards, axis=1) != 1).sum(axis=1)
        imbalance.append(float(work.max() / work.mean()))
        kv.append(made.kv_fraction)
        runs_mean.append(float(runs.mean()))
        runs_most.append(int(runs.max()))
        padding += made.padding
    return Measured(imbalance, kv, runs_mean, runs_most, padding / sum(int(p.sum()) for p in packs))


LAYOUTS: dict[str, Callable[[Ints, int], Layout]] = {
    "**plan_ring**": arrange_plan_ring,
    "contiguous": arrange_contiguous,
    "whole-pack zigzag": arrange_pack_zigzag,
    "per-document zigzag": arrange_document_zigzag,
}


def plan_seconds(lengths: Ints, world_size: int, repeats: int = 5) -> float:
    """Least CPU time of a plan and one rank's shard with its steps: other work on the machine does not count."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        plan_ring(np.append(0, np.cumsum(lengths)), world_size).shard(world_size // 2)
        times.append(time.process_time() - start)
    return min(times)


def documents_of_a_million_tokens() -> dict[str, Ints]:
    """About 10k documents in 1,048,576 tokens, of three shapes."""
    rng = np.random.default_rng(0)
    drawn = {
        "uniform": rng.integers(1, 210, 40000),
        "lognormal, sigma 1.6": rng.lognormal(3.37, 1.6, 40000).astype(np.int64) + 1,
        "Pareto, alpha 1.1": np.minimum(rng.pareto(1.1, 40000) * 17 + 1, 262144).astype(np.int64),
    }
    return {name: cut_to(lengths, 1 << 20) for name, lengths in drawn.items()}


def cut_to(lengths: Ints, num_tokens: int) -> Ints:
    """The first lengths that sum to `num_tokens`, the last one cut."""
    end = np.cumsum(lengths)
    chosen = lengths[: int(np.searchsorted(end, num_tokens)) + 1].copy()
    chosen[-1] -= end[len(chosen) - 1] - num_tokens
    return chosen


FIGURES = ("imbalance mean", "worst", "K/V", "runs mean", "most", "padding")


def print_comparison(settings: list[tuple[str, list[Ints], int]], column: str) -> None:
    """One row for each setting (name, packs, world size) and arrangement."""
    print(f"\n{page.head([column, 'packs', 'arrangement', *FIGURES])}", flush=True)
    for name, packs, world_size in settings:
        for arrangement, arrange in (LAYOUTS | torch_layouts()).items():
            print(page.row([name, len(packs), arrangement, *measure(packs, world_size, arrange).cells()]), flush=True)


def print_times(packs: list[Ints]) -> None:
    names = ["planning, with one rank's steps", "documents", "P", "median ms", "p95 ms", "worst ms"]
    print(f"\n{page.head(names)}", flush=True)
    for name, chosen, world_size in (
        ("64k packs", packs, 8),
        *((f"1M tokens, {name}", [lengths], 64) for name, lengths in documents_of_a_million_tokens().items()),
    ):
        ms = [1e3 * plan_seconds(lengths, world_size) for lengths in chosen]
        documents = f"{np.mean([len(lengths) for lengths in chosen]):.0f}"
        median, p95, worst = np.quantile(ms, [0.5, 0.95, 1.0])
        print(page.row([name, documents, world_size, f"{median:.1f}", f"{p95:.1f}", f"{worst:.1f}"]), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = page.parser("plan", __doc__)
    parser.add_argument("--packs", type=int, default=200, help="packs of 64k; larger ones are fewer")
    options = parser.parse_args(arguments)
    packs = draw_packs(65536, 65536, options.packs)
    rng = np.random.default_rng(1)
    facts = page.device(), page.versions(("numpy", "torch"))
    print(*page.heading("Ring plan", page.command("plan", arguments), *facts), page.explained(__doc__), sep="\n")
    print("\n## Packs of 64k, P = 8, documents in packing order and shuffled")
    shuffled = [rng.permutation(lengths) for lengths in packs]
    print_comparison([("packing order", packs, 8), ("shuffled", shuffled, 8)], "documents")
    print("\n## Planning time\n\nCPU time, the least of five runs for each pack; quantiles over packs.")
    print_times(packs)
    print("\n## Ranks (packs of 64k)")
    print_comparison([(str(p), packs, p) for p in WORLD_SIZES], "P")
    print("\n## Tokens in a pack (P = 8, documents cut to the pack)")
    sizes = [(c, max(5, min(options.packs, options.packs * 65536 // c))) for c in CAPACITIES]
    print_comparison([(f"{c // 1024}k", draw_packs(c, c, n), 8) for c, n in sizes], "pack")
    print("\n## Longest document (packs of 64k, P = 8)")
    print_comparison([(f"{c // 1024}k", draw_packs(65536, c, options.packs), 8) for c in CAPS], "cap")


if __name__ == "__main__":
    main()
