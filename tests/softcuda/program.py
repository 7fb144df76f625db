"""Watch a program that a test starts as a process of its own: with SOFTCUDA_WATCH=1 it ends with an error for

    a hazard         host memory or a result that is read before it is there, or changed while it is being read
    a race           memory that two streams use without an order
    a hidden wait    of the host for the device, between the first and the last kernel of a micro-batch, in a function
                     of longctx that EXPLAINED does not name, in what this calls, or in a backward pass

What was found is printed with its place, and the exit code is FAILED. Processes that the program starts or forks are
watched likewise; one that ends by a signal, or by os._exit with another code than 0, says nothing of what was found.

A micro-batch begins when `SequenceParallel.shard` cuts a batch, or when a module is called with gradients enabled, and
it ends with its backward pass. The first micro-batches of a process fill caches, and may wait.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tests.softcuda import runtime
from tests.softcuda.library import finished_hazards
from tests.softcuda.watch import BACKWARD, Wait, Watchdog

FAILED = 70
"""Exit code of a program in which something was found."""
WARM_UP = 2
"""First micro-batches of a process, in which the host may wait."""
FSDP1 = "torch.distributed.fsdp._runtime_utils._unshard"
"""Its limit of gathers in flight, at which the host waits by torch's design; FSDP2 has none."""
EXPLAINED = {
    "longctx.layers.chunked.copies.synchronize": "Hidden states lie in host memory, where any code may read them.",
    "longctx.layers.loss_tile._problem": "The loss's kernel is tried once a process, before its first use.",
    "longctx.parallel.SequenceParallel.count_label_tokens": "A loop may count the step's labels when it wants to.",
    "longctx.verify.": "Its checks look at results on the host.",
}
"""Functions of longctx in which the host may wait in a micro-batch, and why; a prefix stands for all that begin so."""

_SHARD = "longctx.parallel.SequenceParallel.shard"
_exit_at_once = os._exit
_watch = Watchdog(keeps_waits=False)
_num_micro_batches = _depth = 0
"""Micro-batches so far, and backward passes that are under way within each other."""


def watch() -> None:
    """Watch this process and those that it forks, until they end."""
    _watch.start()
    torch.nn.modules.module.register_module_forward_pre_hook(_begin)
    torch.autograd.backward = _ending_micro_batches(torch.autograd.backward)  # which Tensor.backward calls
    torch.autograd.grad = _ending_micro_batches(torch.autograd.grad)
    atexit.register(_check)  # before anything else is registered, and so called after all else
    os._exit = _exit  # type: ignore[assignment]  # with which processes of multiprocessing end, and ranks of a sweep


def _begin(module: Any, inputs: Any) -> None:
    global _num_micro_batches
    if _watch.span is None and torch.is_grad_enabled() and runtime.uses_cuda():
        _num_micro_batches += 1
        _watch.span = f"micro-batch {_num_micro_batches}"


def _ending_micro_batches(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        global _depth
        _depth += 1
        try:
            return differentiate(*arguments, **keywords)
        finally:
            _depth -= 1
            if _depth == 0:  # checkpoints and chunked layers go backward within a backward pass
                _watch.span = None
                _watch.keeps_waits = _num_micro_batches >= WARM_UP

    return run


def _exit(code: int) -> NoReturn:
    if code == 0:
        _check()
    _exit_at_once(code)


def _check() -> None:
    """End the process with FAILED if something was found in it."""
    if not runtime.uses_cuda():
        return
    try:
        _watch.stop()
        waits = [f"the host waits: {wait}" for wait in hidden_waits(_watch.waits)]
        found = list(dict.fromkeys([*waits, *_watch.races, *finished_hazards()]))
    except BaseException as error:
        found = [f"the watch has failed: {type(error).__name__}: {error}"]
    if found:
        print("\n".join(f"soft GPU: {line}" for line in found), file=sys.stderr, flush=True)
        sys.stdout.flush()
        _exit_at_once(FAILED)


def _is_ours(wait: Wait) -> bool:
    """Return whether longctx makes the host wait, and neither the program's own loop nor another library."""
    calls = [call for call in wait.calls if not call.startswith(("torch.", "tests.", "__main__."))]
    return calls[0].startswith("longctx.") if calls else wait.place == BACKWARD


def hidden_waits(waits: list[Wait]) -> list[Wait]:
    """Return the waits in a micro-batch that no function of EXPLAINED explains."""
    found = []
    for wait in waits:
        is_within = (wait.span is not None and wait.before_last_kernel) or _SHARD in wait.calls
        if is_within and _is_ours(wait) and FSDP1 not in wait.calls and not wait.place.startswith(tuple(EXPLAINED)):
            found.append(wait)
    return found
