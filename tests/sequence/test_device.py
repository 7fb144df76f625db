"""Which device a rank takes, and when; no GPU is needed to decide that."""

from __future__ import annotations

import pytest
import torch

import longctx
from longctx import parallel
from longctx.attention.kernels.blockwise import ShortDenseKernel
from longctx.model.tiny import tiny_model
from longctx.sequence.mesh import select_device
from longctx.settings.machine_checks import check_kernels

CUDA = torch.device("cuda")


@pytest.fixture
def gpus(monkeypatch):
    """Have this process see a number of GPUs, of which number 0 is current; the list of those it selects."""

    def see(count):
        selected = [0]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: selected[-1])
        monkeypatch.setattr(torch.cuda, "set_device", selected.append)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        return selected

    return see


@pytest.mark.parametrize(
    ("device", "local_rank", "visible", "index"),
    [
        (CUDA, "1", 2, 1),
        (CUDA, "0", 2, 0),
        (CUDA, None, 2, 0),  # no launcher: the current one
        (CUDA, "3", 1, 0),  # a launcher that shows each process its own GPU
        (torch.device("cuda", 1), "0", 2, 1),  # the argument goes before LOCAL_RANK
        (torch.device("cpu"), "1", 2, None),  # nothing is selected
    ],
)
def test_a_gpu_is_selected_by_the_argument_or_by_local_rank(device, local_rank, visible, index, gpus, monkeypatch):
    selected = gpus(visible)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert select_device(device) == torch.device(device.type, index)
    assert selected[1:] == ([] if index is None else [index])


def test_a_rank_without_a_gpu_of_its_own_is_refused(gpus, monkeypatch):
    selected = gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"cuda:2 is this rank's GPU by LOCAL_RANK, and 2 GPUs .*at most 2 processes"):
        select_device(CUDA)
    gpus(0)
    with pytest.raises(ValueError, match="cuda:1 is this rank's GPU by the device given, and 0 GPUs are visible"):
        select_device(torch.device("cuda", 1))
    assert selected == [0]


@pytest.mark.parametrize("device", [None, CUDA])
def test_parallelize_selects_the_gpu_before_it_makes_groups(device, gpus, monkeypatch):
    """With CUDA in use before, on GPU 0, meshes leave the selection alone and collectives name no index."""
    selected = gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(parallel.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(parallel.dist, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(parallel, "broadcast_object", lambda value: value)
    made = []
    monkeypatch.setattr(parallel, "sequence_groups", lambda dims, device: made.append((device, selected[-1])))
    _, sequence = longctx.parallelize(tiny_model(), sp=2, sp_backend="ring", device=device)
    assert made == [(torch.device("cuda", 1), 1)]
    assert sequence.device == torch.device("cuda", 1)


H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
FLASH = "aten varlen flash"


def test_kernels_of_all_ranks_agree_where_the_devices_do():
    check_kernels([(H100, "flash-attn-3 3.0"), (A100, FLASH), (H100, "flash-attn-3 3.0"), (A100, FLASH)], 1 << 20)
    found = [(H100, "flash-attn-3 3.0"), (H100, "flash-attn-3 3.0"), (H100, FLASH)]
    with pytest.raises(ValueError, match=r"\(NVIDIA H100.*\): flash-attn-3 3.0 on rank 0, aten varlen flash on rank 2"):
        check_kernels(found, 256)


def test_the_dense_kernel_is_refused_for_long_sequences_on_any_rank():
    """Before weights are spread: a rank that falls back would take memory that grows with the length squared."""
    found = [(H100, FLASH), (A100, ShortDenseKernel.name)]
    check_kernels(found, 8192)
    with pytest.raises(ValueError, match=r"attention over 8,193 tokens: .* for 8,192 tokens at most.* Use bf16"):
        check_kernels(found, 8193)
