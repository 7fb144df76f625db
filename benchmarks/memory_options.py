"""Memory options chosen by cost beside the presets: speed and memory over the length, predicted for eight H100s.

    python -m benchmarks.memory_options --output benchmarks/results/levers_h100_DATE.md

Predicted, never measured: memory by the closed form, time by `longctx.forecast.step_time`, one document a sequence,
FlashAttention-3, 1.9 TB of host memory. *Presets* is the fastest of --memory balanced, longest and fastest over all
degrees that leaves a tenth of the memory free, and *chosen* what --memory auto finds over the same degrees. MFU counts
no recomputation, and only pairs of query and key that the causal mask leaves, of a peak of 989 TFLOP/s.

The tables of fused layers have the fastest that --memory auto finds with --use_liger_kernel True and with
--torch_compile True, which is on FSDP2 and has neither tiles nor chunks. Both save and move less than stock layers do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from longctx.forecast.candidates import DEVICE_BYTES, Machine, Outlook, candidates, outlook
from longctx.forecast.step_time import Speeds, matmul_parameters

from longctx.attention.cost import FLOPS_FORWARD
from longctx.forecast.model_sizes import ModelSizes

from .published import CONFIGS, HOST_BYTES

MODELS = ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B")
LENGTHS = (*(2**power for power in range(15, 22)), 3_000_000, 2**22, 5_000_000, 6_000_000)
FUSED_LENGTHS = (2**15, 2**17, 2**20)
FUSED = ("use_liger_kernel", "torch_compile")
"""Flags that fuse norms and activations."""
PRESETS = ("balanced", "longest", "fastest")
PEAK = 9.89e14
MACHINE = Machine(
    gpus=8,
    gpus_per_node=8,
    device="H100",
    device_bytes=DEVICE_BYTES["H100"],
    host_bytes=HOST_BYTES,
    kernel="flash-attn 3",
    speeds=Speeds.of("H100", "flash-attn 3"),
)
PUBLISHED = {
    ("Qwen/Qwen3-8B", 2**20): "TRL 345 (380 s)",
    ("meta-llama/Llama-3.1-8B", 2**20): "UPipe 473 at 1,000,000",
    ("meta-llama/Llama-3.1-8B", 5_000_000): "UPipe 98",
}
"""Tokens a second and device that others publish for eight H100s."""


def best(outlooks: list[Outlook]) -> Outlook | None:
    """Return the fastest that leaves room, else the fastest that fits."""
    fitting = [one for one in outlooks if one.time is not None]
    return max(fitting, key=lambda one: (one.has_room, one.speed), default=None)


def mfu(model: ModelSizes, length: int, speed: float) -> float:
    """Return the part of the peak that useful FLOPs take, at `speed` tokens a second and device."""
    attention = FLOPS_FORWARD * model.query_size * model.num_layers * (length + 1) / 2
    return 3 * (2 * matmul_parameters(model) + attention) * speed / PEAK


def table(name: str) -> Iterator[str]:
    """Yield a Markdown table for one model."""
    config = CONFIGS[name]
    model = ModelSizes.of_config(config)
    columns = ("length", "presets: tokens/s a device", "MFU", "chosen: tokens/s a device", "MFU", "ratio", "used")
    yield f"| {' | '.join(columns)} | chosen | published |"
    yield "| --- " * 9 + "|"
    found = candidates(config, MACHINE, presets=(*PRESETS, "auto"))
    for length in LENGTHS:
        outlooks = [outlook(candidate, MACHINE, length) for candidate in found]
        before = best([one for one in outlooks if one.candidate.memory != "auto"])
        after = best(outlooks)
        if after is None:
            continue
        old = (
            ["does not fit", ""]
            if before is None
            else [f"{before.speed:,.0f}", f"{mfu(model, length, before.speed):.0%}"]
        )
        yield (
            "| "
            + " | ".join(
                [
                    f"{length:,}",
                    *old,
                    f"{after.speed:,.0f}",
                    f"{mfu(model, length, after.speed):.0%}",
                    "" if before is None else f"{after.speed / before.speed:.2f}",
                    f"{after.used:.0%}",
                    f"`{after.candidate.label}`",
                    PUBLISHED.get((name, length), ""),
                ]
            )
            + " |"
        )


def fused_table(name: str) -> Iterator[str]:
    """Yield a Markdown table of stock and fused layers for one model."""
    config = CONFIGS[name]
    columns = [f"`--{flag} True` | ratio" for flag in FUSED]
    yield f"| {' | '.join(['length', 'stock layers: tokens/s a device', *columns])} |"
    yield "| --- " * (2 + 2 * len(FUSED)) + "|"
    every = [{"use_liger_kernel": False}, *({"use_liger_kernel": False, flag: True} for flag in FUSED)]
    stock, *fused = [candidates(config, MACHINE, presets=("auto",), settings=settings) for settings in every]
    for length in FUSED_LENGTHS:
        before, *after = [
            best([outlook(candidate, MACHINE, length) for candidate in found]) for found in (stock, *fused)
        ]
        assert before is not None, f"{length:,} tokens do not fit"
        cells = [
            "does not fit | "
            if one is None
            else f"{one.speed:,.0f}, `{one.candidate.label}` | {one.speed / before.speed:.2f}"
            for one in after
        ]
        yield f"| {length:,} | {before.speed:,.0f}, `{before.candidate.label}` | " + " | ".join(cells) + " |"


def page() -> str:
    """Return the page."""
    summary = [part.strip() for part in (__doc__ or "").split("\n\n")[2:]]
    parts = [
        "# Memory options chosen by cost",
        f"`python -m benchmarks.memory_options`  \n{datetime.now(UTC):%Y-%m-%d}",
        *summary,
    ]
    for name in MODELS:
        parts += [f"## {name} on 8 × H100", "\n".join(table(name))]
        parts += [f"### {name}, fused layers", "\n".join(fused_table(name))]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Print the page or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="File. Default: print.")
    output = parser.parse_args().output
    if output is None:
        print(page(), end="")
    else:
        output.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
