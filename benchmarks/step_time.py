"""Modelled step times against published ones, and what a sequence-chunked step of Llama-3.1-8B would reach.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --here           # speeds measured on this machine against real steps on it, minutes
    python -m benchmarks.step_time --output FILE

Rows are those of benchmarks/data/published_lengths.csv and held_back_lengths.csv that publish a time, set up as in
`benchmarks.closed_form`. The attention kernel is the one that each author names, or the default of the time:
FlashAttention-2, with torchtitan's Ulysses FlashAttention-3, and cuDNN's for TRL's context parallelism. Efficiencies
are those of `longctx.forecast.seconds`, the same for all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, Qwen3Config

from longctx.forecast.cost import cost, reach
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.seconds import step_seconds
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.measure import measure_speeds
from longctx.model.tiny import tiny_tokenizer

from .closed_form import Row, rows, sizes
from .packing import device
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
    yield "| stack | GPUs | model | features | length | published s | modelled s | error | largest parts |"
    yield "| --- " * 9 + "|"
    errors = []
    for row in timed(path):
        of, parts = row.published, modelled(row)
        modelled_seconds = sum(parts.values())
        assert of.seconds is not None
        error = modelled_seconds / of.seconds - 1
        errors.append(abs(error))
        largest = sorted(parts.items(), key=lambda part: part[1], reverse=True)[:3]
        yield (
            f"| {of.stack} | {of.gpus}× {of.gpu} | {of.model.split('/')[1]} | {of.features} | {of.length:,} | "
            f"{of.seconds:,.0f} | {modelled_seconds:,.0f} | {error:+.0%} | "
            f"{', '.join(f'{name} {seconds / modelled_seconds:.0%}' for name, seconds in largest)} |"
        )
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
    yield (
        "| attention's output | longest | full is | device GB at it | host TB at it | "
        + " | ".join(f"tokens/s/GPU at {length / 1e6:g}M" for length in LENGTHS)
        + " |"
    )
    yield "| --- " * (5 + len(LENGTHS)) + "|"
    for keep_attention in (False, True):
        shape = chunked(keep_attention)
        longest = reach(shape, MACHINE)
        full = cost(shape, MACHINE, longest.length)
        speeds = [
            f"{cost(shape, MACHINE, length).speed:.0f}" if length <= longest.length else "does not fit"
            for length in LENGTHS
        ]
        yield (
            f"| {'kept on the host' if keep_attention else 'computed again'} | {longest.length:,} | {longest.binds} | "
            f"{full.device_bytes / 1e9:.1f} | {full.host_bytes / 1e12:.2f} | {' | '.join(speeds)} |"
        )


HERE = Qwen3Config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
)
HERE_TOKENS, HERE_STEPS = 2048, 4
SPREAD: dict[str, dict[str, Any]] = {
    "one process": {},
    "ring 2": {"world_size": 2, "sp": 2, "ring": 2, "engine": "fsdp2", "selective": True},
}


def here() -> Iterator[str]:
    """A small model's steps of `longctx.train`, in fp32, by the speeds that `longctx.machine.measure` finds."""
    yield "| spread | seconds a step, median (range) | predicted (before, after) | error | load | parts, after |"
    yield "| --- " * 6 + "|"
    model = ModelSizes.of_config(HERE)
    for name, settings in SPREAD.items():
        shape = shape_of(model, bf16=False, **settings)
        before = _predicted_here(shape)
        seconds = _train_here(shape.sp)
        after = _predicted_here(shape)
        times = sum(before.values()), sum(after.values())
        median, predicted = statistics.median(seconds), statistics.mean(times)
        yield (
            f"| {name} | {median:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {predicted:.2f} "
            f"({times[0]:.2f}, {times[1]:.2f}) | {predicted / median - 1:+.0%} | "
            f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs | "
            f"{', '.join(f'{part} {value:.2f}' for part, value in after.items())} |"
        )


def _predicted_here(shape: RunShape) -> dict[str, Any]:
    machine = replace(Machine.of("CPU", shape.world_size), speeds=measure_speeds(shape.world_size))
    return step_seconds(shape, machine, HERE_TOKENS, [HERE_TOKENS])


def _train_here(sp: int) -> list[float]:
    """Seconds of each step but the first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        AutoModelForCausalLM.from_config(HERE).save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        draw = np.random.default_rng(0)
        rows = [json.dumps({"input_ids": draw.integers(0, 256, HERE_TOKENS).tolist()}) for _ in range(HERE_STEPS)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        command = [sys.executable, "-m", "longctx.train", "--model_name_or_path", str(folder / "model")]
        command += ["--dataset_name", str(folder / "rows.jsonl"), "--max_length", str(HERE_TOKENS), "--sp", str(sp)]
        command += ["--sp_backend", "ring"] if sp > 1 else []
        command += ["--per_device_train_batch_size", "1", "--max_steps", str(HERE_STEPS), "--logging_steps", "1"]
        command += ["--output_dir", str(folder / "out"), "--report_to", "none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        state = folder / "out" / f"checkpoint-{HERE_STEPS}" / "trainer_state.json"
        log = json.loads(state.read_text())["log_history"]
    speeds = [entry["tokens_per_second"] for entry in log if "tokens_per_second" in entry]
    return [HERE_TOKENS / speed for speed in speeds[1:]]


def page_here() -> str:
    return "\n".join(
        [
            "# Steps on this machine, predicted by its measured speeds",
            "",
            "`python -m benchmarks.step_time --here`  ",
            f"{device()}; {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"`longctx.train` on {ModelSizes.of_config(HERE).num_parameters:,} parameters, {HERE_TOKENS:,} tokens a "
            f"step, fp32, {HERE_STEPS - 1} steps after the first; predicted by `longctx.forecast.seconds` with the "
            "speeds that `longctx.machine.measure` found right before and after. Wall time: other work on the "
            "machine counts (load).",
            "",
            *here(),
            "",
        ]
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
    parser.add_argument("--here", action="store_true", help="compare with real steps on this machine instead")
    parser.add_argument("--output", type=Path, help="also write the tables here")
    options = parser.parse_args(arguments)
    text = page_here() if options.here else page()
    print(text, end="")
    if options.output:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
