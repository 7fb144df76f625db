"""The soft device itself: what it has in common with a GPU."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import torch
import torch.distributed as dist


def what_it_has_in_common_with_a_gpu() -> dict[str, object]:
    """Each fact is as torch documents it for CUDA."""
    facts: dict[str, object] = {"initialised before it is used": torch.cuda.is_initialized()}
    facts["available"] = torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized()
    torch.manual_seed(3)  # waits until CUDA is there
    first = torch.randn(4, device="cuda")
    facts["initialised by a tensor"] = torch.cuda.is_initialized()
    torch.manual_seed(3)
    facts["seeded before it was there"] = torch.equal(first, torch.randn(4, device="cuda"))

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    big = torch.empty(2**20, device="cuda")
    product = big * 2
    facts["MiB of two tensors"] = (torch.cuda.memory_allocated() - before) / 2**20
    del big, product
    facts["MiB left, and at the peak"] = (
        (torch.cuda.memory_allocated() - before) / 2**20,
        round((torch.cuda.max_memory_allocated() - before) / 2**20, 2),
    )
    facts["uninitialised memory is NaN"] = bool(torch.empty(4, device="cuda").isnan().all())
    torch.cuda.set_per_process_memory_fraction(2**-10)
    try:
        torch.empty(2**24, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        facts["out of memory"] = str(error).split(".")[0]

    threads = {}
    for device in ("cpu", "cuda"):
        x = torch.ones(1, device=device, requires_grad=True)
        x.register_hook(lambda _, device=device: threads.update({device: threading.get_ident()}))
        (2 * x).sum().backward()
    facts["threads of backward passes"] = {
        device: thread == threading.get_ident() for device, thread in threads.items()
    }
    facts["device of another index"] = str(torch.ones(1, device="cuda:1") + 1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        facts["current stream"] = torch.cuda.current_stream() == side
    child = os.fork()
    if child == 0:
        try:
            torch.cuda.init()
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 1)
        os._exit(1)
    facts["in a forked child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    loaded = set(re.findall(r"/\S+/libc10\.so", Path("/proc/self/maps").read_text()))
    facts["torch of this environment alone"] = loaded == {str(Path(torch.__file__).parent / "lib" / "libc10.so")}
    return facts


def test_it_behaves_as_a_gpu_does(soft_gpus):
    [facts] = soft_gpus.run(1, f"{__name__}:what_it_has_in_common_with_a_gpu", backend=None)
    assert facts == {
        "initialised before it is used": False,
        "available": (True, 4, False),
        "initialised by a tensor": True,
        "seeded before it was there": True,
        "MiB of two tensors": 8,
        "MiB left, and at the peak": (0, 8),
        "uninitialised memory is NaN": True,
        "out of memory": "CUDA out of memory",
        "threads of backward passes": {"cpu": True, "cuda": False},
        "device of another index": "tensor([2.], device='cuda:1')",
        "current stream": True,
        "in a forked child": 7,
        "torch of this environment alone": True,
    }


def collectives() -> dict[str, list[float]]:
    """One of each kind on two ranks, synchronously and not."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)

    def values(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device="cuda")

    results = {}
    total = values(rank + 1, 10)
    dist.all_reduce(total)
    results["sum"] = total
    mean = values(rank + 1, 10).bfloat16()
    work = dist.all_reduce(mean, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    work.wait()  # the second time changes nothing
    results["mean"] = mean.float()
    results["gathered"] = torch.empty(4, device="cuda")
    own = results["gathered"][2 * rank : 2 * rank + 2].copy_(values(rank, 5))
    dist.all_gather_into_tensor(results["gathered"], own)  # in place, as FSDP2 does
    results["scattered"] = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(results["scattered"], values(1, 2), op=dist.ReduceOp.AVG)
    results["exchanged"] = torch.empty(2, device="cuda")
    dist.all_to_all_single(results["exchanged"], values(10 * rank, 10 * rank + 1))
    results["received"] = torch.empty(1, device="cuda")
    pair = [dist.P2POp(dist.isend, values(rank), 1 - rank), dist.P2POp(dist.irecv, results["received"], 1 - rank)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    results["received in turn"] = torch.empty(1, device="cuda")
    turns = [lambda: dist.send(values(rank), 1 - rank), lambda: dist.recv(results["received in turn"], 1 - rank)]
    for take_turn in turns if rank == 0 else reversed(turns):
        take_turn()
    results["broadcast"] = values(rank + 7)
    dist.broadcast(results["broadcast"], src=1)
    objects = [None, None]
    dist.all_gather_object(objects, f"rank {rank}")
    assert objects == ["rank 0", "rank 1"]
    return {name: tensor.tolist() for name, tensor in results.items()}


def test_nccl_computes_what_it_should(soft_gpus):
    shared = {"sum": [3, 20], "mean": [1.5, 10], "gathered": [0, 5, 1, 5], "broadcast": [8]}
    first, second = soft_gpus.run(2, f"{__name__}:collectives")
    assert first == {**shared, "scattered": [1], "exchanged": [0, 10], "received": [1], "received in turn": [1]}
    assert second == {**shared, "scattered": [2], "exchanged": [1, 11], "received": [0], "received in turn": [0]}
