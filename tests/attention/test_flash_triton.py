"""flash-attn 2 under our adapter, with numbers: its Triton backend, in the interpreter of tests/triton_on_cpu.

flash-attn's CUDA kernels run on GPUs only. Its source distribution has a second backend behind the same functions, in
Triton and made for AMD's GPUs, which is what runs here. So these tests show the adapter's arguments, layouts and
conventions against the library's own code, and not its CUDA kernels.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
import torch

from tests.workers import run_ranks

RELEASE = "2.8.3"


@pytest.fixture(scope="module")
def flash_attn_sources(tmp_path_factory):
    """The folder of flash-attn's source distribution, downloaded as pip does."""
    folder = tmp_path_factory.mktemp("flash-attn")
    command = [sys.executable, "-m", "pip", "download", f"flash-attn=={RELEASE}", "--no-binary", ":all:"]
    command += ["--no-deps", "--no-build-isolation", "--dest", str(folder)]
    environment = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}  # else its metadata needs nvcc
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"flash-attn {RELEASE} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    with tarfile.open(folder / f"flash_attn-{RELEASE}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return str(folder / f"flash_attn-{RELEASE}")


def load_interface(sources: str):
    """flash_attn.flash_attn_interface over its Triton backend, on CPU tensors.

    Three things would keep it from running: its operators are registered for CUDA, it selects the tensors' device, and
    it tunes kernels by arguments that they do not have, which Triton 3.9 refuses.
    """
    from tests import triton_on_cpu

    triton_on_cpu.install(undefined=1.0)  # its backward pass multiplies undefined log-sum-exps by 0
    import triton

    os.environ["FLASH_ATTENTION_TRITON_AMD_ENABLE"] = "TRUE"
    sys.path.insert(0, sources)
    custom_op, autotune = torch.library.custom_op, triton.autotune

    def on_any_device(name, fn=None, /, *, mutates_args, device_types=None, schema=None):
        return custom_op(name, fn, mutates_args=mutates_args, schema=schema)

    torch.library.custom_op = on_any_device
    triton.autotune = lambda configs, key, **options: autotune(configs, [], **options)
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    from flash_attn import flash_attn_interface

    return flash_attn_interface


def disagreements(sources: str) -> dict[str, str | None]:
    """What the check of kernels at the start of a run finds in the adapter, by dtype."""
    from longctx.attention.kernels import check
    from longctx.attention.kernels.flash_attn import FlashAttention2

    interface = load_interface(sources)

    def forward(**arguments):
        out, lse, *rest = interface._flash_attn_varlen_forward(**arguments)
        return out, lse.T.contiguous(), *rest  # [tokens, H] there, [H, tokens] in the CUDA library

    def backward(**arguments):
        given = {name: arguments[name].contiguous() for name in ("q", "k", "v", "out", "dout")}
        given["softmax_lse"] = arguments["softmax_lse"].T.contiguous()
        return interface._flash_attn_varlen_backward(**(arguments | given))

    as_cuda = SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
    # Small: a program takes a millisecond or more. Two heads for each key, and documents that end within a tile.
    documents, led = [(n, n) for n in (13, 1, 40)], [(9, 20), (1, 33)]
    check.KINDS = {
        "documents": (documents, True, None),
        "more keys than queries": (led, True, None),
        "full entries": ([(13, 30), (20, 9)], False, None),
        f"documents{check.ROWS_OF_LONGER}": (documents, True, None),
    }
    return {
        str(dtype): check.disagreement(
            FlashAttention2(RELEASE, as_cuda), check.Inputs(torch.device("cpu"), dtype, 32, 2)
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.mark.long
def test_the_adapter_of_flash_attn_2_equals_plain_attention(flash_attn_sources):
    """In fp32 and bf16: packed documents, led entries, full entries and views, forward and backward."""
    found = run_ranks(1, f"{__name__}:disagreements", flash_attn_sources, backend=None, timeout=900)[0]
    assert found == {"torch.float32": None, "torch.bfloat16": None}
