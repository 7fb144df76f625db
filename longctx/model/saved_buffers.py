"""Buffers that a model saves beside its weights, given to every rank when FSDP2 wraps the model.

Examples are the router's correction of GLM-4.5 and the constants of Apertus's activation. accelerate loads the weights
on rank 0 alone and hands on what it finds in the state dict, all of which it takes for sharded parameters. Buffers
outside of the state dict it puts back by itself, as each rank has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def saved_buffers_handed_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Give every rank the saved buffers of rank 0, and keep them out of the state dict inside of the context.

    Called by all ranks together, around the call that wraps the model.

    Args:
        device: where the process group communicates.
    """
    saved = [(module, name) for module in model.modules() for name in _saved_names(module)]
    for module, name in saved:
        buffer = module._buffers[name]
        assert buffer is not None, "a name of _saved_names"
        value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        dist.broadcast(value, src=0)
        module._buffers[name] = value
        module._non_persistent_buffers_set.add(name)
    try:
        yield
    finally:
        for module, name in saved:
            module._non_persistent_buffers_set.discard(name)


def _saved_names(module: nn.Module) -> list[str]:
    left_out = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if buffer is not None and name not in left_out]
