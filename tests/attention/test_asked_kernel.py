"""`--attn_implementation` chooses among the kernels that are exact, and refuses one that is not."""

from __future__ import annotations

import pytest
import torch

from longctx.attention.kernels import CappedDenseKernel, CpuFlashKernel, choose, choose_kernel, flash_attn, prefer
from longctx.settings.arrange import kernel_note
from longctx.settings.machine_checks import check_kernel_package
from longctx.settings.rules import KERNEL_NAMES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def ends_without_a_preference():
    yield
    prefer(None)


@pytest.fixture
def packages(monkeypatch):
    """Call it with the packages that are to count as installed."""

    def install(*names: str) -> None:
        def version(distribution: str) -> str:
            if distribution not in names:
                raise flash_attn.PackageNotFoundError(distribution)
            return "1.0"

        monkeypatch.setattr(flash_attn, "version", version)

    return install


@pytest.fixture
def exact(monkeypatch):
    """On a Hopper GPU that does not exist, kernels are exact unless their name starts with one of this list."""
    wrong: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        choose, "_disagreement", lambda kernel, *_: "out is off" if kernel.name.startswith(tuple(wrong)) else None
    )
    choose._choose.cache_clear()
    yield wrong
    choose._choose.cache_clear()


def chosen(name: str | None, device=CUDA, dtype=torch.bfloat16, **kinds) -> str:
    prefer(name)
    return choose_kernel(choose.Inputs(device, dtype, 64, 2, **kinds)).name.removesuffix(" 1.0")


@pytest.mark.usefixtures("exact")
def test_models_in_turn_have_the_kernels_that_each_asks_for(packages):
    packages("flash-attn", "flash-attn-3", "flash-attn-4")
    of_torch = f"aten varlen flash; cuDNN for one document of {choose.LONG_DOCUMENT:,} tokens or more"
    for _ in range(2):
        assert chosen("flash_attention_2") == "flash-attn"
        assert chosen(None) == "flash-attn-3"
        assert chosen("sdpa") == of_torch
        assert chosen("flash_attention_4") == "flash-attn-4"
        assert chosen("eager") == CappedDenseKernel.name
    prefer("sdpa", always_the_same=True)  # a batch of a policy is rounded as that of its reference, which came before
    assert choose_kernel(choose.Inputs(CUDA, torch.bfloat16, 64, 2)).name == "aten varlen flash"


@pytest.mark.parametrize("name", [None, *KERNEL_NAMES])
def test_on_the_cpu_every_name_has_a_kernel(name):
    prefer(name)
    expected = CappedDenseKernel if name == "eager" else CpuFlashKernel
    assert type(choose_kernel(choose.Inputs(CPU, torch.float32, 16))) is expected


def test_flash_attention_2_is_torchs_own_where_the_package_is_absent_or_wrong(packages, exact):
    packages()
    assert chosen("flash_attention_2") == "aten varlen flash"
    choose._choose.cache_clear()
    packages("flash-attn", "flash-attn-3")
    exact.append("flash-attn 1.0")
    assert chosen("flash_attention_2") == "aten varlen flash"


def test_a_kernel_that_is_not_exact_is_refused(packages, exact):
    packages("flash-attn-3")
    exact.append("flash-attn-3")
    with pytest.raises(
        ValueError, match=r"flash_attention_3 is not exact for .*, heads of 64, on cuda \(flash-attn-3 1.0: out is off"
    ):
        chosen("flash_attention_3")
    assert "aten varlen flash" in chosen(None)
    with pytest.raises(ValueError, match=r"flash_attention_2 is not exact for torch.float32.*not made for them"):
        chosen("flash_attention_2", dtype=torch.float32)
    packages()
    with pytest.raises(ValueError, match="sliding windows, soft-capped scores"):  # torch's own has no cap
        chosen("flash_attention_2", windowed=True, capped=True)
    assert chosen("sdpa", capped=True) == CappedDenseKernel.name


def test_notes_and_refusals_before_the_run(packages):
    packages("flash-attn-4")
    assert [kernel_note(name, use_cpu=False) for name in (None, "eager", "sdpa", "flash_attention_4")] == [""] * 4
    for name in choose.FLASH_ATTENTION:
        assert "torch's kernel for the CPU" in kernel_note(name, use_cpu=True)
    assert "flash-attn is not installed, so torch's own" in kernel_note("flash_attention_2", use_cpu=False)
    with pytest.raises(ValueError, match="pip install flash-attn-3, or leave the flag out"):
        check_kernel_package("flash_attention_3")
    for name in (None, "eager", "sdpa", "flash_attention_2", "flash_attention_4"):
        check_kernel_package(name)
