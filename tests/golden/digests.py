"""Digests of what goldens record: the same on every machine, for arrays of any dtype and for JSON values."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xxhash
from torch import Tensor


def digest(*values: Any) -> str:
    """Return 16 hexadecimal characters for values in their order.

    Arrays, tensors and lists of numbers count with their shape, as int64 or float64, so that the dtype does not matter;
    anything else counts as JSON.
    """
    state = xxhash.xxh3_64()
    for value in values:
        array = _array(value)
        if array is None:
            state.update(json.dumps(value, sort_keys=True).encode())
        else:
            state.update(f"{array.dtype.str}{array.shape}".encode())
            state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def _array(value: Any) -> np.ndarray | None:
    if not isinstance(value, Tensor | np.ndarray | list | tuple):
        return None
    try:
        array = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    except ValueError:  # lists of several lengths
        return None
    if array.size == 0:
        return np.zeros(array.shape, "<i8")
    return array.astype("<f8" if array.dtype.kind == "f" else "<i8") if array.dtype.kind in "iubf" else None
