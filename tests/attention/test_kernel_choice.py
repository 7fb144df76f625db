"""Adapters to kernels that run on CUDA only, on stand-ins here: the real signatures, computed on the CPU.

Of flash_attn 2.8.3, flash_attn_3 (hopper/flash_attn_interface.py, 2026-03-19) and flash-attn-4 4.0.0b36 the functions
below have every argument, by name, order and default; torch's operators are called through their own schema.
"""

from __future__ import annotations

import itertools
import os
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longctx.attention.kernels import DenseKernel, Inputs, block_forward, blockwise, choose, flash_attn
from longctx.attention.kernels.check import disagreement, disagreement_elsewhere, make_entries, make_inputs
from longctx.attention.kernels.choose import candidates, choose_kernel, first_exact
from longctx.attention.kernels.cudnn import CudnnKernel
from longctx.attention.kernels.efficient import MemoryEfficientKernel
from longctx.attention.kernels.flash_attn import FlashAttention2
from longctx.attention.kernels.varlen import AtenFlashKernel
from tests.attention.flash_stand_ins import (
    STAND_INS,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_backward,
    flash_forward,
)
from tests.few import few

CPU = torch.device("cpu")


COVERING, DTYPES = [(1, torch.bfloat16, False), (4, torch.float16, True)], (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", few(itertools.product((1, 4), DTYPES, (False, True)), COVERING))
@pytest.mark.parametrize("kernel", STAND_INS)
def test_flash_attention_adapters_are_exact(kernel, case):
    queries_per_key, dtype, capped = case
    adapter = kernel("stand-in", STAND_INS[kernel])
    assert disagreement(adapter, Inputs(CPU, dtype, 64, queries_per_key, windowed=True, capped=capped)) is None


def efficient_scores(q, k, bias, is_causal, scale):
    """[1, H, N, D] and [1, H, M, D] -> [1, H, N, M]; what the kernel asks of its inputs, and its causal mask."""
    assert q.dtype == k.dtype == torch.float32
    assert q.shape[1] == k.shape[1], "it has no grouped heads"
    assert not is_causal or (bias is None and q.shape[2] == k.shape[2]), "its causal mask is aligned at the first key"
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        assert bias.shape == scores.shape
        assert bias.stride(-1) == 1
        assert bias.stride(-2) % 4 == bias.storage_offset() % 4 == 0, "rows begin at multiples of 16 bytes"
        scores = scores + bias
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if is_causal else scores


def efficient_forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    scores = efficient_scores(query, key, attn_bias, is_causal, scale)
    lse = torch.nn.functional.pad(scores.logsumexp(-1), (0, -query.shape[2] % 32), value=torch.inf)
    return scores.softmax(-1) @ value, lse, torch.empty(0), torch.empty(0)


def efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    tokens = query.shape[2]
    assert logsumexp.shape[2] % 32 == 0
    assert logsumexp[:, :, tokens:].isposinf().all()
    scores = efficient_scores(query, key, attn_bias, is_causal, scale)
    weights = (scores - logsumexp[:, :, :tokens, None]).exp()
    grad_weights = grad_out_ @ value.transpose(-1, -2) - (grad_out_ * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * scale
    grads = grad_scores @ key, grad_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad_out_
    return *grads, torch.empty(0)


@pytest.fixture
def aten_on_cpu():
    """torch's CUDA operators computed on the CPU, under their own schemas."""

    def forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
        window_size_left, window_size_right, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        which = cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right
        empty = torch.empty(0)
        return *flash_forward(q, k, v, scale, *which), empty, empty, empty

    def backward(
        grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
        scale, window_size_left, window_size_right,
    ):  # fmt: skip
        which = cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right
        return tuple(flash_backward(grad_out, q, k, v, out, lse, scale, *which))

    def alone(q, k, is_causal):
        """cuDNN's causal mask is aligned at the first key."""
        lengths = [torch.tensor([0, x.shape[2]], dtype=torch.int32) for x in (q, k)]
        assert not is_causal or q.shape[2] == k.shape[2]
        return *lengths, q.shape[2], k.shape[2], is_causal, -1, -1

    def cudnn_forward(
        q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale
    ):
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        out, lse = flash_forward(*rows, scale, *alone(q, k, is_causal))
        lse = lse[None, ..., None] if compute_log_sumexp else torch.empty(0)
        nothing = torch.empty(0)
        return out.transpose(0, 1)[None], lse, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing

    def cudnn_backward(
        grad_out, q, k, v, out, lse, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, *, scale,
    ):  # fmt: skip
        assert lse.shape == (1, *q.shape[1:3], 1)
        assert out.transpose(1, 2).is_contiguous()  # torch's plans know no other layout, once one is built
        assert grad_out.transpose(1, 2).is_contiguous()
        rows = [x[0].transpose(0, 1) for x in (grad_out, q, k, v, out)]
        grads = flash_backward(*rows, lse[0, ..., 0].contiguous(), scale, *alone(q, k, is_causal))
        return tuple(grad.transpose(0, 1)[None] for grad in grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", efficient_forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("aten_on_cpu")
@pytest.mark.parametrize("kernel", [AtenFlashKernel, CudnnKernel])
@pytest.mark.parametrize("queries_per_key", [1, 4])
def test_torch_adapters_are_exact(kernel, queries_per_key):
    assert disagreement(kernel(), Inputs(CPU, torch.bfloat16, 64, queries_per_key, windowed=True)) is None


@pytest.mark.usefixtures("aten_on_cpu")
@pytest.mark.parametrize("queries_per_key", [1, 4])
def test_the_memory_efficient_adapter_is_exact_in_fp32(queries_per_key):
    """Windows and leads of keys too, for which it gets masks."""
    assert disagreement(MemoryEfficientKernel(), Inputs(CPU, torch.float32, 64, queries_per_key, windowed=True)) is None


@pytest.mark.usefixtures("aten_on_cpu")
@pytest.mark.parametrize("name", ["out", "dk"])
def test_the_operator_of_a_kernel_is_checked_too(monkeypatch, name):
    right, factor = AtenFlashKernel.operator, 2 if name == "out" else 1

    def wrong(self, entries):
        return lambda q, k, v, scale: right(self, entries)(q, k, v, factor * scale) + (k - k.detach()).sum()

    monkeypatch.setattr(AtenFlashKernel, "operator", wrong)
    found = disagreement(AtenFlashKernel(), Inputs(CPU, torch.bfloat16, 64, 1))
    assert found.startswith(f"{name} of its operator is off by")


def wrong(forward=None, backward=None):
    """flash-attn 2 with results changed by `forward(out, lse)` or `backward(dq, dk, dv)`, in place."""

    def changed_forward(*args, **kwargs):
        out, lse, *rest = _flash_attn_varlen_forward(*args, **kwargs)
        return *(forward(out, lse) if forward else (out, lse)), *rest

    def changed_backward(*args, **kwargs):
        _flash_attn_varlen_backward(*args, **kwargs)
        if backward:
            backward(*(kwargs[name] for name in ("dq", "dk", "dv")))

    return {"_flash_attn_varlen_forward": changed_forward, "_flash_attn_varlen_backward": changed_backward}


def other_arguments(**changes):
    """flash-attn 2 that misunderstands what it is asked for: each change is a function of the argument."""

    def changed(function):
        return lambda **kwargs: function(**kwargs | {name: change(kwargs[name]) for name, change in changes.items()})

    return {name: changed(globals()[name]) for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")}


def own_results(*names):
    """flash-attn 2 whose backward pass trusts no outside `out` or `softmax_lse` and takes its own."""

    def backward(**kwargs):
        forward = {name: kwargs[name] for name in FORWARD_ARGUMENTS}
        own = dict(zip(("out", "softmax_lse"), _flash_attn_varlen_forward(**forward), strict=False))
        return _flash_attn_varlen_backward(**kwargs | {name: own[name] for name in names})

    return {"_flash_attn_varlen_forward": _flash_attn_varlen_forward, "_flash_attn_varlen_backward": backward}


def zero_last(x):
    x[-1] = 0


FORWARD_ARGUMENTS = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale",
    "causal", "window_size_left", "window_size_right",
)  # fmt: skip
WRONG = {
    "lse in base 2": wrong(forward=lambda out, lse: (out, lse / 0.6931)),
    "lse of other heads": wrong(forward=lambda out, lse: (out, lse.flip(0))),
    "lse of the tokens' order": wrong(forward=lambda out, lse: (out, lse.T.reshape(lse.shape))),
    "out of one token": wrong(forward=lambda out, lse: (zero_last(out), (out, lse))[1]),
    "NaN in one number": wrong(forward=lambda out, lse: (out[-1, -1, -1].fill_(torch.nan), (out, lse))[1]),
    "dk dropped": wrong(backward=lambda dq, dk, dv: dk.zero_()),
    "dk of one token": wrong(backward=lambda dq, dk, dv: zero_last(dk)),
    "dv dropped": wrong(backward=lambda dq, dk, dv: dv.zero_()),
    "dq without scale": wrong(backward=lambda dq, dk, dv: dq.mul_(8)),
    "window ignored": other_arguments(window_size_left=lambda left: -1),
    "window with one key more": other_arguments(window_size_left=lambda left: left + (left >= 0)),
    "causal ignored": other_arguments(causal=lambda causal: False, window_size_right=lambda right: -1),
    "scale ignored": other_arguments(softmax_scale=lambda scale: 1.0),
    "own lse in backward": own_results("softmax_lse"),
    "own out in backward": own_results("out"),
    "values beyond the first 8,192": other_arguments(v=lambda v: torch.cat((v[:8192], torch.zeros_like(v[8192:])))),
    "missing library": {},
}


def test_wrong_kernel_is_passed_over(monkeypatch, caplog):
    """For the next one, with a line that names it, and the value and its bound."""
    monkeypatch.setattr(FlashAttention2, "fits", lambda *_: True)
    kernels = [FlashAttention2(fault, SimpleNamespace(**changed)) for fault, changed in WRONG.items()]
    whole = FlashAttention2("whole", STAND_INS[FlashAttention2])
    assert first_exact([*kernels, whole], Inputs(CPU, torch.bfloat16, 64, 2, windowed=True)) is whole
    for fault, line in zip(WRONG, caplog.messages, strict=True):
        assert f"flash-attn {fault} is passed over" in line
        assert ("AttributeError" if fault == "missing library" else "allowed is 1.6e-02") in line


BORROWED = "from tests.attention.flash_stand_ins import _flash_attn_varlen_backward, _flash_attn_varlen_forward\n"
ELSEWHERE = {
    "whole": (BORROWED, None),
    "off": (
        BORROWED + "_forward = _flash_attn_varlen_forward\n"
        "def _flash_attn_varlen_forward(**kwargs):\n"
        "    out, lse, *rest = _forward(**kwargs)\n"
        "    return out, lse + 1, *rest\n",
        r"lse is off by 1\.0e\+00 on documents, allowed is 1\.6e-02",
    ),
    "fatal": (
        "import os, signal\ndef _flash_attn_varlen_forward(**kwargs): os.kill(os.getpid(), signal.SIGSEGV)\n",
        "a process that checked it was ended by SIGSEGV",
    ),
    "leaves": (
        "import os\ndef _flash_attn_varlen_forward(**kwargs): os._exit(7)\n",
        "a process that checked it ended with exit code 7",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_library_is_checked_in_a_process_of_its_own(kind, tmp_path, monkeypatch):
    """What ends that process leaves this one as it is, and the library is not loaded here before it has passed."""
    code, wrong = ELSEWHERE[kind]
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "flash_attn_interface.py").write_text(code)
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root, os.environ.get("PYTHONPATH", "")]))
    kernel = FlashAttention2("2.8.3")
    found = disagreement_elsewhere(kernel, Inputs(CPU, torch.bfloat16, 64, 2))
    assert found is None if wrong is None else re.match(wrong, found)
    assert not kernel.is_loaded


def test_without_another_kernel_long_sequences_are_refused(monkeypatch):
    """Forward and backward, before the scores take memory; blocks of queries under a window are no square."""
    monkeypatch.setattr(blockwise, "DENSE_TOKENS", 96)
    kernel = first_exact([], Inputs(CPU, torch.float32, 16, 1))
    for sizes, causal, window, is_refused in (
        ([(96, 96)], True, None, False),
        ([(97, 97)], True, None, True),
        ([(50, 200)], False, None, True),
        ([(1000, 1000)], True, 8, False),
    ):
        *inputs, grad = make_inputs(sizes, (2, 2), 16, torch.float32)
        entries = make_entries(sizes, causal, window)
        out, lse = DenseKernel().forward(*inputs, entries, 1.0)
        for call in (
            partial(kernel.forward, *inputs, entries, 1.0),
            partial(kernel.backward, grad, *inputs, out, lse, entries, 1.0),
        ):
            if is_refused:
                with pytest.raises(
                    ValueError, match=r"attention over \d+ tokens: no kernel but the dense one .* 96 tokens"
                ):
                    call()
            else:
                call()


ORDER = {
    (8, 0): ["flash-attn", "aten varlen flash"],
    (9, 0): ["flash-attn-3", "flash-attn-4", "cuDNN", "flash-attn", "aten varlen flash"],
    (10, 0): ["flash-attn-4", "cuDNN", "flash-attn", "aten varlen flash"],
    (7, 5): [],
}


@pytest.mark.parametrize("capability", ORDER)
def test_order_of_kernels(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(flash_attn, "version", lambda distribution: "1.0")
    cuda = torch.device("cuda")
    names = [kernel.name.removesuffix(" 1.0") for kernel in candidates() if kernel.fits(cuda, torch.bfloat16, 128)]
    assert names == ORDER[capability]
    in_fp32 = [kernel.name for kernel in candidates() if kernel.fits(cuda, torch.float32, 128)]
    assert in_fp32 == ["aten memory-efficient"]
    assert not any(kernel.fits(cuda, torch.bfloat16, 100) for kernel in candidates())
    of_large_heads = [kernel.name for kernel in candidates() if kernel.fits(cuda, torch.bfloat16, 512)]
    assert (of_large_heads, blockwise.DENSE_TOKENS) == (["aten memory-efficient"], 8192)
    assert blockwise.CappedDenseKernel.max_scores * 4 * 8 == 2**30  # bytes of eight copies in fp32


def test_libraries_that_are_not_installed_are_no_candidates(monkeypatch):
    def version(distribution):
        raise flash_attn.PackageNotFoundError(distribution)

    monkeypatch.setattr(flash_attn, "version", version)
    assert [kernel.name for kernel in candidates()] == ["cuDNN", "aten varlen flash", "aten memory-efficient"]


@pytest.mark.usefixtures("aten_on_cpu")
def test_cudnn_takes_long_documents_that_are_alone(monkeypatch):
    for kernel in (CudnnKernel, AtenFlashKernel):
        monkeypatch.setattr(kernel, "fits", lambda *_: True)
    monkeypatch.setattr(choose, "LONG_DOCUMENT", 64)
    chosen = first_exact([CudnnKernel(), AtenFlashKernel()], Inputs(CPU, torch.bfloat16, 16, 1))
    assert chosen.name == "aten varlen flash; cuDNN for one document of 64 tokens or more"
    calls = []
    for kernel in (CudnnKernel, AtenFlashKernel):
        for way in ("forward", "backward"):
            monkeypatch.setattr(kernel, way, lambda self, *_, way=way: calls.append((self.name, way)))
    tensors = [torch.empty(0)] * 6
    for square in (True, False):  # met in a batch before: only shapes that recur get a plan
        chosen.forward(*tensors[:3], make_entries([(64 if square else 10, 64)], square), 1.0)
    assert calls == [("aten varlen flash", "forward")] * 2
    calls.clear()
    for sizes, causal, window in (
        ([(64, 64)], True, None),
        ([(10, 64)], False, None),
        ([(10, 64)], True, None),
        ([(63, 63)], True, None),
        ([(64, 64)], True, 8),
        ([(64, 64), (1, 1)], True, None),
    ):
        chosen.forward(*tensors[:3], make_entries(sizes, causal, window), 1.0)
    cudnn, flash = ("cuDNN", "forward"), ("aten varlen flash", "forward")
    assert calls == [cudnn, cudnn, flash, flash, flash, flash]
    calls.clear()
    alone = make_entries([(64, 64)], True)
    chosen.backward(*tensors, alone, 1.0)
    torch.use_deterministic_algorithms(True)
    try:
        chosen.backward(*tensors, alone, 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [("cuDNN", "backward"), ("aten varlen flash", "backward")]


def test_cudnn_plans_only_for_shapes_that_recur_and_for_so_many(monkeypatch):
    """A ring's blocks have other shapes with every pack; the layers of one batch share its entries."""
    for kernel in (CudnnKernel, AtenFlashKernel):
        monkeypatch.setattr(kernel, "fits", lambda *_: True)
        monkeypatch.setattr(kernel, "forward", lambda self, *_: self.name)
    monkeypatch.setattr(choose, "disagreement", lambda *_: None)
    monkeypatch.setattr(choose, "LONG_DOCUMENT", 64)
    monkeypatch.setattr(choose, "MAX_PLANS", 2)
    monkeypatch.setattr(choose, "REMEMBERED_SHAPES", 3)
    chosen = first_exact([CudnnKernel(), AtenFlashKernel()], Inputs(CPU, torch.bfloat16, 16, 1))

    def by(entries):
        return chosen.forward(*[torch.empty(0)] * 3, entries, 1.0)

    first, others = make_entries([(10, 64)], False), [make_entries([(10, 64)], False) for _ in range(2)]
    assert [by(first) for _ in range(36)] == ["aten varlen flash"] * 36
    assert chosen.operator(first) is not None
    assert [by(entries) for entries in others] == ["cuDNN"] * 2
    assert chosen.operator(others[0]) is not None
    assert by(first) == "cuDNN"  # its backward pass, maybe: there is a plan
    passing = [make_entries([(11, keys)], False) for keys in range(64, 164)]
    assert {by(entries) for entries in passing} == {"aten varlen flash"}
    assert len(chosen._first) == 3
    assert by(make_entries([(11, 64)], False)) == "aten varlen flash"  # forgotten meanwhile
    again = [by(make_entries([(11, keys)], False)) for keys in (162, 163)]
    assert again == ["cuDNN", "aten varlen flash"]  # the second would be a third plan


def test_dtypes_and_head_sizes_that_no_kernel_knows_are_refused():
    with pytest.raises(ValueError, match=r"torch.int32. Use one of torch.float64, .*torch.bfloat16"):
        choose_kernel(Inputs(CPU, torch.int32, 64))
    q, k, v, _ = make_inputs([(8, 8)], (2, 2), 16, torch.float32)
    with pytest.raises(ValueError, match="sizes 16, 16 and 8, which must be equal"):
        block_forward(q, k, v[..., :8], make_entries([(8, 8)], True), 1.0)
