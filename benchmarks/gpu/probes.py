"""What is measured on the GPU. Each function runs in a process of its own, and returns numbers for one line."""

from __future__ import annotations

import gc
import gzip
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from longctx.attention.kernels.choose import candidates, choose_kernel
from longctx.attention.kernels.entries import Entries, Inputs
from longctx.attention.operator import varlen_attention
from longctx.layers import loss, loss_kernel
from longctx.layers.loss_tile import LogitScaling, TileLoss, kernel_agrees
from longctx.layers.loss_tile import _by_kernel as losses_by_kernel
from longctx.layers.loss_tile import _by_operators as losses_by_operators
from longctx.machine.measure import Work, measure_together
from longctx.machine.speeds import FLOPS_BACKWARD, FLOPS_FORWARD
from longctx.model.tiny import tiny_tokenizer
from longctx.ring import plan_ring
from longctx.training.callbacks import PROFILE_FOLDER

from ..attention.timing import clock_of, forward_backward, virtual_seconds
from ..attention.ways import CASES, Heads
from ..max_length.rank import Task, run_task

REPETITIONS = 5
"""Of each figure, of which the median counts, after one more to warm up."""


class Attention(NamedTuple):
    """A layer's attention, in bf16."""

    length: int
    """Tokens of the pack."""
    documents: str
    """A name of attention.ways.CASES, or `window`: one document whose tokens see the last sixteenth of it."""
    heads: tuple[int, int, int]
    """Query heads, key/value heads, and the size of each."""
    num_ranks: int = 1


def facts(_: None) -> dict[str, Any]:
    """Name, memory and capability of the GPU, and the kernel that a run would choose."""
    properties = torch.cuda.get_device_properties(0)
    chosen = choose_kernel(Inputs(torch.device("cuda", 0), torch.bfloat16, 128, 4))
    return {
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "kernel": chosen.name,
    }


def perform(argument: tuple[Sequence[tuple[Callable[[Any], dict[str, Any]], Any]], str]) -> None:
    """Call functions one after the other, and write what each returns to a file, a line of JSON each, when it ends."""
    calls, path = argument
    with open(path, "w", encoding="utf-8") as file:
        for function, given in calls:
            started = time.monotonic()
            found = function(given)
            file.write(json.dumps(found | {"wall": round(time.monotonic() - started, 1)}) + "\n")
            file.flush()
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


CHECKS = ("tests/gpu/test_gpu.py", "-k", "not every_model_type")


def checks(_: None) -> dict[str, Any]:
    """Outcomes of the checks against references that need a GPU, by number; those of every model type are left out."""
    checkout = Path(__file__).parents[2]
    if not (checkout / CHECKS[0]).exists():
        return {"absent": True}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *CHECKS]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    found: dict[str, Any] = {
        word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found | {"failures": failed, "output": done.stdout[-4000:] if done.returncode else ""}


def make_model(argument: tuple[Any, str]) -> dict[str, Any]:
    """Save a model of this configuration with random weights, and a tokenizer."""
    config, path = argument
    folder = Path(path)
    if not (folder / "tokenizer.json").exists():  # which is written last
        torch.manual_seed(0)
        with torch.device("cuda"):  # where random numbers come a hundred times sooner than from the CPU
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return {"bytes": sum(file.stat().st_size for file in folder.iterdir())}


def speeds(work: Work | None) -> dict[str, Any]:
    """As `longctx plan --measure` finds them."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    try:
        return asdict(measure_together(work=work))
    finally:
        dist.destroy_process_group()


def kernel_speed(argument: tuple[str, Attention]) -> dict[str, Any]:
    """FLOPs a second of one attention kernel, forward and backward."""
    name, about = argument
    kernel = next((kernel for kernel in candidates() if kernel.name == name), None)
    device = torch.device("cuda", 0)
    entries, lengths = _entries(about)
    heads, key_value_heads, size = about.heads
    if kernel is None or not kernel.fits(device, torch.bfloat16, size) or not kernel.takes(entries):
        return {"absent": True}
    q, k, v, grad = (
        x.contiguous()
        for x in Heads(query=heads, key_value=key_value_heads, dim=size).tensors(about.length, torch.bfloat16, device)
    )
    scale = size**-0.5
    out, lse = kernel.forward(q, k, v, entries, scale)
    forward = _median_seconds(lambda: kernel.forward(q, k, v, entries, scale))
    backward = _median_seconds(lambda: kernel.backward(grad, q, k, v, out, lse, entries, scale))
    elements = sum(_pairs(n, entries.window) for n in lengths) * heads * size
    return {
        "forward_seconds": forward,
        "backward_seconds": backward,
        "forward_flops": FLOPS_FORWARD * elements / forward,
        "backward_flops": FLOPS_BACKWARD * elements / backward,
    }


def _entries(about: Attention) -> tuple[Entries, Sequence[int]]:
    if about.documents == "window":
        lengths, window = [about.length], max(1, about.length // 16)
    else:
        lengths, window = CASES[about.documents](about.length, 1)[0].tolist(), None
    return Entries.of_documents(np.append(0, np.cumsum(lengths)), window), lengths


def _pairs(length: int, window: int | None) -> int:
    """Of query and key that a document has."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _median_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPETITIONS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


class HeadLoss(NamedTuple):
    """The loss of bf16 logits, and its gradient."""

    vocabulary: int
    tokens: int
    hidden: int | None = None
    """If given, the head's three matrix products are part of it, in tiles of `tile` tokens; else it is one tile."""
    tile: int = 0
    by_kernel: bool = True
    softcap: float | None = None
    is_top1: bool = True
    block: int = loss_kernel.BLOCK
    num_warps: int = loss_kernel.NUM_WARPS


def loss_speed(about: HeadLoss) -> dict[str, Any]:
    """Seconds of the loss, and logits a second."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    scaling = LogitScaling(softcap=about.softcap)
    if about.by_kernel and not kernel_agrees(device, dtype, about.softcap):
        return {"absent": True}
    loss_kernel.BLOCK, loss_kernel.NUM_WARPS = about.block, about.num_warps
    targets = torch.randint(about.vocabulary, (1, about.tokens), device=device)
    if about.hidden is None:
        compute = losses_by_kernel if about.by_kernel else losses_by_operators
        of = TileLoss(0.0, scaling, dtype, about.is_top1)
        products = torch.randn(about.tokens, about.vocabulary, device=device, dtype=dtype)
        seconds = _median_seconds(lambda: compute(of, products, targets[0], True))
    else:
        loss._tile_of = lambda *_: about.tile
        shapes = (1, about.tokens, about.hidden), (about.vocabulary, about.hidden)
        hidden, weight = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)

        def step() -> None:
            outputs = loss.fused_token_outputs(hidden, weight, None, targets, scaling=scaling, is_top1=about.is_top1)
            torch.autograd.grad(outputs.losses.sum(), (hidden, weight))

        seconds = _median_seconds(step)
    return {"seconds": seconds, "logits_per_second": about.tokens * about.vocabulary / seconds}


def ring_efficiency(about: Attention) -> dict[str, Any]:
    """Ranks of a ring, one after the other on this device and without communication, against one call for the pack.

    `slowest` and `mean` are a rank's seconds times the number of ranks, over those of the one call: 1 where a ring
    loses nothing. `planned` is what the plan's work says of the slowest.
    """
    heads, key_value_heads, size = about.heads
    cu_seqlens = np.append(0, np.cumsum(CASES[about.documents](about.length, 1)[0]))
    tensors = Heads(query=heads, key_value=key_value_heads, dim=size).tensors(
        about.length, torch.bfloat16, torch.device("cuda", 0)
    )
    clock = clock_of(tensors[0])

    whole = partial(varlen_attention, cu_seqlens=cu_seqlens)
    slowest, mean = [], []
    for _ in range(REPETITIONS + 1):
        one = sum(forward_backward(whole, tensors, clock)[1])
        ranks = virtual_seconds("ring", cu_seqlens, about.num_ranks, tensors).sum(1) * about.num_ranks
        slowest.append(float(ranks.max()) / one)
        mean.append(float(ranks.mean()) / one)
    return {
        "slowest": statistics.median(slowest[1:]),
        "mean": statistics.median(mean[1:]),
        "planned": plan_ring(cu_seqlens, about.num_ranks).imbalance,
    }


def train(task: Task) -> dict[str, Any]:
    """A few optimizer steps, and what of the copies to and from the host a trace shows beside kernels."""
    report = run_task(task)
    trace = Path(task.data).parent / PROFILE_FOLDER / "rank-0.json.gz"
    if trace.exists():
        with gzip.open(trace) as file:
            report |= overlap(json.load(file)["traceEvents"])
        trace.unlink()
    return report


COPIES = ("Memcpy HtoD", "Memcpy DtoH")


def overlap(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds in which host memory is copied to or from, and the part of them in which a kernel computes as well.

    Args:
        events: `traceEvents` of a trace of torch.profiler, in microseconds.
    """
    copies, kernels = [], []
    for event in events:
        of = event.get("cat")
        if of == "gpu_memcpy" and str(event["name"]).startswith(COPIES):
            copies.append((event["ts"], event["ts"] + event["dur"]))
        elif of == "kernel":
            kernels.append((event["ts"], event["ts"] + event["dur"]))
    copied, computed = _united(copies), _united(kernels)
    seconds = _seconds(copied)
    both = seconds + _seconds(computed) - _seconds(_united([*copied, *computed]))
    return {"copied_seconds": seconds / 1e6, "hidden": both / seconds if seconds else None}


def _seconds(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _united(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without overlaps, in order."""
    united: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united
