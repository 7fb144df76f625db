"""Modelled step times against published ones, and what a sequence-chunked step of Llama-3.1-8B would reach.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --output FILE

Rows are those of benchmarks/data/published_lengths.csv and held_back_lengths.csv that publish a time, set up as in
`benchmarks.closed_form`. The attention kernel is the one that each author names, or the default of the time:
FlashAttention-2, with torchtitan's Ulysses FlashAttention-3, and cuDNN's for TRL's context parallelism. Efficiencies
are those of `longctx.forecast.seconds`, the same for all rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longctx.forecast.cost import cost, reach
from longctx.forecast.seconds import step_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine

from . import page
from .closed_form import Row, rows, sizes
from .published import HELD_BACK, HOST_BYTES, PUBLISHED
from .shapes import shape_of

KERNELS = {"TRL 1.13 CP": "cuDNN", "TRL 6845": "cuDNN"}
CHUNK = 32768
"""Tokens of a rank at a time."""
MACHINE = Machine.of("H100", 8, "flash-attn 3", host_bytes=HOST_BYTES)
LENGTHS = (1_000_000, 3_000_000, 5_000_000, 6_000_000)


def modelled(row: Row) -> dict[str, Any]:
    """Seconds of a step by part."""
    of = row.published
    kernel = KERNELS.get(of.stack, "flash-attn 3" if "FA3" in of.features else "flash-attn 2")
    machine = Machine.of(of.device, min(of.gpus, 8), kernel)
    return step_seconds(row.shape, machine, of.length, [of.length])


def timed(path: Path) -> list[Row]:
    """Rows that publish a time."""
    return [row for row in rows(path) if row.published.seconds is not None]


def comparison(path: Path) -> Iterator[str]:
    names = ["stack", "GPUs", "model", "features", "length", "published s", "modelled s", "error", "largest parts"]
    yield page.head(names)
    errors = []
    for row in timed(path):
        of, parts = row.published, modelled(row)
        modelled_seconds = sum(parts.values())
        assert of.seconds is not None
        error = modelled_seconds / of.seconds - 1
        errors.append(abs(error))
        largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:3]
        shares = ", ".join(f"{name} {seconds / modelled_seconds:.0%}" for name, seconds in largest)
        times = f"{of.length:,}", f"{of.seconds:,.0f}", f"{modelled_seconds:,.0f}", f"{error:+.0%}"
        yield page.row([of.stack, f"{of.gpus}× {of.gpu}", of.model.split("/")[1], of.features, *times, shares])
    yield f"\nMedian error {statistics.median(errors):.0%}, worst {max(errors):.0%}."


def chunked(keep_attention: bool) -> RunShape:
    return shape_of(
        sizes("meta-llama/Llama-3.1-8B"),
        world_size=8,
        sp=8,
        engine="fsdp2",
        sequence_chunk_size=CHUNK,
        selective=keep_attention,
    )


def reached() -> Iterator[str]:
    names = ["attention's output", "longest", "full is", "device GB at it", "host TB at it"]
    yield page.head([*names, *(f"tokens/s/GPU at {length / 1e6:g}M" for length in LENGTHS)])
    for keep_attention in (False, True):
        shape = chunked(keep_attention)
        longest = reach(shape, MACHINE)
        full = cost(shape, MACHINE, longest.length)
        speeds = [
            f"{cost(shape, MACHINE, length).speed:.0f}" if length <= longest.length else "does not fit"
            for length in LENGTHS
        ]
        output = "kept on the host" if keep_attention else "computed again"
        sizes = f"{full.device_bytes / 1e9:.1f}", f"{full.host_bytes / 1e12:.2f}"
        yield page.row([output, f"{longest.length:,}", longest.binds, *sizes, *speeds])


def text_of_page() -> list[str]:
    command = page.command("step_time", [])
    return [
        *page.heading("Modelled step times against published ones", command, "all modelled, nothing measured here"),
        page.explained(__doc__),
        "",
        *comparison(PUBLISHED),
        "",
        "## Held back",
        "",
        "Rows of benchmarks/data/held_back_lengths.csv, which no efficiency was chosen for.",
        "",
        *comparison(HELD_BACK),
        "",
        "## A sequence-chunked step of Llama-3.1-8B",
        "",
        f"8 × H100 80 GB and {HOST_BYTES / 1e12} TB of host memory, sp 8 by Ulysses on FSDP2, one document, bf16, "
        f"FlashAttention-3, {CHUNK:,} tokens of a rank at a time (`--sequence_chunk_size {CHUNK}`). The longest "
        "and the bytes are those of the closed form. The longest published, 5,000,000 tokens at 98 tokens/s/GPU, "
        "is the last row but one above.",
        "",
        *reached(),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = page.parser("step_time", __doc__)
    parser.add_argument("--output", type=Path, help="also write the tables here")
    page.Report(parser.parse_args(arguments).output).add(*text_of_page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
