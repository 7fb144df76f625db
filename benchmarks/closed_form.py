"""The closed form of a step's memory against published lengths and peaks.

    python -m benchmarks.closed_form                # the table
    python -m benchmarks.closed_form --traces       # and against traced steps of our own, minutes
    python -m benchmarks.closed_form --pairs        # DPO's step against traced ones, and nothing else, minutes
    python -m benchmarks.closed_form --fit          # how its constants were found: the best of a grid
    python -m benchmarks.closed_form --output FILE

Rows are those of benchmarks/data/published_lengths.csv whose set-up is known, in their authors' words there, and all
of held_back_lengths.csv. What is set besides is stated here: ALST's rows train with Liger's layers wherever the loss is
fused, on one GPU with parameters on the host, on H200 with FlashAttention-3, and in one row with sdpa, for which
transformers repeats key/value heads (its recipes in ArcticTraining, projects/sequence-parallelism). UPipe's rows are
torchtitan's layers on FSDP2, whose norms and activations are compiled; it tried whole millions of tokens, so a
prediction up to the next is right, and it projects a few heads at a time. TRL's context parallelism collects keys and
values at once and passes gradients on, as accelerate and torch have it by default. A GPU named 80 GB has 85.0e9 bytes,
one named 141 GB 150.1e9, a node of the host's memory 1.9e12.

- *predicted*: the longest row that fits, or the peak of allocated memory at the published length, or all that is taken
  of the GPU there.
- *binds*: which moment of the step, or which memory, is full first.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longctx.forecast import memory
from longctx.forecast.cost import Reach, cost, reach
from longctx.forecast.documents import one_document, one_pair
from longctx.forecast.memory import GB, offloaded
from longctx.forecast.model_sizes import ModelSizes
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine

from . import page
from .published import CONFIGS, HELD_BACK, HOST_BYTES, PUBLISHED, Published, read
from .shapes import shape_of, traced_settings, traced_shape

FEATURES: dict[str, dict[str, Any]] = {
    "fused-loss": {"fused_loss": True, "fused_layers": True},
    "tiled-mlp": {"tiled_mlp_num_shards": 0},
    "checkpoint-offload": {"activation_offloading": True},
    "all": {"fused_loss": True, "fused_layers": True, "tiled_mlp_num_shards": 0, "activation_offloading": True},
    "chunked-loss": {"fused_loss": True},
    "bf16-states": {"weight_bytes": 2},
    "torch ring": {"ring": 8},
    "head-chunked ulysses": {"heads_k_stride": 1, "projects_by_stage": True},
    "FA3": {"flash3": True},
}
"""What a feature in the table changes; those that the stack or the number of GPUs implies change nothing."""

_DEEPSPEED: dict[str, Any] = {
    "engine": "zero3",
    "communication_data_type": "bf16",
    "bucket_size": 500_000_000,
}  # its own defaults
_ALST: dict[str, Any] = {
    **_DEEPSPEED,
    "offload_optimizer_device": "cpu",
    "pins_host_memory": False,
    "fused_loss": False,
}
_TRL: dict[str, Any] = {
    "engine": "fsdp2",
    "communication_data_type": "bf16",
    "backend": "gather",
    "passes_gradients_on": True,
}
STACKS: dict[str, dict[str, Any]] = {
    "ALST": _ALST,
    "ALST recipes": _ALST,
    "UPipe paper": {"engine": "fsdp2", "fused_layers": True},
    "TRL 1.13 CP": _TRL,
    "TRL 6845": _TRL,
    "HF Ulysses blog": {**_DEEPSPEED, "fused_loss": False},
}
TRIED = {"UPipe paper": 1_000_000}
"""Tokens between the lengths that were tried: the longest may be as many longer, and a prediction between is right."""

RUNS = {("ALST", "baseline+fused-loss+ulysses8+tiled-mlp", 8): {"repeats_keys": True}}
"""(stack, features, GPUs) -> what this recipe sets otherwise than those beside it."""


class Row(NamedTuple):
    published: Published
    shape: RunShape

    @property
    def machine(self) -> Machine:
        of = self.published
        return Machine.of(of.device, min(of.gpus, 8), host_bytes=HOST_BYTES)

    def error(self) -> tuple[str, str, float]:
        """Published and predicted, and the second over the first, less 1."""
        of = self.published
        if gib := of.peak_gib or of.device_gib:
            peak = cost(self.shape, self.machine, of.length)
            predicted = (peak.allocated_bytes if of.peak_gib else peak.device_bytes) / 2**30
            what = "" if of.peak_gib else " of the GPU"
            return f"{gib} GiB{what} at {of.length:,}", f"{predicted:.1f} GiB", predicted / gib - 1
        longest = self.reach().length
        too_long = of.length + TRIED.get(of.stack, 0)
        nearest = min(max(of.length, longest), too_long)  # that the published length may stand for
        return f"{of.length:,}", f"{longest:,}", longest / nearest - 1

    def reach(self) -> Reach:
        return reach(self.shape, self.machine)

    def binds(self) -> str:
        """What is full at the longest, or largest in a run."""
        if self.published.is_run:
            return cost(self.shape, self.machine, self.published.length).moment
        longest = self.reach()
        return "host" if longest.binds == "host" else cost(self.shape, self.machine, longest.length).moment

    def miss(self) -> str | None:
        """Why it is off, where that is known."""
        of = self.published
        return MISSES.get((of.stack, of.model.split("/")[1], of.gpus, of.length))


MISSES = {
    ("ALST recipes", "Qwen3-32B", 1, 230_000): (
        "no limit of memory, it seems: at 2^31 / 8192 = 262,144 tokens, kernels with 32-bit offsets end for its "
        "queries, as the recipe of Llama-8B reports beyond 2^31 / 4096"
    ),
    ("ALST recipes", "Llama-3.1-70B", 8, 200_000): (
        "three steps of a round number of tokens, not said to be the longest; all states of a rank leave 0.2 TB of the "
        "host"
    ),
    ("ALST recipes", "Llama-3.1-70B", 16, 1_200_000): (
        "the host binds: this length fills it where a node holds 32 bytes for each parameter of its share; DeepSpeed's "
        "own estimate, used here, is 24"
    ),
    ("TRL 6845", "Qwen3-0.6B", 8, 1_048_576): (
        "26.3 GiB with the checkpoints on the device, where a model of this size can keep them; which options were on "
        "is not published"
    ),
    ("TRL 6845", "Qwen3-30B-A3B", 8, 1_048_576): (
        "its experts would keep 18 GiB for their backward pass; how the run computed them is not published"
    ),
}
"""(stack, model, GPUs, length) -> why its error is above 20%."""


@cache
def sizes(model: str) -> ModelSizes:
    return ModelSizes.of_config(CONFIGS[model])


def rows(path: Path = PUBLISHED) -> list[Row]:
    """The rows of known stacks."""
    return [Row(row, _shape(row)) for row in read(path) if row.stack in STACKS]


def _shape(row: Published) -> RunShape:
    changed = dict(STACKS[row.stack])
    parts = row.features.replace(", ", "+").split("+")
    for part in parts:
        changed |= FEATURES.get(part, {})
    alst = row.stack.startswith("ALST")
    if alst and row.gpus == 1:
        changed["offload_param_device"] = "cpu"
    if alst and row.device == "H200":
        changed["flash3"] = True
    changed |= RUNS.get((row.stack, row.features, row.gpus), {})
    spread = not alst or any(part.startswith("ulysses") or part == "all" for part in parts)
    sp = row.gpus if spread else 1
    if row.stack.startswith("TRL"):
        changed |= {"ring": sp, "heads_k_stride": CONFIGS[row.model].num_key_value_heads}  # all at once
    return shape_of(sizes(row.model), world_size=row.gpus, sp=sp, **changed)


def table(path: Path = PUBLISHED) -> str:
    """Every row with a length or a peak, with its error, and what the errors amount to."""
    lines = [page.head(["stack", "GPUs", "model", "features", "published", "predicted", "error", "binds"])]
    errors: list[float] = []
    notes: list[str] = []
    for row in compared(path):
        of, (published, predicted, error) = row.published, row.error()
        errors.append(abs(error))
        mark = ""
        if reason := row.miss():
            notes.append(f"{len(notes) + 1}. {of.model.split('/')[1]} on {of.gpus}, {of.features}: {reason}.")
            mark = f" ({len(notes)})"
        gpus, model = f"{of.gpus}× {of.gpu}", of.model.split("/")[1]
        found = (published, predicted, f"{error:+.0%}{mark}", row.binds())
        lines.append(page.row([of.stack, gpus, model, of.features, *found]))
    lines += ["", f"Median error {statistics.median(errors):.0%}, worst {max(errors):.0%}.", "", *notes]
    return "\n".join(lines)


def compared(path: Path) -> list[Row]:
    """Those that publish more than a time."""
    return [row for row in rows(path) if not row.published.is_run or row.published.peak_gib or row.published.device_gib]


def constants() -> str:
    """What was fitted."""
    meaning = {
        "CONTEXT_BYTES": "a GPU's CUDA context and library workspaces",
        "COMMUNICATOR_BYTES": "NCCL's buffers, for the world and for a sequence group",
        "FRAGMENTATION": "reserved beyond what is allocated, as a part of the activations",
        "COPIES_IN_FLIGHT": "layer inputs not yet free again while checkpoints are copied to the host",
    }
    values = {name: getattr(memory, name) for name in memory.FITTED}
    rows = [(name, f"{value / GB:.1f} GB" if value > 1000 else value, meaning[name]) for name, value in values.items()]
    return "\n".join(page.table(["constant", "value", "what it stands for"], rows))


TRACED_LAYERS = 4
TILES: dict[str, Any] = {"tiled_mlp_num_shards": 0, "heads_k_stride": 1}
_TILED: dict[str, Any] = {"sp": 8, "activation_offloading": True, **TILES}
TRACED: dict[str, dict[str, Any]] = {
    "one device": {},
    "ulysses": {"sp": 8},
    "ring": {"sp": 8, "ring": 8},
    "gather": {"sp": 8, "ring": 8, "backend": "gather"},
    "ulysses, no checkpointing": {"sp": 8, "activation_checkpointing": False},
    "ulysses, checkpoints on the host": {"sp": 8, "activation_offloading": True},
    "the same, MLP in tiles": {"sp": 8, "activation_offloading": True, "tiled_mlp_num_shards": 0},
    "the same, 1 key/value head at a time": _TILED,
    "the same, in a ring": {**_TILED, "ring": 8},
    "the same, hybrid 2 × ring 4": {**_TILED, "ring": 4},
    "ulysses, 8,192 tokens at a time": {"sp": 8, "sequence_chunk_size": 8192},
}
"""Set-ups that `benchmarks.memory.step` traces too."""
VOCABULARY = "the whole vocabulary, MLP in tiles, 1 key/value head at a time"


def traces(*, pairs: bool = False) -> str:
    """Layers of Llama-8B, 65,536 tokens a rank, against `trace_training_step`.

    Args:
        pairs: whether the step is that of DPO, on one pair of answers, and not that of fine-tuning on one document.
    """
    from .memory.step import StepSettings, trace_training_step

    config = copy.deepcopy(CONFIGS["meta-llama/Llama-3.1-8B"])
    config.update({"num_hidden_layers": TRACED_LAYERS, "vocab_size": 4096})
    cases = [(name, config, changes, 65536, pairs) for name, changes in TRACED.items()]
    if pairs:
        whole_head = copy.deepcopy(config)
        whole_head.update({"num_hidden_layers": 1, "vocab_size": CONFIGS["meta-llama/Llama-3.1-8B"].vocab_size})
        name = f"ulysses, one layer, {VOCABULARY}"
        cases.append((name, whole_head, {"sp": 8, **TILES}, 4096, True))
        cases.append((f"{name}; fine-tuning", whole_head, {"sp": 8, **TILES}, 4096, False))
    names = ["set-up", "traced GiB", "predicted", "error", "host GiB, traced", "predicted", "moment"]
    lines = [page.head(names)]
    for name, sizes, changes, tokens, is_of_pairs in cases:
        shape = traced_shape(ModelSizes.of_config(sizes), changes)
        length = tokens * shape.sp
        settings = StepSettings(
            length=length,
            document_lengths=one_pair(length) if is_of_pairs else one_document(length),
            **traced_settings(shape),
        )
        trace = trace_training_step(sizes, settings, loss_of=loss_of_pairs if is_of_pairs else None)
        peak = cost(shape, Machine.of("H100", 8), settings.length)
        host = sum(offloaded(shape, settings.length).values())
        gib = (f"{size / 2**30:.2f}" for size in (trace.peak_bytes, peak.allocated_bytes, trace.host_peak_bytes, host))
        device, predicted, *on_host = gib
        error = f"{peak.allocated_bytes / trace.peak_bytes - 1:+.0%}"
        lines.append(page.row([name, device, predicted, error, *on_host, peak.moment]))
    return "\n".join(lines)


def loss_of_pairs(sequence: Any, batch: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    """DPO's loss of a batch whose documents are the sides of pairs, for `trace_training_step`."""
    from longctx.settings.dpo import DPO
    from longctx.settings.read import parse_flags
    from longctx.training.preference import PreferenceLoss

    objective = PreferenceLoss(sequence, parse_flags([], DPO))
    starts = np.flatnonzero(batch["position_ids"][0] == 0)
    row = {"input_ids": batch["input_ids"][0], "reference": np.zeros((len(starts) // 2, 2))}
    fields = objective.collate([row], batch, sequence.layout_of(batch), 0)
    lengths = fields["pairs"].lengths  # not counted by `objective`, which would ask ranks that are not there
    counts = len(lengths), int(lengths[:, 0].sum())

    def loss(model: Any, shard: Any) -> Any:
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True, **objective.model_options)
        return objective.loss(objective.measure(shard, outputs, fields)[0], counts)

    return loss


GRID: dict[str, list[float]] = {
    "CONTEXT_BYTES": [1 * GB, 2 * GB, 3 * GB],
    "COMMUNICATOR_BYTES": [2.5 * GB, 3 * GB, 3.5 * GB, 4 * GB],
    "FRAGMENTATION": [0.08, 0.1, 0.12, 0.14],
    "COPIES_IN_FLIGHT": [2, 3, 4, 5],
}


def fit() -> str:
    """The sum of squared errors of ALST's rows over a grid, the ten least, and that of the constants in use.

    Not of its longest on one GPU: a recipe says that 555,000 tokens end in a kernel's illegal access, not in memory.
    """
    fitted = [row for row in rows() if row.published.stack == "ALST" and row.published.features in ALST_FITTED]
    chosen = [getattr(memory, name) for name in GRID]
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
        setattr(memory, name, value)


def _about_traces() -> list[str]:
    return [
        "",
        "## Against traced steps",
        "",
        f"{TRACED_LAYERS} layers of Llama-3.1-8B's sizes with a vocabulary of 4,096, 65,536 tokens a rank, bf16, FSDP2 "
        "over a fake process group (one device: without an engine). Predicted: allocated bytes, without what is "
        "fitted. Nothing here is fitted on traces.",
        "",
        traces(),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = page.parser("closed_form", __doc__)
    parser.add_argument("--fit", action="store_true", help="print the best constants of a grid, and stop")
    parser.add_argument("--traces", action="store_true", help="compare with traced steps, too")
    parser.add_argument("--pairs", action="store_true", help="compare DPO's step with traced ones, and nothing else")
    parser.add_argument("--output", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    if options.fit:
        print(fit())
        return 0
    text = _page_of_pairs() if options.pairs else _page(with_traces=options.traces)
    page.Report(options.output).add(*text)
    return 0


def _page_of_pairs() -> list[str]:
    command = page.command("closed_form", ["--pairs"])
    facts = page.versions(("torch", "transformers")), "all predicted, nothing measured here"
    return [
        *page.heading("Memory of a DPO step: the closed form beside traced steps", command, *facts),
        "`longctx plan --method dpo` gives a step of DPO the memory of fine-tuning's, since the reference model is "
        "not there during training. The traces are of the step of `longctx dpo` on one pair of answers that fills "
        f"the sequence: {TRACED_LAYERS} layers of Llama-3.1-8B's sizes with a vocabulary of 4,096, 65,536 tokens "
        "a rank, bf16, FSDP2 over a fake process group (one device: without an engine). The last rows have one "
        "layer, the whole vocabulary of 128,256 and 4,096 tokens a rank, so that the loss is the largest part; "
        "there the closed form counts too much, for fine-tuning as for DPO. "
        "Nothing is fitted on these traces.",
        "",
        traces(pairs=True),
    ]


def _page(*, with_traces: bool) -> list[str]:
    command = page.command("closed_form", ["--traces"] * with_traces)
    return [
        *page.heading(
            "Closed form of a step's memory against published lengths", command, "all predicted, nothing measured here"
        ),
        page.explained(__doc__),
        "",
        table(),
        "",
        "## Held back",
        "",
        "Nothing was fitted on these rows (benchmarks/data/held_back_lengths.csv).",
        "",
        table(HELD_BACK),
        "",
        "## What was fitted",
        "",
        "On ALST's rows, all but the first (a recipe says that its limit is a kernel's, not memory): round "
        "figures near the least sum of squared errors over a grid (`--fit`).",
        "",
        constants(),
        *(_about_traces() if with_traces else []),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
