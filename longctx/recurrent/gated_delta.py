"""The gated delta rule (arXiv 2412.06464) over a sequence group, as in Qwen3-Next, Qwen3.5 and OLMo Hybrid.

A head carries a state S [D, E] from token to token: S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ. Kimi Delta
Attention (arXiv 2510.26692) has a decay for each key channel: (I - β_t k_t k_tᵀ) Diag(α_t) S_{t-1} + β_t k_t v_tᵀ. In
both, the state behind a piece of a document is B + A·S of the state before it. The rule itself gives both in one call:
B from a state of 0, and the columns of A from the columns of the identity with values of 0, which are E + D columns
together.

There are two ways to spread it. **By states**, each rank computes its own tokens: the maps A and B of the pieces that
another one continues, and then all pieces from the states before them. **By heads**, each rank takes all tokens of some
heads, as Ulysses does; only numbers of key heads that the ranks divide allow it. `longctx.recurrent.cost` says which
one is faster.

transformers uses flash-linear-attention's kernels wherever that package can be imported. Here they compute half
precision on GPUs, after a comparison with transformers' own operators, which compute the rest. Releases before 0.5
assume as many value heads as key heads and silently return wrong numbers if there are more. In fp32, Triton's products
would be rounded to TF32. transformers' operators of Kimi Delta Attention write `CHUNK` numbers for every key channel of
a token, so they compute `SEGMENT` tokens at a time, and again in the backward pass.

Shape legend: P ranks, S tokens of a sequence, s of a rank, K key heads of size D, V value heads of size E, V a multiple
of K. The inputs of the rule are q and k [1, s, K, D], v [1, s, V, E], the decays g = log α [1, s, V], or [1, s, V, D]
of key channels, and the strengths β [1, s, V].
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.import_utils import is_flash_linear_attention_available

from longctx.attention.kernels.check import why_not_exact
from longctx.attention.kernels.entries import upload
from longctx.model.recurrent import SEGMENT
from longctx.recurrent.passing import by_piece, incoming_states, run_pieces, select
from longctx.recurrent.pieces import Pieces
from longctx.sequence.layout import Layout
from longctx.ulysses.exchange import all_to_all, tokens_to_ranks

logger = logging.getLogger(__name__)

Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' `torch_chunk_gated_delta_rule`: (q, k, v, g=, beta=, initial_state=, output_final_state=, ...)."""

KERNEL_BOUND = 2e-2
"""Largest relative error of the kernel's outputs and gradients over a document, the same as for Liger's kernels.

A number is rounded to 2^-9 of itself, and the kernel rounds several times."""


def delta_rule_by_states(
    rule: Rule, inputs: Sequence[Tensor], pieces: Pieces, group: dist.ProcessGroup | None
) -> Tensor:
    """Compute the rule over this rank's pieces, from the states that other ranks compute: inputs -> [1, s, V, E]."""
    before = None
    if pieces.slots:
        maps = _maps(rule, select(inputs, pieces, pieces.gives), pieces.lengths[pieces.gives])
        before, inputs = incoming_states(maps, pieces, group, partial(_apply, inputs[2].shape[-1]), inputs)
    return run_pieces(lambda *piece: delta_rule(rule, *piece)[0], inputs, pieces, before)


def delta_rule_by_heads(
    rule: Rule, inputs: Sequence[Tensor], layout: Layout, group: dist.ProcessGroup | None
) -> Tensor:
    """Compute the rule over all tokens, for this rank's heads, with an exchange before and after: -> [1, s, V, E]."""
    lengths = np.diff(layout.cu_seqlens)
    if group is None:
        return delta_rule(rule, inputs, lengths)[0]
    *qkv, g, beta = (x[0] for x in inputs)
    exchanged = *_to_heads([*qkv, beta[..., None]], group), *_to_heads([g.view(*g.shape[:2], -1)], group)  # g is fp32
    q, k, v, beta, g = (x[None] for x in _in_order(exchanged, layout, back=False))
    mixed, _ = delta_rule(rule, (q, k, v, g.view(*g.shape[:3], *inputs[3].shape[3:]), beta[..., 0]), lengths)
    [mixed] = _in_order([mixed[0]], layout, back=True)
    return tokens_to_ranks(mixed.transpose(0, 1)[None], group).transpose(1, 2)


def delta_rule(
    rule: Rule, inputs: Sequence[Tensor], lengths: np.ndarray, states: Tensor | None = None, *, gives: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule over pieces of these lengths: -> [1, s, V, E], and the states behind them if it `gives` them.

    Args:
        states: [n, V, D, E], the states before the pieces; None for 0.
    """
    compute = _in_one_call if takes_kernel(inputs[0]) else _by_piece
    return compute(rule, inputs, lengths, states, gives=gives)


def _in_one_call(
    rule: Rule, inputs: Sequence[Tensor], lengths: np.ndarray, states: Tensor | None = None, *, gives: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule by a kernel that takes the boundaries of pieces and a state for each."""
    *qkv, g, beta = inputs
    boundaries = upload(np.append(0, np.cumsum(lengths)), g.device)
    return rule(
        *qkv,
        g=g,
        beta=beta,
        initial_state=states,
        output_final_state=gives,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=boundaries,
    )


def _by_piece(
    rule: Rule, inputs: Sequence[Tensor], lengths: np.ndarray, states: Tensor | None = None, *, gives: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule by transformers' own operators, one piece after the other."""

    def run(piece: Sequence[Tensor], state: Tensor | None, gives: bool = gives) -> tuple[Tensor, Tensor | None]:
        *qkv, g, beta = piece
        states = {"initial_state": state, "output_final_state": gives}
        return inspect.unwrap(rule)(*qkv, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **states)

    def in_segments(piece: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        segments, outputs = list(zip(*(x.split(SEGMENT, dim=1) for x in piece), strict=True)), []
        for number, segment in enumerate(segments, start=1):
            goes_on = gives or number < len(segments)
            out, state = checkpoint(run, segment, state, goes_on, use_reentrant=False, preserve_rng_state=False)
            outputs.append(out)
        return torch.cat(outputs, dim=1), state

    every_channel_decays_by_itself = inputs[3].dim() == 4
    return by_piece(in_segments if every_channel_decays_by_itself else run, inputs, lengths, states)


def takes_kernel(q: Tensor) -> bool:
    """Whether a kernel of flash-linear-attention computes the delta rule of these queries."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and is_flash_linear_attention_available()


# ------------------------------------------------------------------------------------------------
# States
# ------------------------------------------------------------------------------------------------


def _maps(rule: Rule, inputs: Sequence[Tensor], lengths: np.ndarray) -> Tensor:
    """Return the affine map of each piece, [n, V, D, E + D]: columns of B, then those of A."""
    q, k, v, g, beta = inputs
    heads, size, values = v.shape[2], k.shape[-1], v.shape[-1]
    dtype = torch.promote_types(v.dtype, torch.float32)
    if not len(lengths):
        return v.new_zeros(0, heads, size, values + size, dtype=dtype)
    states = v.new_zeros(len(lengths), heads, size, values + size, dtype=dtype)
    states[..., values:] = torch.eye(size, dtype=dtype, device=v.device)
    _, behind = delta_rule(rule, (q, k, nn.functional.pad(v, (0, size)), g, beta), lengths, states, gives=True)
    assert behind is not None, "the rule returns its last states when asked"
    return behind


def _apply(values: int, of_piece: Tensor, state: Tensor | None) -> Tensor:
    """Return the state [V, D, E] behind a piece, from its map [V, D, E + D] and the state before it."""
    moved, made = of_piece[..., values:], of_piece[..., :values]
    return made if state is None else made + moved @ state


# ------------------------------------------------------------------------------------------------
# Heads
# ------------------------------------------------------------------------------------------------


def _to_heads(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each [s, n, size] -> [S, n/P, size]: all tokens, this rank's heads. One exchange for all of them."""
    shares = [x.unflatten(1, (dist.get_world_size(group), -1)) for x in parts]  # [s, P, n/P, size]
    fused = torch.cat([x.flatten(2) for x in shares], dim=2).transpose(0, 1)
    rows = all_to_all(fused, group).flatten(0, 1)  # [S, n/P · size of each part]
    widths = [x.shape[2:].numel() for x in shares]
    return [x.unflatten(1, share.shape[2:]) for x, share in zip(rows.split(widths, dim=1), shares, strict=True)]


def _in_order(parts: Sequence[Tensor], layout: Layout, *, back: bool) -> list[Tensor]:
    """Each [S, ...] from the order of the ranks' shards to that of the whole row, or back."""
    if layout.plan is None:
        return list(parts)
    order = layout.plan.permutation if back else np.argsort(layout.plan.permutation)
    index = upload(order, parts[0].device)
    return [x.index_select(0, index) for x in parts]


# ------------------------------------------------------------------------------------------------
# The check of the kernel
# ------------------------------------------------------------------------------------------------

_LENGTHS = (70, 1, 130)
"""Tokens of the documents that are compared. The kernel works on 64 at a time."""


@dataclass(frozen=True, kw_only=True)
class DeltaHeads:
    """The heads of a layer with a delta rule."""

    values_per_key: int
    """Value heads that share a key head when the rule is called, V/K, or 1 if the layer repeats its key heads."""
    key_size: int
    value_size: int
    of_channels: bool
    """Whether every key channel has a decay of its own (Kimi Delta Attention)."""

    @classmethod
    def of(cls, layer: Any) -> DeltaHeads:
        """Return the heads of a layer of transformers."""
        if hasattr(layer, "num_v_heads"):
            shared, sizes = layer.num_v_heads // layer.num_k_heads, (layer.head_k_dim, layer.head_v_dim)
            if "repeat_interleave" in inspect.unwrap(type(layer).forward).__code__.co_names:
                shared = 1  # before transformers 5.23
            return cls(values_per_key=shared, key_size=sizes[0], value_size=sizes[1], of_channels=False)
        return cls(values_per_key=1, key_size=layer.head_dim, value_size=layer.head_dim, of_channels=True)

    @property
    def rule(self) -> str:
        """The name of the rule in messages."""
        return "Kimi Delta Attention" if self.of_channels else "the gated delta rule"


def check_delta_rule(rule: Rule, heads: DeltaHeads, device: torch.device, *, with_states: bool) -> None:
    """Compare the kernel on this device with transformers' own operators, on packed documents, forward and backward.

    Args:
        rule: the rule of the layer's module, which is the kernel where that is installed.
        heads: those of a layer of the model.
        with_states: whether states pass between ranks.

    Raises:
        ValueError: if the kernel fails, or is off by more than KERNEL_BOUND.
    """
    if device.type != "cuda":
        return
    if not is_flash_linear_attention_available():
        logger.warning(
            "linear-attention layers compute one document after the other, which is slow with many of them. "
            "pip install flash-linear-attention for a kernel that takes all at once."
        )
        return
    wrong = why_not_exact(
        torch.bfloat16,
        lambda: ((error, KERNEL_BOUND) for error in kernel_errors(rule, heads, device, with_states=with_states)),
    )
    if wrong is not None:
        raise ValueError(
            f"flash-linear-attention's kernel of {heads.rule} {wrong}. Run `pip install --upgrade "
            "flash-linear-attention`, or uninstall it: transformers' own operators are exact."
        )


def kernel_errors(rule: Rule, heads: DeltaHeads, device: torch.device, *, with_states: bool) -> list[float]:
    """Return the largest relative error of a document for each output and gradient, in bf16 and for these heads.

    Two key heads are compared, since all heads are computed alike. Transformers' operators compute in fp32 on the CPU.
    If states pass between ranks, the documents go on from states, and the states behind them are compared, too.
    """
    generator = torch.Generator().manual_seed(0)
    lengths, tokens = np.array(_LENGTHS), sum(_LENGTHS)
    values, size, width = 2 * heads.values_per_key, heads.key_size, heads.value_size
    decays = (values, size) if heads.of_channels else (values,)
    shapes = [(2, size)] * 2 + [(values, width), decays, (values,)]
    inputs = [torch.randn(1, tokens, *shape, generator=generator) for shape in shapes]
    inputs[3:] = [-inputs[3].exp(), inputs[4].sigmoid()]  # decays are fp32, as in the layers
    inputs = [x if i == 3 else x.bfloat16() for i, x in enumerate(inputs)]
    if with_states:
        inputs += [torch.randn(len(lengths), values, size, width, generator=generator)]
    upstream = [torch.randn(x.shape, generator=generator).to(x) for x in (inputs[2], *inputs[5:])]

    def results(compute: Callable[..., Any], device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        outputs = compute(rule, given[:5], lengths, *given[5:], gives=with_states)[: len(upstream)]
        given_back = [x.to(out) for x, out in zip(upstream, outputs, strict=True)]
        return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, given, given_back)]

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        exact = results(_by_piece, torch.device("cpu"), torch.float32)
        found = results(_in_one_call, device, None)
    return [_error_over_documents(x.cpu(), wanted) for x, wanted in zip(found, exact, strict=True)]


def _error_over_documents(actual: Tensor, exact: Tensor) -> float:
    """Return the largest relative error of a document, in its tokens [1, S, ...] or in its state of [n, ...].

    It is relative to the document's own norm, or to a typical one of its length if that is larger.
    """
    typical = exact.square().mean().sqrt()
    of_each = [x.split(_LENGTHS, dim=1) if len(x) == 1 else x.split(1) for x in (actual.float(), exact)]
    errors = [
        (x - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp(min=typical)
        for x, wanted in zip(*of_each, strict=True)
    ]
    return float(torch.stack(errors).max())
