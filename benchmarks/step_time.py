"""Modelled step times against published ones, and what a sequence-chunked step of Llama-3.1-8B would reach.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --output FILE

Rows are those of benchmarks/data/published_lengths.csv and held_back_lengths.csv that publish a time, set up as in
`benchmarks.closed_form`. The attention kernel is the one that each author names, or the default of the time:
FlashAttention-2, with torchtitan's Ulysses FlashAttention-3, and cuDNN's for TRL's context parallelism. Efficiencies
are those of `longctx.step_time`, the same for all rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.closed_form import Row, rows, sizes
from benchmarks.published import HELD_BACK, HOST_BYTES, PUBLISHED
from longctx.memory.closed_form import MemorySetup, predict, reach
from longctx.plan.candidates import DEVICE_BYTES
from longctx.step_time import Speeds, StepTime, step_time

KERNELS = {"TRL 1.13 CP": "cuDNN", "TRL 6845": "cuDNN"}
CHUNK = 32768
"""Tokens of a rank at a time."""
SPEEDS = Speeds.of("H100", "flash-attn 3")
LENGTHS = (1_000_000, 3_000_000, 5_000_000, 6_000_000)


def modelled(row: Row) -> StepTime:
    of = row.published
    kernel = KERNELS.get(of.stack, "flash-attn 3" if "FA3" in of.features else "flash-attn 2")
    return step_time(row.setup, of.length, Speeds.of(of.device, kernel))


def timed(path: Path) -> list[Row]:
    """Rows that publish a time."""
    return [row for row in rows(path) if row.published.seconds is not None]


def comparison(path: Path) -> Iterator[str]:
    yield "| stack | GPUs | model | features | length | published s | modelled s | error | largest parts |"
    yield "| --- " * 9 + "|"
    errors = []
    for row in timed(path):
        of, time = row.published, modelled(row)
        assert of.seconds is not None
        error = time.seconds / of.seconds - 1
        errors.append(abs(error))
        largest = sorted(time.parts.items(), key=lambda part: part[1], reverse=True)[:3]
        yield (
            f"| {of.stack} | {of.gpus}× {of.gpu} | {of.model.split('/')[1]} | {of.features} | {of.length:,} | "
            f"{of.seconds:,.0f} | {time.seconds:,.0f} | {error:+.0%} | "
            f"{', '.join(f'{name} {seconds / time.seconds:.0%}' for name, seconds in largest)} |"
        )
    yield f"\nMedian error {statistics.median(errors):.0%}, worst {max(errors):.0%}."


def chunked(keep_attention: bool) -> MemorySetup:
    return MemorySetup(
        model=sizes("meta-llama/Llama-3.1-8B"),
        world_size=8,
        sp=8,
        ranks_per_node=8,
        engine="fsdp2",
        sequence_chunk_size=CHUNK,
        selective_checkpointing=keep_attention,
    )


def reached() -> Iterator[str]:
    yield (
        "| attention's output | longest | full is | device GB at it | host TB at it | "
        + " | ".join(f"tokens/s/GPU at {length / 1e6:g}M" for length in LENGTHS)
        + " |"
    )
    yield "| --- " * (5 + len(LENGTHS)) + "|"
    for keep_attention in (False, True):
        setup = chunked(keep_attention)
        longest = reach(setup, DEVICE_BYTES["H100"], HOST_BYTES)
        full = predict(setup, longest.length)
        speeds = [
            f"{step_time(setup, length, SPEEDS).tokens_per_second_per_device:.0f}"
            if length <= longest.length
            else "does not fit"
            for length in LENGTHS
        ]
        yield (
            f"| {'kept on the host' if keep_attention else 'computed again'} | {longest.length:,} | {longest.binds} | "
            f"{full.device_bytes / 1e9:.1f} | {full.host_bytes / 1e12:.2f} | {' | '.join(speeds)} |"
        )


def page() -> str:
    about = __doc__.partition("--output FILE\n\n")[2].strip()
    return "\n".join(
        [
            "# Modelled step times against published ones",
            "",
            "`python -m benchmarks.step_time`  ",
            f"{datetime.now(UTC):%Y-%m-%d}; all modelled, nothing measured here",
            "",
            about,
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
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.step_time", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="also write the tables here")
    options = parser.parse_args(arguments)
    text = page()
    print(text, end="")
    if options.output:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
