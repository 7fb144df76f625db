"""TRL's offloading of activations, traced on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from trl.models import activation_offloading as offloading


def offloading_on_cpu(
    model: nn.Module, host_memory: Callable[[], AbstractContextManager[Any]], key_of: Callable[[Tensor], Any]
) -> offloading.OffloadActivations:
    """Return TRL's `--activation_offloading` for CPU tensors, with the copies that it makes on a GPU.

    A copy is host memory on the way out, and device memory on the way back.

    Args:
        host_memory: the context in which tensors count as host memory.
        key_of: identifies a tensor's memory: TRL takes its address, which fake tensors do not have.
    """
    current, unique_key = torch.accelerator.current_accelerator, offloading._get_unique_tensor_key
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")
    try:
        context = offloading.get_act_offloading_ctx_manager(model, use_pin_memory=False)
    finally:
        torch.accelerator.current_accelerator = current
    context.device_module, context.s1 = _NoStreams, _NoStreams.Stream()
    context.param_storages = set()  # by address, which fake tensors do not have; the check by type stays
    pack, unpack = context.pack_hook, context.unpack_hook

    def pack_on_host(tensor: Tensor) -> int:
        offloading._get_unique_tensor_key = key_of
        try:
            with host_memory():
                return pack(tensor)
        finally:
            offloading._get_unique_tensor_key = unique_key

    def unpack_from_host(number: int) -> Tensor:
        was_copied = context.tracker[number][1] and number not in context.fwd_stash
        tensor = unpack(number)
        return tensor.clone() if was_copied else tensor

    context.pack_hook, context.unpack_hook = pack_on_host, unpack_from_host
    return context


class _NoStreams:
    """torch.cuda's streams and events on a machine without a GPU, where everything has already happened."""

    class Stream:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args: None

    current_stream = Stream

    @staticmethod
    def empty_cache() -> None:
        """Do nothing; TRL calls this if bitsandbytes is imported."""

    @staticmethod
    def stream(stream: Any) -> AbstractContextManager:
        return nullcontext()
