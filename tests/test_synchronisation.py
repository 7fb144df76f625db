"""What a micro-batch must not do on a GPU: have the host wait for it, or let two streams use memory without an order.

A wait leaves the GPU without work until the host has launched the next kernels, and no result shows it; a race gives
wrong numbers, sometimes. The soft device (tests/softcuda) tells of every kernel, wait, event and piece of memory, and
`tests.softcuda.watch` finds both.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longctx import parallelize
from tests.test_models import make_batch, make_model
from tests.test_training import COMMON, SHAPES, log_of, make_documents, other_models, write_jsonl  # noqa: F401

MICRO_BATCHES = 2
IN_A_MICRO_BATCH = {
    "longctx.chunked.tiles.settle": "Hidden states lie in host memory between layers, where other code may read them.",
}
"""Functions in which the host may wait for a micro-batch that is under way, and why."""

AT_ITS_END = {
    "trl.models.activation_offloading.OffloadActivations.__exit__": "TRL ends its streams after the backward pass.",
}
"""The same, after the last kernel of a micro-batch."""

BETWEEN_MICRO_BATCHES = {
    "longctx.parallel.SequenceParallel.count_label_tokens": "The loss is divided by the label tokens of the step.",
    "longctx.trainer.SequenceTrainer._get_grad_norm": "A norm that is not finite stops the run before weights change.",
    "transformers.trainer.Trainer._run_epoch": "--logging_nan_inf_filter looks at each loss.",
    "transformers.trainer.Trainer._maybe_log_save_evaluate": "The log has the loss and the norm as numbers.",
    "longctx.metrics.StepMetrics.read": "The log has sums over all ranks.",
    "longctx.checkpoint.signals": "Ranks agree whether a signal has come.",
    "deepspeed": "ZeRO-3's reduction of gradients, its norm and its step are DeepSpeed's own.",
}
"""Where the host may wait for what came before; prefixes of functions."""


class Run(NamedTuple):
    """What was seen of one rank's second optimizer step; the first one fills caches."""

    waits: list[tuple[str | None, bool, str, str]]
    """Span, before_last_kernel, reason and place of each `Wait`."""
    races: list[str]
    kernels: Counter
    """Of each micro-batch, from its cut to the end of its backward pass."""


def watched_runs(cases: dict[str, list[str]]) -> dict[str, Run]:
    """Train every case on this process group, one after the other."""
    from accelerate.state import AcceleratorState

    environment, results = dict(os.environ), {}
    for case, arguments in cases.items():
        AcceleratorState._reset_state()
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        results[case] = _watched_run(arguments)
    return results


def _watched_run(arguments: list[str]) -> Run:
    from longctx.trainer import SequenceTrainer
    from tests.softcuda.watch import Watch

    get_batch_samples, training_step = SequenceTrainer.get_batch_samples, SequenceTrainer.training_step
    backward, watch, kernels = torch.Tensor.backward, Watch(), Counter()

    def start_with_the_second_step(self, *args, **kwargs):
        if self.state.global_step == 1:
            watch.start()
        return get_batch_samples(self, *args, **kwargs)

    def begin(self, *args, **kwargs):
        if self.state.global_step == 1:
            watch.span = f"micro-batch {len(kernels) + 1}"
            kernels[watch.span] -= watch.num_kernels
        return training_step(self, *args, **kwargs)

    def end(loss, *args, **kwargs):
        backward(loss, *args, **kwargs)
        if watch.span is not None:
            kernels[watch.span] += watch.num_kernels
            watch.span = None

    with (
        patch.object(SequenceTrainer, "get_batch_samples", start_with_the_second_step),
        patch.object(SequenceTrainer, "training_step", begin),
        patch.object(torch.Tensor, "backward", end),
    ):
        log_of(arguments)
    watch.stop()
    loop = "transformers.trainer.Trainer._run_epoch"
    waits = [(w.span, w.before_last_kernel, w.reason, w.place) for w in watch.waits if w.span or loop in w.calls]
    return Run(waits, watch.races, kernels)


CHUNKS = ["--sequence_chunk_size", "128"]
RUNS = {  # DeepSpeed's last: transformers keeps its configuration for the rest of the process
    "ring, windows": ["--sp_backend", "ring"],
    "ulysses, fsdp2, tiles, offload": [
        *("--sp_backend", "ulysses", "--engine", "fsdp2"),
        *("--tiled_mlp_num_shards", "4", "--activation_offloading", "True"),
    ],
    "ulysses, zero3, chunks": ["--sp_backend", "ulysses", "--engine", "deepspeed", *CHUNKS],
}
OTHER_RUNS = {
    "local": ["--sp", "1"],
    "ring": ["--sp_backend", "ring"],
    "ring, no checkpointing": ["--sp_backend", "ring", "--gradient_checkpointing", "False"],
    "ring, offload": ["--sp_backend", "ring", "--activation_offloading", "True"],
    "ring, padded": ["--sp_backend", "ring", *SHAPES["padded"][1]],
    "ring, tiles": ["--sp_backend", "ring", "--tiled_mlp_num_shards", "4"],
    "gather": ["--sp_backend", "gather"],
    "gather, windows": ["--sp_backend", "gather"],
    "ulysses, fsdp2": ["--sp_backend", "ulysses", "--engine", "fsdp2"],
    "ulysses, fsdp2, windows": ["--sp_backend", "ulysses", "--engine", "fsdp2"],
    "ulysses, fsdp2, chunks": ["--sp_backend", "ulysses", "--engine", "fsdp2", *CHUNKS],
    "ulysses, zero3": ["--sp_backend", "ulysses", "--engine", "deepspeed"],
    "ring, zero3, offload": ["--sp_backend", "ring", "--engine", "deepspeed", "--activation_offloading", "True"],
}


def arguments_of(case, flags, other_models, tmp_path, data):  # noqa: F811
    model = other_models["windows" if "windows" in case else "plain"]
    common = [*COMMON, *SHAPES["packed"][1], "--sp", "2", "--max_steps", "2", "--bf16", "True"]
    common += ["--gradient_accumulation_steps", str(MICRO_BATCHES), "--model_name_or_path", model]
    return [*common, *flags, "--dataset_name", data, "--output_dir", str(tmp_path / "out")]


@pytest.mark.parametrize(
    "runs", [pytest.param(RUNS, id="covering"), pytest.param(OTHER_RUNS, id="others", marks=pytest.mark.long)]
)
def test_the_host_waits_for_no_micro_batch_and_no_streams_race(runs, other_models, tmp_path, soft_gpus):  # noqa: F811
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(SHAPES["packed"][0] * 2 * MICRO_BATCHES))
    cases = {case: arguments_of(case, flags, other_models, tmp_path, data) for case, flags in runs.items()}
    for rank in soft_gpus.run(2, f"{__name__}:watched_runs", cases, backend=None):
        for case, run in rank.items():
            assert not run.races, case
            assert len(run.kernels) == MICRO_BATCHES, case
            assert min(run.kernels.values()) > 100, f"{case}: the watch saw {run.kernels}"
            assert not unexplained(run.waits), case


def unexplained(waits):
    """Waits in no list, with the list in which they were looked for."""
    found = []
    for span, before_last_kernel, reason, place in waits:
        known = BETWEEN_MICRO_BATCHES if span is None else IN_A_MICRO_BATCH if before_last_kernel else AT_ITS_END
        if not place.startswith(tuple(known)):
            found.append(f"{span or 'between micro-batches'}: {reason} in {place}")
    return Counter(found)
