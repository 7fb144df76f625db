"""What a micro-batch must not do on a GPU: have the host wait for it, or let two streams use memory without an order.

A wait leaves the GPU without work until the host has launched the next kernels, and no result shows it; a race gives
wrong numbers, sometimes. The soft device (tests/softcuda) tells of every kernel, wait, event and piece of memory, and
`tests.softcuda.watch` finds both.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longctx import parallelize
from tests.few import few
from tests.model.test_models import make_batch, make_model
from tests.training.test_training import COMMON, SHAPES, log_of, make_documents, other_models, write_jsonl  # noqa: F401

MICRO_BATCHES = 2
PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_waits_and_races.md"

IN_A_MICRO_BATCH = {
    "longctx.layers.chunked.copies.synchronize": "Hidden states lie in host memory, where any code may read them."
}
"""Functions in which the host waits for a micro-batch that is under way, and why it has to."""

BETWEEN_MICRO_BATCHES = {
    "longctx.training.trainer.SequenceMixin._get_grad_norm": "A norm that is not finite stops the run.",
    "accelerate.utils.deepspeed.DeepSpeedEngineWrapper.get_global_grad_norm": "The same norm, of DeepSpeed.",
    "longctx.training.metrics.StepMetrics": "The log has sums over all ranks.",
    "transformers.trainer.Trainer._maybe_log_save_evaluate": "The log has the loss and the norm as numbers.",
    "transformers.trainer.Trainer.store_flos": "So has it the operations of all ranks.",
    "transformers.trainer_pt_utils.distributed_broadcast_scalars": "The same.",
    "trl.models.activation_offloading.OffloadActivations.__exit__": "TRL waits for its streams after a backward pass.",
    "deepspeed.": "ZeRO-3's reduction of gradients, its norm and its step are DeepSpeed's own.",
}
"""The same for a micro-batch that is done; a prefix stands for all functions that begin with it."""


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
    from longctx.training.trainer import SequenceTrainer
    from tests.softcuda.watch import Watchdog

    get_batch_samples, training_step = SequenceTrainer.get_batch_samples, SequenceTrainer.training_step
    backward, watch, kernels = torch.Tensor.backward, Watchdog(), Counter()

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
    "ulysses, fsdp2, tiles, offload": [
        *("--sp_backend", "ulysses", "--engine", "fsdp2"),
        *("--tiled_mlp_num_shards", "4", "--activation_offloading", "True"),
    ],
    "ulysses, zero3, chunks": ["--sp_backend", "ulysses", "--engine", "deepspeed", *CHUNKS],
}
OTHER_RUNS = {
    "local": ["--sp", "1"],
    "ring": ["--sp_backend", "ring"],
    "ring, windows": ["--sp_backend", "ring"],
    "ring, no checkpointing": ["--sp_backend", "ring", "--gradient_checkpointing", "False"],
    "ring, offload": ["--sp_backend", "ring", "--activation_offloading", "True"],
    "ring, padded": ["--sp_backend", "ring", *SHAPES["padded"][1]],
    "ring, chunks": ["--sp_backend", "ring", *CHUNKS],
    "gather, windows, chunks": ["--sp_backend", "gather", *CHUNKS],
    "ring, tiles": ["--sp_backend", "ring", "--tiled_mlp_num_shards", "4"],
    "gather": ["--sp_backend", "gather"],
    "gather, windows": ["--sp_backend", "gather"],
    "ulysses, fsdp2": ["--sp_backend", "ulysses", "--engine", "fsdp2"],
    "ulysses, fsdp2, windows": ["--sp_backend", "ulysses", "--engine", "fsdp2"],
    "ulysses, fsdp2, chunks": ["--sp_backend", "ulysses", "--engine", "fsdp2", *CHUNKS],
    "ulysses, fsdp2, exchange beside attention": [
        *("--sp_backend", "ulysses", "--engine", "fsdp2", "--overlap_exchange", "True")
    ],
    "ulysses, zero3": ["--sp_backend", "ulysses", "--engine", "deepspeed"],
    "ring, zero3, offload": ["--sp_backend", "ring", "--engine", "deepspeed", "--activation_offloading", "True"],
}
ON_FOUR = {
    "hybrid": ["--sp", "4", "--sp_backend", "hybrid", "--ring_size", "2"],
    "hybrid, windows": ["--sp", "4", "--sp_backend", "hybrid", "--ring_size", "2"],
    "hybrid, chunks": ["--sp", "4", "--sp_backend", "hybrid", "--ring_size", "2", *CHUNKS],
}


def arguments_of(case, flags, other_models, tmp_path, data):  # noqa: F811
    model = other_models["windows" if "windows" in case else "plain"]
    common = [*COMMON, *SHAPES["packed"][1], "--sp", "2", "--max_steps", "2", "--bf16", "True"]
    common += ["--gradient_accumulation_steps", str(MICRO_BATCHES), "--model_name_or_path", model]
    return [*common, *flags, "--dataset_name", data, "--output_dir", str(tmp_path / case)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "runs"), [(2, RUNS), (2, OTHER_RUNS), (4, ON_FOUR)], ids=["covering", "others", "four"]
)
def test_the_host_waits_for_no_micro_batch_and_no_streams_race(ranks, runs, other_models, tmp_path, soft_gpus):  # noqa: F811
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(SHAPES["packed"][0] * 2 * MICRO_BATCHES))
    cases = {case: arguments_of(case, flags, other_models, tmp_path, data) for case, flags in runs.items()}
    for rank in soft_gpus.run(ranks, f"{__name__}:watched_runs", cases, backend=None, timeout=150 * ranks):
        for case, run in rank.items():
            assert not run.races, case
            assert len(run.kernels) == MICRO_BATCHES, case
            assert min(run.kernels.values()) > 100, f"{case}: the watch saw {run.kernels}"
            assert not unexplained(run.waits), case


def unexplained(waits):
    """Waits that are in neither list, and their number."""
    found = []
    for span, before_last_kernel, reason, place in waits:
        known = BETWEEN_MICRO_BATCHES if span is None or not before_last_kernel else IN_A_MICRO_BATCH
        if not place.startswith(tuple(known)):
            found.append(f"{span or 'between micro-batches'}: {reason} in {place}")
    return Counter(found)


# What has the host wait, as CUDA's kernels and copies do


def waits_of_calls() -> dict[str, list[str]]:
    """The reasons of the waits in each of CALLS."""
    from tests.softcuda.watch import Watchdog

    found = {}
    for name, (call, _) in CALLS.items():
        given = Given(
            x=torch.arange(6.0, device="cuda"),
            at=torch.tensor([0, 2], device="cuda"),
            pageable=torch.ones(6),
            pinned=torch.ones(6).pin_memory(),
            event=torch.cuda.Event(),
        )
        given.event.record()
        with Watchdog() as watch:
            call(given)
        found[name] = [wait.reason for wait in watch.waits]
    return found


class Given(NamedTuple):
    x: torch.Tensor
    at: torch.Tensor
    pageable: torch.Tensor
    pinned: torch.Tensor
    event: torch.cuda.Event


CALLS: dict[str, tuple[Callable[[Given], Any], bool]] = {
    "x.item()": (lambda g: g.x[0].item(), True),
    "bool(x)": (lambda g: bool((g.x > 3).any()), True),
    "x.tolist()": (lambda g: g.x.tolist(), True),
    "x.cpu()": (lambda g: g.x.cpu(), True),
    "x.nonzero()": (lambda g: g.x.nonzero(), True),
    "x.unique()": (lambda g: g.x.unique(), True),
    "x[mask]": (lambda g: g.x[g.x > 3], True),
    "x[mask] = tensor": (lambda g: g.x.__setitem__(g.x > 3, g.x[:2]), True),
    "x[mask] = number": (lambda g: g.x.__setitem__(g.x > 3, 0.0), False),
    "x[[0, 2]]": (lambda g: g.x[[0, 2]], True),
    "x[indices]": (lambda g: g.x[g.at], False),
    "x[indices] = tensor": (lambda g: g.x.__setitem__(g.at, g.x[:2]), False),
    "x[0:2]": (lambda g: g.x[0:2] + 1, False),
    "torch.equal": (lambda g: torch.equal(g.x, g.x), True),
    "torch.where with three arguments": (lambda g: torch.where(g.x > 3, g.x, 0.0), False),
    "repeat_interleave": (lambda g: g.at.repeat_interleave(g.at), True),
    "repeat_interleave of a known size": (lambda g: g.at.repeat_interleave(g.at, output_size=2), False),
    "repeat_interleave by a number": (lambda g: g.x.repeat_interleave(2), False),
    "torch.tensor(number)": (lambda g: torch.tensor(1.0, device="cuda"), True),
    "torch.full": (lambda g: torch.full((), 1.0, device="cuda"), False),
    "a product with a number of the host": (lambda g: g.x * torch.tensor(2.0), False),
    "pageable to the GPU": (lambda g: g.pageable.to("cuda"), True),
    "pageable to the GPU, non_blocking": (lambda g: g.pageable.to("cuda", non_blocking=True), True),
    "pinned to the GPU": (lambda g: g.pinned.to("cuda"), True),
    "pinned to the GPU, non_blocking": (lambda g: g.pinned.to("cuda", non_blocking=True), False),
    "to the host, non_blocking": (lambda g: g.x.to("cpu", non_blocking=True), False),  # to memory that it pins
    "to pageable memory, non_blocking": (lambda g: g.pageable.copy_(g.x, non_blocking=True), True),
    "to pinned memory, non_blocking": (lambda g: g.pinned.copy_(g.x, non_blocking=True), False),
    "torch.cuda.synchronize": (lambda g: torch.cuda.synchronize(), True),
    "Stream.synchronize": (lambda g: torch.cuda.current_stream().synchronize(), True),
    "Event.synchronize": (lambda g: g.event.synchronize(), True),
    "Event.query": (lambda g: g.event.query(), False),
    "Stream.wait_event": (lambda g: torch.cuda.Stream().wait_event(g.event), False),
}
"""What is called, and whether the host waits: by c10::cuda::memcpy_and_sync and stream_synchronize, at which CUDA's
sync debug mode warns, or by cudaMemcpyAsync of memory that is not pinned, at which it does not."""


def test_what_has_the_host_wait(soft_gpus):
    [found] = soft_gpus.run(1, f"{__name__}:waits_of_calls", backend=None)
    assert {name: bool(reasons) for name, reasons in found.items()} == {name: wait for name, (_, wait) in CALLS.items()}


# Planted bugs, in a step of a small model on FSDP2 with a ring of two GPUs


@contextmanager
def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """make(the function) stands in its place."""
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def _first(spoil: Callable[..., Any]) -> Callable[[Any], Any]:
    """Call `spoil` with the same arguments first."""

    def make(function):
        def run(*args, **kwargs):
            spoil(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    return make


def _on_another_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args, **kwargs):
        with torch.cuda.stream(torch.cuda.Stream()):
            return function(*args, **kwargs)

    return run


def _used_on_another_stream(recorded: str) -> Callable[..., None]:
    def spoil(kernel, q, *_: Any) -> None:
        copy, side, third = q.clone(), torch.cuda.Stream(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy.sum()
        if recorded == "one that waits":
            third.wait_stream(side)
        if recorded != "none":
            copy.record_stream(side if recorded == "the stream" else third)
        del copy
        torch.empty_like(q)  # may be given the same memory, on which `side` has yet to work

    return spoil


def _plants() -> dict[str, Callable[[], Any]]:
    from contextlib import nullcontext

    from longctx import parallel
    from longctx.attention.kernels import entries
    from longctx.attention.kernels.varlen import AtenFlashKernel
    from longctx.ring import attention, transport
    from longctx.sequence.batch import AttentionContext

    def blocking(_):
        return lambda tensor, device: tensor.to(device)

    kernel, nothing = AtenFlashKernel, lambda *_: None
    return {
        "nothing": nullcontext,
        "int(tensor) in attention": lambda: _instead(kernel, "_forward", _first(lambda _, q, *__: int(q.sum()))),
        "item() in attention's backward": lambda: _instead(
            kernel, "_backward", _first(lambda _, g, *__: g.sum().item())
        ),
        "a condition on the device": lambda: _instead(
            attention, "merge", _first(lambda out, *_: bool((out > 9).any()))
        ),
        "boundaries copied to the host": lambda: _instead(
            kernel, "_forward", _first(lambda _, q, k, v, varlen, *__: varlen.cu_seqlens_q.cpu())
        ),
        "a mask as an index": lambda: _instead(kernel, "_forward", _first(lambda _, q, *__: q[q > 0])),
        "label positions asked for": lambda: _instead(AttentionContext, "learnt_positions", lambda _: nothing),
        "a number copied to the device": lambda: _instead(
            entries, "take", _first(lambda x, rows: torch.tensor(3.0, device=x.device))
        ),
        "a batch from pageable memory": lambda: _instead(parallel, "send", blocking),
        "torch.cuda.synchronize": lambda: _instead(transport, "_wait", _first(lambda _: torch.cuda.synchronize())),
        "FSDP2's event waits dropped": lambda: _instead(torch.cuda.Stream, "wait_event", lambda _: nothing),
        "messages that another stream waits for": lambda: _instead(transport, "_wait", _on_another_stream),
        "memory freed that another stream uses": lambda: _instead(
            kernel, "_forward", _first(_used_on_another_stream("none"))
        ),
        "the same with record_stream": lambda: _instead(
            kernel, "_forward", _first(_used_on_another_stream("the stream"))
        ),
        "the same with record_stream of a stream that waits for it": lambda: _instead(
            kernel, "_forward", _first(_used_on_another_stream("one that waits"))
        ),
        "the same with record_stream of a stream that does not": lambda: _instead(
            kernel, "_forward", _first(_used_on_another_stream("one that does not wait"))
        ),
    }


def planted_steps() -> dict[str, list[str]]:
    """What is found in a step with each of the planted bugs."""
    from tests.softcuda.watch import Watchdog

    torch.cuda.set_device(dist.get_rank())
    model, sequence = parallelize(make_model("llama"), 2, sp_backend="ring")
    model.to(sequence.device)
    mesh = init_device_mesh("cuda", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step() -> None:
        shard = sequence.shard(make_batch())
        with torch.autocast("cuda", torch.bfloat16):
            outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
        sequence.reduce(outputs.losses, 100).backward()

    step()
    found = {}
    for name, plant in _plants().items():
        with plant(), Watchdog() as watch:
            step()
        found[name] = [*(f"the host waits: {wait}" for wait in watch.waits), *watch.races]
    return found


@pytest.fixture(scope="module")
def planted(soft_gpus):
    return soft_gpus.run(2, f"{__name__}:planted_steps", timeout=100)


CAUGHT = {
    "nothing": None,
    "int(tensor) in attention": r"the host waits: aten::_local_scalar_dense",
    "item() in attention's backward": r"the host waits: aten::_local_scalar_dense",
    "a condition on the device": r"the host waits: aten::_local_scalar_dense",
    "boundaries copied to the host": r"the host waits: blocking copy to the host",
    "a mask as an index": r"the host waits: aten::nonzero",
    "label positions asked for": r"the host waits: aten::nonzero in longctx.layers.loss._tiles",
    "a number copied to the device": r"the host waits: blocking copy to the device",
    "a batch from pageable memory": r"the host waits: blocking copy to the device",
    "torch.cuda.synchronize": r"the host waits: torch.cuda.synchronize",
    "FSDP2's event waits dropped": r"does not wait for nccl::_?all_gather",
    "messages that another stream waits for": r"does not wait for nccl::recv",
    "memory freed that another stream uses": r"was freed while aten::sum.* may use it",
    "the same with record_stream": None,
    "the same with record_stream of a stream that waits for it": None,
    "the same with record_stream of a stream that does not": r"was freed while aten::sum.* may use it",
}
"""What says so, a regular expression; None where nothing is wrong."""


@pytest.mark.parametrize("bug", few(CAUGHT, 5))
def test_a_planted_bug_is_seen_in_a_step(bug, planted):
    for found in planted:
        assert found.keys() == CAUGHT.keys()
        if CAUGHT[bug] is None:
            assert not found[bug]
        else:
            assert any(re.search(CAUGHT[bug], message) for message in found[bug]), found[bug][:5]


def test_the_page_of_waits_and_races_is_this_one():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") or line.startswith("| *")]
    wanted = [
        f"| `{place}` | {why} |" for known in (IN_A_MICRO_BATCH, BETWEEN_MICRO_BATCHES) for place, why in known.items()
    ]
    wanted += [f"| *{bug}* | {_seen_as(pattern)} |" for bug, pattern in CAUGHT.items()]
    assert rows == wanted, "\n".join(wanted)


def _seen_as(pattern: str | None) -> str:
    if pattern is None:
        return "nothing, as it should be"
    return "a wait" if pattern.startswith("the host waits") else "a race"
