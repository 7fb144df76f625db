"""The closed form of a step's memory against published lengths and peaks.

    python -m benchmarks.closed_form                # the table
    python -m benchmarks.closed_form --traces       # and against traced steps of our own, minutes
    python -m benchmarks.closed_form --fit          # how its constants were found: the best of a grid
    python -m benchmarks.closed_form --output FILE

Rows are those of benchmarks/data/published_lengths.csv whose set-up is known, in their authors' words there. What is
set besides is stated here: ALST's rows train with Liger's layers wherever the loss is fused, and on one GPU with
parameters on the host (its recipes in ArcticTraining, projects/sequence-parallelism); UPipe's rows are torchtitan's
layers on FSDP2, whose norms and activations are compiled. A GPU named 80 GB has 85.0e9 bytes, one named 141 GB 150.1e9.

- *predicted*: the longest row that fits, or the peak of allocated memory at the published length.
- *binds*: which moment of the step, or which memory, is full first.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.published import CONFIGS, HOST_BYTES, Published, read
from longctx.memory import closed_form
from longctx.memory.closed_form import GB, MemorySetup, ModelSizes, Reach, predict, reach
from longctx.plan.candidates import DEVICE_BYTES

FEATURES: dict[str, dict[str, Any]] = {
    "fused-loss": {"fused_loss": True, "fused_layers": True},
    "tiled-mlp": {"tiled_mlp_num_shards": 0},
    "checkpoint-offload": {"activation_offloading": True},
    "all": {"fused_loss": True, "fused_layers": True, "tiled_mlp_num_shards": 0, "activation_offloading": True},
    "chunked-loss": {"fused_loss": True},
    "cp8": {"ring": 8},
    "torch ring": {"ring": 8},
    "head-chunked ulysses": {"heads_k_stride": 1},
}
"""What a feature in the table changes; those that the stack or the number of GPUs implies change nothing."""

_DEEPSPEED: dict[str, Any] = {"engine": "zero3", "reduce_bytes": 2, "bucket_size": 500_000_000}  # its own defaults
STACKS: dict[str, dict[str, Any]] = {
    "ALST": {**_DEEPSPEED, "offload_optimizer": "cpu", "fused_loss": False},
    "UPipe paper": {"engine": "fsdp2", "fused_layers": True},
    "TRL 1.13 CP": {"engine": "fsdp2", "reduce_bytes": 2},
    "HF Ulysses blog": {**_DEEPSPEED, "fused_loss": False},
}

MISSES = {
    ("ALST", "baseline+fused-loss+ulysses8+tiled-mlp"): (
        "ALST's tiled MLP gains 9% here, and 54% once checkpoints are on the host; one account of what attention takes "
        "cannot give both"
    ),
    ("UPipe paper", "head-chunked ulysses+checkpoint-offload+tiled-mlp, FA3"): (
        "UPipe also projects a few heads at a time, and never holds q, k and v of all heads; the closed form is of "
        "longctx's `heads_k_stride`, which keeps this rank's and their gradients"
    ),
}


class Row(NamedTuple):
    published: Published
    setup: MemorySetup

    def error(self) -> tuple[str, str, float]:
        """Published and predicted, and the second over the first, less 1."""
        length, peak_gib = self.published.length, self.published.peak_gib
        if peak_gib is not None:
            peak = predict(self.setup, length).allocated_bytes / 2**30
            return f"{peak_gib} GiB", f"{peak:.1f} GiB", peak / peak_gib - 1
        longest = self.reach().length
        return f"{length:,}", f"{longest:,}", longest / length - 1

    def reach(self) -> Reach:
        return reach(self.setup, DEVICE_BYTES[self.published.device], HOST_BYTES)

    def binds(self) -> str:
        longest = self.reach()
        return "host" if longest.binds == "host" else predict(self.setup, longest.length).moment


@cache
def sizes(model: str) -> ModelSizes:
    return ModelSizes.of_config(CONFIGS[model])


def rows() -> Iterator[Row]:
    """The rows of known stacks."""
    for row in read():
        if row.stack in STACKS:
            yield Row(row, _setup(row.stack, row.model, row.gpus, row.features))


def _setup(stack: str, model: str, gpus: int, features: str) -> MemorySetup:
    changed = dict(STACKS[stack])
    parts = features.replace(", ", "+").split("+")
    for part in parts:
        changed |= FEATURES.get(part, {})
    if stack == "ALST" and gpus == 1:
        changed["offload_param"] = "cpu"
    spread = stack != "ALST" or any(part.startswith("ulysses") or part == "all" for part in parts)
    return MemorySetup(model=sizes(model), world_size=gpus, sp=gpus if spread else 1, ranks_per_node=gpus, **changed)


def table() -> str:
    """Every row with its error, and what the errors amount to."""
    lines = ["| stack | GPUs | model | features | published | predicted | error | binds |", "| --- " * 8 + "|"]
    errors: list[float] = []
    notes: list[str] = []
    for row in rows():
        of, (published, predicted, error) = row.published, row.error()
        errors.append(abs(error))
        mark = ""
        if reason := MISSES.get((of.stack, of.features)):
            notes.append(f"{len(notes) + 1}. {of.stack}, {of.features}: {reason}.")
            mark = f" ({len(notes)})"
        lines.append(
            f"| {of.stack} | {of.gpus}× {of.gpu} | {of.model.split('/')[1]} | {of.features} | {published} | "
            f"{predicted} | {error:+.0%}{mark} | {row.binds()} |"
        )
    lines += ["", f"Median error {statistics.median(errors):.0%}, worst {max(errors):.0%}.", "", *notes]
    return "\n".join(lines)


def constants() -> str:
    """What was fitted."""
    lines = ["| constant | value | what it stands for |", "| --- | --- | --- |"]
    meaning = {
        "CONTEXT_BYTES": "a GPU's CUDA context and library workspaces",
        "COMMUNICATOR_BYTES": "NCCL's buffers, for the world and for a sequence group",
        "FRAGMENTATION": "reserved beyond what is allocated, as a part of the activations",
        "COPIES_IN_FLIGHT": "layer inputs not yet free again while checkpoints are copied to the host",
    }
    for name in closed_form.FITTED:
        value = getattr(closed_form, name)
        lines.append(f"| {name} | {f'{value / GB:.1f} GB' if value > 1000 else value} | {meaning[name]} |")
    return "\n".join(lines)


TRACED_LAYERS = 4
TRACED: dict[str, dict[str, Any]] = {
    "one device": {},
    "ulysses": {"sp": 8},
    "ring": {"sp": 8, "ring": 8},
    "gather": {"sp": 8, "ring": 8, "gathers": True},
    "ulysses, no checkpointing": {"sp": 8, "gradient_checkpointing": False},
    "ulysses, checkpoints on the host": {"sp": 8, "activation_offloading": True},
    "the same, MLP in tiles": {"sp": 8, "activation_offloading": True, "tiled_mlp_num_shards": 0},
    "the same, 1 key/value head at a time": {
        "sp": 8,
        "activation_offloading": True,
        "tiled_mlp_num_shards": 0,
        "heads_k_stride": 1,
    },
    "ulysses, 8,192 tokens at a time": {"sp": 8, "sequence_chunk_size": 8192},
}
"""Set-ups that `longctx.memory.step` traces too."""


def traces() -> str:
    """Layers of Llama-8B, 65,536 tokens a rank, against `trace_training_step`."""
    from longctx.memory.step import StepSettings, trace_training_step

    config = copy.deepcopy(CONFIGS["meta-llama/Llama-3.1-8B"])
    config.update({"num_hidden_layers": TRACED_LAYERS, "vocab_size": 4096})
    sizes = ModelSizes.of_config(config)
    lines = [
        "| set-up | traced GiB | predicted | error | host GiB, traced | predicted | moment |",
        "| --- " * 7 + "|",
    ]
    for name, changes in TRACED.items():
        setup = MemorySetup(model=sizes, engine="fsdp2" if "sp" in changes else "none", **changes)
        setup = replace(setup, world_size=setup.sp, selective_checkpointing=setup.ring > 1)
        settings = StepSettings(
            length=65536 * setup.sp,
            sp=setup.sp,
            engine=setup.engine,
            sp_backend="gather" if setup.gathers else "ring" if setup.ring > 1 else "ulysses",
            activation_checkpointing={"offload": setup.activation_offloading} if setup.gradient_checkpointing else None,
            levers={
                key: getattr(setup, key) for key in ("tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size")
            },
        )
        trace, peak = trace_training_step(config, settings), predict(setup, settings.length)
        lines.append(
            f"| {name} | {trace.peak_bytes / 2**30:.2f} | {peak.allocated_bytes / 2**30:.2f} | "
            f"{peak.allocated_bytes / trace.peak_bytes - 1:+.0%} | {trace.host_peak_bytes / 2**30:.2f} | "
            f"{peak.host_bytes / 2**30:.2f} | {peak.moment} |"
        )
    return "\n".join(lines)


GRID: dict[str, list[float]] = {
    "CONTEXT_BYTES": [1 * GB, 2 * GB, 3 * GB],
    "COMMUNICATOR_BYTES": [1.5 * GB, 2 * GB, 2.5 * GB, 3 * GB],
    "FRAGMENTATION": [0.08, 0.1, 0.12, 0.14],
    "COPIES_IN_FLIGHT": [2, 3, 4],
}


def fit() -> str:
    """The sum of squared errors of ALST's rows over a grid, the ten least, and that of the constants in use.

    Not of its longest on one GPU: a recipe says that 555,000 tokens end in a kernel's illegal access, not in memory.
    """
    fitted = [row for row in rows() if row.published.stack == "ALST" and row.published.features in ALST_FITTED]
    chosen = [getattr(closed_form, name) for name in GRID]
    found = []
    for values in itertools.product(*GRID.values()):
        _set(values)
        found.append((sum(row.error()[2] ** 2 for row in fitted), values))
    _set(chosen)
    found.sort()
    in_use = next(error for error, values in found if list(values) == chosen)
    lines = [f"{error:.4f} {dict(zip(GRID, values, strict=True))}" for error, values in found[:10]]
    return "\n".join([*lines, f"{in_use:.4f} in use"])


ALST_FITTED = frozenset(
    {
        "zero3+cpu-optimizer (baseline)",
        "baseline",
        "baseline+fused-loss",
        "baseline+fused-loss+checkpoint-offload",
        "baseline+fused-loss+ulysses8",
        "baseline+fused-loss+ulysses8+tiled-mlp",
        "baseline+fused-loss+ulysses8+checkpoint-offload",
        "all",
    }
)


def _set(values: Iterable[float]) -> None:
    for name, value in zip(GRID, values, strict=True):
        setattr(closed_form, name, value)


def _about_traces() -> list[str]:
    return [
        "## Against traced steps",
        "",
        f"{TRACED_LAYERS} layers of Llama-3.1-8B's sizes with a vocabulary of 4,096, 65,536 tokens a rank, bf16, FSDP2 "
        "over a fake process group (one device: without an engine). Predicted: allocated bytes, without what is "
        "fitted. Nothing here is fitted on traces.",
        "",
        traces(),
        "",
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.closed_form", description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="print the best constants of a grid, and stop")
    parser.add_argument("--traces", action="store_true", help="compare with traced steps, too")
    parser.add_argument("--output", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    if options.fit:
        print(fit())
        return 0
    _, _, about = __doc__.partition("--output FILE\n\n")
    page = "\n".join(
        [
            "# Closed form of a step's memory against published lengths",
            "",
            f"`python -m benchmarks.closed_form{' --traces' if options.traces else ''}`  ",
            f"{datetime.now(UTC):%Y-%m-%d}; all predicted, nothing measured here",
            "",
            about.strip(),
            "",
            table(),
            "",
            "## What was fitted",
            "",
            "On ALST's rows, all but the first (a recipe says that its limit is a kernel's, not memory): round "
            "figures near the least sum of squared errors over a grid (`--fit`).",
            "",
            constants(),
            "",
            *(_about_traces() if options.traces else []),
        ]
    )
    print(page, end="")
    if options.output:
        options.output.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
