"""The memory of a training step: bytes by category, at the peak and over time, counted storage by storage.

A dispatch mode sees every tensor that an operator returns. A storage counts from then until it is freed. Nothing is
sampled or estimated, so the same step gives the same trace. It works around

- a step over `FakeTensorMode`, where no memory is taken and a model of any size runs on any machine
  (`benchmarks.memory.step` builds longctx's own step), and
- a real step on the CPU, with FSDP2 or DeepSpeed on gloo.

It differs from `torch.distributed._tools.mem_tracker.MemTracker` in these points:

- Host memory is told apart from the device's, even on a machine without a device.
- An activation is what outlives the forward pass, not all that the forward pass makes.
- Every allocation keeps its name.

On a step to which none of these applies the two agree to the byte (tests/forecast/test_memory_trace.py).

What an operator takes and gives back inside itself is not seen, so an upper bound has to leave room for it. For
FlashAttention's backward pass under fake tensors it is known and counted, see `FLASH_WORKSPACE`.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx.sequence.host_tensors import allocates_host_memory

from .unseen import FLASH_WORKSPACE, copies_to_host, watched_resizes

PARAMETERS = "parameters"
"""Parameters that a rank holds throughout the step."""
GATHERED = "gathered parameters"
"""Whole parameters that FSDP2 and ZeRO-3 gather for as long as a layer needs them."""
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer states"
ACTIVATIONS = "activations"
"""Tensors made in the forward pass and alive when the backward pass begins."""
INPUTS = "inputs"
"""The batch: tensors from before the trace that are none of the above."""
TEMPORARY = "temporary"
"""All other tensors: freed before the backward pass begins, or made in it, recomputed layers included."""
CATEGORIES = (PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER_STATES, ACTIVATIONS, INPUTS, TEMPORARY)


@dataclass(eq=False, kw_only=True)
class Allocation:
    """One storage, described by the tensor that it was first seen as."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str
    """The operator that made it; empty if it existed before the trace."""
    module: str
    """The innermost module that was running, or in a backward pass the autograd node."""
    phase: str
    """When it was made: `before`, `forward`, `backward` or `optimizer`."""
    category: str
    on_host: bool
    nbytes: int = 0
    """The most bytes that it held."""

    def __str__(self) -> str:
        where = "host " if self.on_host else ""
        shape = ", ".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        made = f"{self.op} in {self.module or 'no module'}" if self.op else self.module
        return f"{_gib(self.nbytes)} {where}{self.category}: {dtype} [{shape}] by {made}, {self.phase}"


@dataclass(frozen=True, eq=False)
class MemoryTrace:
    """The memory of one traced step in bytes, predicted if the step ran on fake tensors."""

    peak_bytes: int
    """The most bytes that the device held at once."""
    by_category: dict[str, int]
    """`peak_bytes` by category, in the order of `CATEGORIES`."""
    host_peak_bytes: int
    """The most bytes that the host held at once on the device's behalf."""
    host_by_category: dict[str, int]
    largest: tuple[Allocation, ...]
    """The device's allocations at its peak, the largest first."""
    allocations: tuple[Allocation, ...]
    """All allocations that were seen, in order."""
    timeline: tuple[tuple[int, int], ...]
    """(device, host) bytes after every allocation and release."""
    peaks: dict[str, tuple[int, int]]
    """The most (device, host) bytes in each part of the step, such as `forward model.layers.N.mlp` or `backward
    MmBackward0`. Each is linear in the length and in the number of layers; their maximum is not."""

    def table(self, num_largest: int = 8) -> str:
        """Return a readable table by category and by tensor."""
        lines = [f"device peak {_gib(self.peak_bytes)}, host peak {_gib(self.host_peak_bytes)}"]
        for name in CATEGORIES:
            device, host = self.by_category[name], self.host_by_category[name]
            if device or host:
                lines.append(f"  {name:20} {_gib(device):>12}" + (f"   host {_gib(host)}" if host else ""))
        lines.append("largest at the peak")
        return "\n".join(lines + [f"  {allocation}" for allocation in self.largest[:num_largest]])


def by_category(held: dict[Allocation, int]) -> dict[str, int]:
    sums = dict.fromkeys(CATEGORIES, 0)
    for allocation, nbytes in held.items():
        sums[allocation.category] += nbytes
    return sums


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.2f} MiB"


class MemoryTracer(TorchDispatchMode):
    """A context that traces the memory of what runs inside it.

        with MemoryTracer(model, optimizer) as tracer:
            loss(model(**batch)).backward()
            optimizer.step()
        print(tracer.trace().table())

    Enter it inside FakeTensorMode, if there is one. Trace one step at a time: the peak of several would be that of all.

    Args:
        model: the model whose parameters are there from the start, in any wrapping: FSDP2's shards, ZeRO's partitions.
        optimizer: the torch optimizer; with DeepSpeed its inner one.
        on_host: categories of `PARAMETERS`, `GRADIENTS` and `OPTIMIZER_STATES` that an engine keeps on the host. On a
            machine without a GPU nothing else shows it.

    Raises:
        ValueError: for a category in `on_host` that no engine offloads.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        on_host: Iterable[str] = (),
    ):
        super().__init__()
        states = (PARAMETERS, GRADIENTS, OPTIMIZER_STATES)
        if unknown := set(on_host) - set(states):
            raise ValueError(f"on_host {sorted(unknown)} is not what an engine offloads. Use {', '.join(states)}.")
        self._model, self._optimizer, self._on_host = model, optimizer, frozenset(on_host)
        self._names = {} if model is None else {module: name for name, module in model.named_modules()}
        self._live: dict[int, tuple[Allocation, int, weakref.ref]] = {}
        self._allocations: list[Allocation] = []
        self._events: list[tuple[Allocation, int, str]] = []
        self._modules: list[str] = []
        self._phase = "before"
        self._graph_task = -1
        self._is_open = False
        self._cleanup = ExitStack()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self):
        self._start()
        self._is_open = True
        return super().__enter__()

    def __exit__(self, *args):
        self._is_open = False
        self._finish()
        return super().__exit__(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return func(*args)  # asked for more often than all else, and no memory is taken
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # they run first, and come back with the tensors inside them
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default and active_fake_mode():
            result = args[0]  # the fake operator would return a copy
        else:
            result = func(*args, **kwargs)
        if self._is_traced_mode():  # not the fake tensors with which DTensor works out shapes
            self._follow_backward()
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor):
                    self._see(x, op="", phase="before", category=INPUTS)
            op = _op_name(func)
            if (workspace := FLASH_WORKSPACE.get(op)) and active_fake_mode():
                self._count_workspace(op, workspace(*args))
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    self._see(x, op=op, phase=self._phase)
        return result

    def trace(self) -> MemoryTrace:
        """Return the trace, once the tracer is left."""
        now = {False: 0, True: 0}  # bytes on device and host
        peaks, peak_at = dict(now), {False: -1, True: -1}
        timeline = []
        parts: dict[str, tuple[int, int]] = {}
        for i, (allocation, change, part) in enumerate(self._events):
            side = allocation.on_host
            now[side] += change
            if now[side] > peaks[side]:
                peaks[side], peak_at[side] = now[side], i
            timeline.append((now[False], now[True]))
            device, host = parts.get(part, (0, 0))
            parts[part] = (max(device, now[False]), max(host, now[True]))
        held = {side: self._held(peak_at[side], on_host=side) for side in now}
        return MemoryTrace(
            peak_bytes=peaks[False],
            by_category=by_category(held[False]),
            host_peak_bytes=peaks[True],
            host_by_category=by_category(held[True]),
            largest=tuple(sorted(held[False], key=lambda x: -held[False][x])),
            allocations=tuple(self._allocations),
            timeline=tuple(timeline),
            peaks=parts,
        )

    def _held(self, event: int, *, on_host: bool) -> dict[Allocation, int]:
        """Return the bytes that each allocation held after this event."""
        held: Counter[Allocation] = Counter()
        for allocation, change, _ in self._events[: event + 1]:
            if allocation.on_host == on_host:
                held[allocation] += change
        return {allocation: nbytes for allocation, nbytes in held.items() if nbytes}

    # Allocations and releases

    def _start(self) -> None:
        self._fake_mode = active_fake_mode()
        self._mark_states()
        self._phase = "forward"
        keep = self._cleanup.callback
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ):
            keep(handle.remove)
        self._cleanup.enter_context(watched_resizes(self._resized))
        self._cleanup.enter_context(copies_to_host())

    def _finish(self) -> None:
        self._mark_states()
        self._cleanup.close()

    def _is_traced_mode(self) -> bool:
        return active_fake_mode() is self._fake_mode

    def _see(self, tensor: Tensor, *, op: str, phase: str, category: str = TEMPORARY) -> Allocation | None:
        """Count the storage of a tensor if it is new, and return its allocation."""
        if tensor.device.type == "meta" or not hasattr(tensor, "untyped_storage"):
            return None
        storage = tensor.untyped_storage()
        if (known := self._live.get(storage._cdata)) is not None:
            if known[1] != storage.nbytes():
                self._resized(storage)
            return known[0]
        allocation = Allocation(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            op=op,
            module=self._where(),
            phase=phase,
            category=category,
            on_host=bool(op) and allocates_host_memory(),
        )
        key = storage._cdata
        self._live[key] = (allocation, 0, weakref.ref(storage, lambda _: self._freed(key)))
        self._allocations.append(allocation)
        self._set_size(key, storage.nbytes())
        return allocation

    def _set_size(self, key: int, nbytes: int) -> None:
        allocation, before, ref = self._live[key]
        if nbytes != before:
            allocation.nbytes = max(allocation.nbytes, nbytes)
            self._live[key] = (allocation, nbytes, ref)
            self._events.append((allocation, nbytes - before, self._part()))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            self._set_size(storage._cdata, storage.nbytes())

    def _freed(self, key: int) -> None:
        if self._is_open:  # what is freed after the trace does not count
            self._set_size(key, 0)
        self._live.pop(key, None)

    def _count_workspace(self, op: str, buffers: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Count buffers that an operator takes and gives back before it returns."""
        made, part = [], self._part()
        for name, (shape, dtype) in buffers.items():
            allocation = Allocation(
                shape=shape,
                dtype=dtype,
                op=f"{op} ({name})",
                module=self._where(),
                phase=self._phase,
                category=TEMPORARY,
                on_host=False,
                nbytes=torch.Size(shape).numel() * dtype.itemsize,
            )
            made.append(allocation)
            self._allocations.append(allocation)
        self._events += [(allocation, allocation.nbytes, part) for allocation in made]
        self._events += [(allocation, -allocation.nbytes, part) for allocation in made]

    # Names and categories

    def _where(self) -> str:
        if self._modules:
            return self._modules[-1]
        node = torch._C._current_autograd_node()
        return node.name() if node is not None else ""

    def _part(self) -> str:
        return f"{self._phase} {_without_numbers(self._where())}"

    def _follow_backward(self) -> None:
        """Follow the phases of a step; what is alive when the backward pass begins is an activation."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task == self._graph_task:
            return
        if self._graph_task == -1:
            for allocation, _, _ in self._live.values():
                if allocation.phase == "forward" and allocation.category == TEMPORARY:
                    allocation.category = ACTIVATIONS
        self._graph_task = graph_task
        if self._phase != "optimizer":
            self._phase = "forward" if graph_task == -1 else "backward"

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._modules.append(self._names.get(module) or type(module).__name__)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()
        for parameter in module.parameters(recurse=False):
            self._mark(parameter, GATHERED)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._mark_states()
        self._phase = "optimizer"

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._mark_states(optimizer)
        self._phase = "forward"

    def _mark_states(self, optimizer: Optimizer | None = None) -> None:
        """Set the categories of parameters, gradients and optimizer states, new and old."""
        parameters = [] if self._model is None else list(self._model.parameters())
        for parameter in parameters:
            self._mark(getattr(parameter, "ds_tensor", parameter), PARAMETERS, "parameter")
            self._mark(parameter.grad, GRADIENTS, "gradient")
        for buffer in [] if self._model is None else self._model.buffers():
            self._mark(buffer, PARAMETERS, "buffer")
        optimizer = optimizer or self._optimizer
        if optimizer is None:
            return
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            self._mark(parameter, PARAMETERS if self._model is None else OPTIMIZER_STATES, "master parameter")
            self._mark(parameter.grad, GRADIENTS, "gradient")
        for state in optimizer.state.values():
            for name, x in state.items():
                self._mark(x, OPTIMIZER_STATES, name)

    def _mark(self, tensor: Any, category: str, name: str = "") -> None:
        """Set the category of a tensor, unless it has a final one."""
        if not isinstance(tensor, Tensor):
            return
        tensor = _inner(tensor)
        if self._phase != "before" and tensor.untyped_storage()._cdata not in self._live:
            return  # nothing has used it yet
        allocation = self._see(tensor, op="", phase="before", category=category)
        if allocation is None:
            return
        if self._phase == "before":
            allocation.module = allocation.module or name
        if allocation.category in (TEMPORARY, ACTIVATIONS, INPUTS):
            is_held = category == GATHERED and self._model is None and allocation.phase == "before"
            allocation.category = PARAMETERS if is_held else category
        allocation.on_host = allocation.on_host or allocation.category in self._on_host


def _inner(tensor: Tensor) -> Tensor:
    """Return the local part of a distributed tensor."""
    while isinstance(tensor, (DTensor, AsyncCollectiveTensor)):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor


@functools.cache
def _without_numbers(module: str) -> str:
    return re.sub(r"(?<=\.)\d+\b", "N", module)


def _op_name(func: Any) -> str:
    return str(func).removesuffix(".default")
