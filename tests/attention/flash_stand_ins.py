"""The functions of FlashAttention's releases with their own signatures, computed on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from longctx.attention.kernels.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4


def sequences(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, left, right):
    """Rows of queries and keys and hidden pairs of each sequence, as FlashAttention documents its masks."""
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention computes in these only"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.stride(-1) == k.stride(-1) == 1, "the last dimension must be contiguous"
    assert max_seqlen_q > 1, "the kernel's way for one query a row is to be avoided"
    right = 0 if causal else right
    bounds = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (bounds[0][-1], bounds[1][-1]) == (len(q), len(k))
    for q_start, q_stop, k_start, k_stop in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
        num_queries, num_keys = q_stop - q_start, k_stop - k_start
        assert num_queries <= max_seqlen_q
        assert num_keys <= max_seqlen_k
        after = torch.arange(num_keys) - torch.arange(num_queries)[:, None] - (num_keys - num_queries)
        hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
        if right >= 0:
            hidden |= after > right
        if left >= 0:
            hidden |= after < -left
        yield slice(q_start, q_stop), slice(k_start, k_stop), hidden


def scores_of(q, k, hidden, scale, softcap):
    """[N, H, D], [M, K, D] -> [H, N, M] in fp32, and their derivative by the scores before a cap."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    slope = 1 - (capped / softcap) ** 2 if softcap else 1.0
    return capped.masked_fill(hidden, -torch.inf), slope


def flash_forward(q, k, v, scale, *which, softcap=0.0):
    """out [N, H, D], lse [H, N]; weights are rounded before they meet the values, as the kernels do."""
    out, lse = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(q.shape[1::-1], dtype=torch.float32),
    )
    for at, keys, hidden in sequences(q, k, *which):
        scores, _ = scores_of(q[at], k[keys], hidden, scale, softcap)
        lse[:, at] = scores.logsumexp(-1)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1).float()
        mixed = torch.einsum("hnm,mhd->hnd", weights.to(q.dtype).float(), values) / weights.sum(-1, keepdim=True)
        out[at] = mixed.transpose(0, 1).to(q.dtype)
    return out, lse


def flash_backward(grad_out, q, k, v, out, lse, scale, *which, softcap=0.0):
    """dq, dk, dv in the layout of q, k, v."""
    assert lse.dtype == torch.float32
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()
    grads = [torch.full_like(x, torch.nan, memory_format=torch.contiguous_format) for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    for at, keys, hidden in sequences(q, k, *which):
        scores, slope = scores_of(q[at], k[keys], hidden, scale, softcap)
        weights = (scores - lse[:, at, None]).exp()
        values, grad = v[keys].repeat_interleave(group, dim=1).float(), grad_out[at].float()
        delta = (grad * out[at].float()).sum(-1).T[..., None]
        grad_scores = weights * (torch.einsum("nhd,mhd->hnm", grad, values) - delta) * slope * scale
        weights, grad_scores = weights.to(q.dtype).float(), grad_scores.to(q.dtype).float()
        keys_of_heads = k[keys].repeat_interleave(group, dim=1).float()
        grads[0][at] = torch.einsum("hnm,mhd->nhd", grad_scores, keys_of_heads).to(q.dtype)
        for total, left, right in ((grads[1], grad_scores, q[at].float()), (grads[2], weights, grad)):
            per_query_head = torch.einsum("hnm,nhd->mhd", left, right)
            total[keys] = per_query_head.unflatten(1, (-1, group)).sum(2).to(q.dtype)
    return grads


# flash_attn 2.8.3, flash_attn/flash_attn_interface.py; the same since 2.7.0 but for zero_tensors at the end.


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    which = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right
    assert dropout_p == 0.0
    return *flash_forward(q, k, v, softmax_scale, *which, softcap=softcap), None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    which = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right
    assert dropout_p == 0.0
    grads = flash_backward(dout, q, k, v, out, softmax_lse, softmax_scale, *which, softcap=softcap)
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return torch.empty(0)  # softmax_d


# flash_attn_3, hopper/flash_attn_interface.py


def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
    leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    which = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size_left, window_size_right
    return *flash_forward(q, k, v, softmax_scale, *which, softcap=softcap), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
    max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
    window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    which = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window_size_left, window_size_right
    grads = flash_backward(dout, q, k, v, out, softmax_lse, softmax_scale, *which, softcap=softcap)
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return torch.empty(0)  # softmax_d


# flash-attn-4 4.0.0b36, flash_attn/cute/interface.py


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
    intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
    q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
    seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
):  # fmt: skip
    window = without_none(window_size_left, window_size_right)
    which = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, *window
    out, lse = flash_forward(q, k, v, softmax_scale, *which, softcap=softcap or 0.0)
    return out, lse if return_lse else None, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
    num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
    AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    window = without_none(window_size_left, window_size_right)
    which = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, *window
    return tuple(flash_backward(dout, q, k, v, out, lse, softmax_scale, *which, softcap=softcap))


def without_none(*window):
    """Version 4 takes a negative window for one that hides the query's own key, and None for one without an end."""
    assert all(side is None or side >= 0 for side in window)
    return [-1 if side is None else side for side in window]


STAND_INS = {
    FlashAttention2: SimpleNamespace(
        _flash_attn_varlen_forward=_flash_attn_varlen_forward, _flash_attn_varlen_backward=_flash_attn_varlen_backward
    ),
    FlashAttention3: SimpleNamespace(
        _flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward
    ),
    FlashAttention4: SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd),
}
