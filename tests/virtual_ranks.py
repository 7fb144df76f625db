"""Ranks that are threads of one process and share its device, with messages that really arrive.

NCCL has one GPU a rank. Where there is one GPU, ranks are threads: collectives are those of torch's own threaded
process group, and messages from rank to rank are handed over here.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

SECONDS = 60
"""After which a message that has not come is an error."""


class _Receipt:
    """What `wait` of a receive does: the message is copied on the stream that waits, as NCCL's is ready there."""

    def __init__(self, box: queue.Queue[Tensor], buffer: Tensor):
        self._box, self._buffer = box, buffer

    def wait(self) -> bool:
        self._buffer.copy_(self._box.get(timeout=SECONDS))
        return True


class _Sent:
    def wait(self) -> bool:
        return True


def on_virtual_ranks(num_ranks: int, function: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    """Call `function(rank, group of all)` in a thread for each rank; return what each returns, by rank.

    Raises:
        Exception: of the first rank that failed.
    """
    boxes: dict[tuple[str, int, int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
    numbers: dict[tuple[str, str, int, int], Iterator[int]] = defaultdict(itertools.count)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # names of groups are a thread's own
    store = dist.HashStore()

    def exchange(operations: Sequence[dist.P2POp]) -> list[Any]:
        works: list[Any] = []
        for operation in operations:
            is_sent, rank = operation.op is dist.isend, dist.get_rank()
            way = (rank, operation.peer) if is_sent else (operation.peer, rank)
            name = operation.group.group_name
            number = next(numbers[operation.op.__name__, name, *way])  # messages match in the order of their posting
            box = boxes[name, *way, number]
            if is_sent:
                box.put(operation.tensor.clone())
                works.append(_Sent())
            else:
                works.append(_Receipt(box, operation.tensor))
        return works

    def be(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            with torch.autograd.set_multithreading_enabled(False):  # one thread of autograd's would wait for itself
                results[rank] = function(rank, dist.group.WORLD)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)  # the others stop waiting
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    try:
        with mock.patch.object(dist, "batch_isend_irecv", exchange):
            threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(num_ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * SECONDS)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
        ProcessLocalGroup.reset()
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank did not end"
    return results
