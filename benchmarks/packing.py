"""Packing against TRL in the same run: packs, plan time, plan memory, and time from a row to its tensors.

    python -m benchmarks.packing                      # 100k and 1M documents
    python -m benchmarks.packing --documents 100000 1000000 10000000

What is timed for TRL is its own `_pack_bfd`, stopped where it starts to copy tokens: the sort and the packing
loop. Its data set map calls that function for each 1,000 documents; the column "per 1,000" is the packs this
gives. "over bound" is against max(ceil(sum / L), Martello-Toth L2); documents longer than L are cut to L.
Times are CPU seconds of one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from longctx.collate import SequenceCollator
from longctx.packing import PackedDataset, Packing, lower_bound, pack, read_lengths

from . import page

HISTOGRAM = Path(__file__).parent / "data" / "document_lengths.csv"
PACKAGES = ("numpy", "pyarrow", "datasets", "torch", "trl")
TRL_BATCH = 1000  # documents that datasets' map hands to TRL's packing at a time

Lengths = NDArray[np.int64]


def lognormal(rng: np.random.Generator, n: int, capacity: int) -> Lengths:
    """Mean 600, sigma 1.5, clipped to 8..65536."""
    sigma = 1.5
    return np.clip(rng.lognormal(np.log(600) - sigma**2 / 2, sigma, n), 8, 65536).astype(np.int64)


def mixture(rng: np.random.Generator, n: int, capacity: int) -> Lengths:
    """Nine tenths lognormal, one tenth log-uniform from 4k to 131k."""
    lengths = lognormal(rng, n, capacity)
    long = rng.random(n) < 0.1
    lengths[long] = np.exp(rng.uniform(np.log(4096), np.log(131072), np.count_nonzero(long)))
    return lengths


def uniform(rng: np.random.Generator, n: int, capacity: int) -> Lengths:
    """A fraction of the pack, 1/4.5 to 1/1.9: nothing fills it well."""
    return rng.uniform(capacity / 4.5, capacity / 1.9, n).astype(np.int64)


def bins_of_lengths() -> Lengths:
    """int64 [3, bins]: least and largest length, and weight, of data/document_lengths.csv."""
    return np.loadtxt(HISTOGRAM, delimiter=",", skiprows=3, dtype=np.int64).T


def histogram(rng: np.random.Generator, n: int, capacity: int) -> Lengths:
    """Draw document lengths from the histogram of a long-context training mix."""
    low, high, weight = bins_of_lengths()
    bins = rng.choice(len(weight), n, p=weight / weight.sum())
    return rng.integers(low[bins], high[bins] + 1)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], Lengths]] = {
    "lognormal": lognormal,
    "90/10 mix": mixture,
    "uniform": uniform,
    "histogram": histogram,
}


class _StopAtCopyError(Exception):
    """Carries TRL's bins out of its packing function."""

    def __init__(self, bins: list[dict[str, Any]]) -> None:
        self.bins = bins


class _NoCopyCompute:
    """pyarrow.compute for TRL's function without its copies of tokens: only the plan is compared."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pc, name)

    def filter(self, column: pa.Array, mask: pa.Array) -> pa.Array:
        return column  # no document is empty here

    def list_slice(self, column: pa.Array, start: int, stop: int) -> pa.Array:
        return column  # nor longer than a pack

    def take(self, table: pa.Table, indices: list[int]) -> pa.Table:
        raise _StopAtCopyError(sys._getframe(1).f_locals["bins"])


def trl_plan(lengths: Lengths, capacity: int) -> tuple[list[dict[str, Any]], float]:
    """(bins, seconds) of TRL's sort and packing loop over these documents at once."""
    import trl.data_utils

    offsets = np.concatenate(([0], np.cumsum(lengths)))
    documents = pa.LargeListArray.from_arrays(pa.array(offsets), pa.nulls(int(offsets[-1])))
    table = pa.table({"input_ids": documents})
    trl.data_utils.pc = _NoCopyCompute()
    start = time.process_time()
    try:
        trl.data_utils._pack_bfd(table, capacity)
    except _StopAtCopyError as stop:
        return stop.bins, time.process_time() - start
    finally:
        trl.data_utils.pc = pc
    raise RuntimeError("TRL's _pack_bfd no longer copies with pyarrow.compute.take; adapt trl_plan")


def timed(function: Callable[[], Any], repeats: int) -> tuple[Any, list[float]]:
    """(last result, CPU seconds of each call)."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    return result, seconds


PLAN_HEADER = ["documents", "lengths", "L", "packs", "over bound", "per 1,000", "plan ms (min–max)", "TRL ms", "ratio"]
PLAN_HEADER += ["TRL's fills", "bytes/doc"]


def measure_plan(documents: int, name: str, capacity: int, *, repeats: int, with_trl: bool) -> list[str]:
    """Plan one case with longctx, and with TRL if asked; documents longer than a pack are cut to it."""
    rng = np.random.default_rng([documents, capacity])
    lengths = np.minimum(DISTRIBUTIONS[name](rng, documents, capacity), capacity)
    packing, seconds = timed(lambda: pack(lengths, capacity), repeats)
    packs, bound, median = len(packing), lower_bound(lengths, capacity), float(np.median(seconds))
    per_batch = trl_ms = ratio = fills = ""
    if with_trl:
        bins, trl_seconds = trl_plan(lengths, capacity)
        theirs = np.sort([int(b["length"]) for b in bins])
        fills = "yes" if np.array_equal(theirs, np.sort(packing.fills(lengths))) else "NO"
        batches = np.split(lengths, range(TRL_BATCH, documents, TRL_BATCH))
        per_batch = f"{sum(len(pack(batch, capacity)) for batch in batches) / packs - 1:+.1%}"
        trl_ms, ratio = f"{trl_seconds * 1e3:,.0f}", f"{trl_seconds / median:,.0f}×"
    return [
        f"{documents:,}",
        name,
        f"{capacity:,}",
        f"{packs:,}",
        f"{packs - bound:+,} ({packs / bound - 1:.3%})",
        per_batch,
        f"{median * 1e3:,.1f} ({min(seconds) * 1e3:,.1f}–{max(seconds) * 1e3:,.1f})",
        trl_ms,
        ratio,
        fills,
        f"{packing.nbytes / documents:.2f}",
    ]


def write_documents(folder: str, capacity: int, packs: int) -> tuple[Any, Packing]:
    """A memory-mapped data set of lognormal documents filling more than `packs` packs, and its plan."""
    import datasets

    rng = np.random.default_rng(0)
    lengths = np.minimum(lognormal(rng, 2 * packs * capacity // 600, capacity), capacity)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = pa.array(rng.integers(0, 150_000, int(offsets[-1]), dtype=np.int32))
    column = pa.ListArray.from_arrays(pa.array(offsets, type=pa.int32()), ids)
    dataset = datasets.Dataset(pa.table({"input_ids": column, "labels": column}))
    dataset.save_to_disk(folder)
    stored = datasets.load_from_disk(folder)
    return stored, pack(read_lengths(stored), capacity)


def measure_rows(capacity: int, packs: int) -> tuple[list[float], list[float]]:
    """(ours, TRL's) seconds from a pack's index to its tensors, padding-free, for each of `packs` packs."""
    import datasets
    from trl.data_utils import pack_dataset as trl_pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        stored, packing = write_documents(folder, capacity, packs)
        ours, collate = PackedDataset(stored, packing), SequenceCollator(0, padding_free=True)
        theirs = trl_pack_dataset(stored, capacity, "bfd")
        trl_collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        collate([ours[0]])
        trl_collate([theirs[0]])
        our_seconds = [timed(lambda i=i: collate([ours[i]]), 1)[1][0] for i in range(packs)]  # type: ignore[misc]
        trl_seconds = [timed(lambda i=i: trl_collate([theirs[i]]), 1)[1][0] for i in range(packs)]  # type: ignore[misc]
    return our_seconds, trl_seconds


ROW_HEADER = ["L", "rows", "longctx ms (p10–p90)", "TRL ms (p10–p90)", "ratio of medians", "Mtokens/s", "TRL Mtokens/s"]


def row_cells(capacity: int, ours: list[float], theirs: list[float]) -> list[str]:
    def spread(seconds: list[float]) -> str:
        low, middle, high = np.quantile(seconds, [0.1, 0.5, 0.9]) * 1e3
        return f"{middle:.2f} ({low:.2f}–{high:.2f})"

    our_median, trl_median = float(np.median(ours)), float(np.median(theirs))
    return [
        f"{capacity:,}",
        str(len(ours)),
        spread(ours),
        spread(theirs),
        f"{trl_median / our_median:.0f}×",
        f"{capacity / our_median / 1e6:.0f}",
        f"{capacity / trl_median / 1e6:.1f}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = page.parser("packing", __doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--lengths", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS))
    parser.add_argument("--capacity", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--trl_documents", type=int, default=1_000_000, help="most documents to run TRL on")
    parser.add_argument("--repeats", type=int, default=5, help="plans timed for each case")
    parser.add_argument("--rows", type=int, default=20, help="packs cut and collated for each length; 0: none")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    print(f"{page.device()}; {page.versions(PACKAGES)}\n")
    if options.rows:
        print(page.head(ROW_HEADER), flush=True)
        for capacity in options.capacity:
            print(page.row(row_cells(capacity, *measure_rows(capacity, options.rows))), flush=True)
        print()
    print(page.head(PLAN_HEADER), flush=True)
    for documents in options.documents:
        for name in options.lengths:
            for capacity in options.capacity:
                with_trl = documents <= options.trl_documents
                cells = measure_plan(documents, name, capacity, repeats=options.repeats, with_trl=with_trl)
                print(page.row(cells), flush=True)


if __name__ == "__main__":
    main()
