"""Memory for data that is small on the disk and large once it is read: compressed files, and JSON of empty lists."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Self

RECORD_MEMORY_BYTES = 4 << 30
"""Of a JSON record, once it is parsed."""
GROUP_MEMORY_BYTES = 8 << 30
"""Of a parquet file's row group or an Arrow file's record batch, once it is unpacked."""

_STATM = Path("/proc/self/statm")


class MemoryBound:
    """Let this process take so many bytes more than it has now, besides files that are mapped into memory.

    Code that asks for more inside this context gets a MemoryError (pyarrow's ArrowMemoryError is one). Linux only.
    """

    def __init__(self, nbytes: int) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_DATA)
        self._limit = self._before[0]
        if _STATM.exists():
            held = int(_STATM.read_text().split()[5]) * resource.getpagesize()
            known = [limit for limit in self._before if limit != resource.RLIM_INFINITY]
            self._limit = min([held + nbytes, *known])

    def __enter__(self) -> Self:
        resource.setrlimit(resource.RLIMIT_DATA, (self._limit, self._before[1]))
        return self

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self._before)
