"""Storages of the device that Python makes and resizes without an operator, as FSDP2 does."""

from __future__ import annotations

from typing import Any

import torch

_resize = torch.UntypedStorage.resize_
_new = torch.UntypedStorage.__new__


def install() -> None:
    """Send torch.UntypedStorage's constructor and `resize_` to the device where they are for it."""
    torch.UntypedStorage.resize_ = _resize_storage  # type: ignore[method-assign]
    torch.UntypedStorage.__new__ = _new_storage  # type: ignore[method-assign]


def _resize_storage(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _resize(self, size)
    holder = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self, 0, (0,))
    torch.ops.softcuda.resize_storage(holder, size)
    return self


def _new_storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
    if device is None or torch.device(device).type != "cuda":
        return _new(cls, *args, **(kwargs if device is None else kwargs | {"device": device}))
    size = args[0] if args else 0
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
