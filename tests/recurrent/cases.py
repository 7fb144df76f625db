"""Recurrent operators in fp64 on the ranks of a group, against one process that sees each document alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx.recurrent.gated_delta import delta_rule_by_heads, delta_rule_by_states
from longctx.recurrent.mamba2 import mamba2_by_states
from longctx.recurrent.passing import convolve_pieces
from longctx.recurrent.pieces import Pieces
from longctx.sequence.layout import Layout
from longctx.sequence.mesh import ParallelDims
from tests import reference

REACH = 3


def layout_of(lengths: list[int], ring: int, ulysses: int) -> Layout:
    """The cut of one row with these documents, planned as for a batch."""
    layout = reference.layout_of(np.append(0, np.cumsum(lengths)))
    return layout.spread(ParallelDims.arrange(ring * ulysses, ring=ring, ulysses=ulysses))


def random_lengths(total: int, seed: int) -> list[int]:
    """Documents that fill `total` tokens: of one token, shorter than a convolution's reach, and over several ranks."""
    generator = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(generator.choice([1, 2, 3, 5, total // 4, total // 2, 3 * total // 4]))))
    return lengths


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state=None, output_final_state=False, **_
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (arXiv 2412.06464, equation 10), one token after the other, in its inputs' precision.

    With a decay for each key channel it is Kimi Delta Attention (arXiv 2510.26692, equation 1).
    """
    shared = v.shape[2] // k.shape[2]
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(shared, dim=2) for x in (q * q.shape[-1] ** -0.5, k))
    state = q.new_zeros(1, v.shape[2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    out = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
        written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], state))
        state = state + k[:, t, :, :, None] * written[:, :, None, :]
        out.append(torch.einsum("bhd,bhde->bhe", q[:, t], state))
    return torch.stack(out, dim=1), state if output_final_state else None


def delta_inputs(total: int, *, of_channels: bool = False) -> list[Tensor]:
    """q, k, v, g and beta of 4 key heads of size 3 and 8 value heads of size 2; some decays forget nearly all.

    Where decays are those of key channels, there are 8 key heads.
    """
    shapes = [(8, 3), (8, 3), (8, 2), (8, 3), (8,)] if of_channels else [(4, 3), (4, 3), (8, 2), (8,), (8,)]
    q, k, v, g, beta = (torch.randn(1, total, *shape, dtype=torch.float64) for shape in shapes)
    return [q, k, v, -(1.5 * g).exp(), beta.sigmoid()]


def recurrent_scan(x, steps, A, B, C, *, dt_bias, D, initial_states=None, return_final_states=False, **_):
    """The scan of Mamba-2 (arXiv 2405.21060, equation 2), one token after the other, in its inputs' precision."""
    steps = F.softplus(steps + dt_bias).clamp(0.1, 1.5)
    B, C = (y.repeat_interleave(x.shape[2] // y.shape[2], dim=2) for y in (B, C))
    state = x.new_zeros(*x[:, 0].shape, B.shape[-1]) if initial_states is None else initial_states
    out = []
    for t in range(x.shape[1]):
        decay = (A * steps[:, t]).exp()[..., None, None]
        state = decay * state + torch.einsum("bh,bhe,bhn->bhen", steps[:, t], x[:, t], B[:, t])
        out.append(torch.einsum("bhen,bhn->bhe", state, C[:, t]) + D[:, None] * x[:, t])
    found = torch.stack(out, dim=1)
    return (found, state) if return_final_states else found


def alone(run: Callable[..., Tensor], inputs: list[Tensor], lengths: list[int]) -> Tensor:
    return torch.cat([run(*document) for document in zip(*(x.split(lengths, dim=1) for x in inputs), strict=True)], 1)


def convolved(weight: Tensor, tokens: Tensor) -> Tensor:
    """[1, S, C] -> [1, S, C], each token with those before it."""
    channels = tokens.transpose(1, 2)
    out = F.conv1d(channels, weight[:, None], padding=REACH, groups=len(weight))
    return out[..., : channels.shape[2]].transpose(1, 2)


def operators(layout: Layout, rank: int, group) -> dict[str, tuple]:
    """{name: (weights, inputs of all tokens, operator on a document alone, operator on this rank's tokens)}."""
    torch.manual_seed(3)
    pieces = Pieces.of(layout, rank)
    weight = torch.randn(5, REACH + 1, dtype=torch.float64)
    tokens = torch.randn(1, layout.num_tokens, 5, dtype=torch.float64)

    def convolve(weight: Tensor, tokens: Tensor) -> Tensor:
        causal = partial(_channels_first, partial(convolved, weight))
        return convolve_pieces(tokens.transpose(1, 2), pieces, group, causal, REACH).transpose(1, 2)

    def scan(A: Tensor, bias: Tensor, *inputs: Tensor) -> Tensor:
        return mamba2_by_states(recurrent_scan, inputs, A, pieces, group, options_of(bias))

    def scan_alone(A: Tensor, bias: Tensor, x: Tensor, steps: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return recurrent_scan(x, steps, A, B, C, **options_of(bias))

    def options_of(bias: Tensor) -> dict[str, object]:
        return {"dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 1.5), "D": skip}

    skip, rates, bias = (torch.rand(4, dtype=torch.float64) for _ in range(3))
    shapes = [(4, 3), (4,), (2, 5), (2, 5)]  # 4 heads of size 3 in 2 groups, with states of 5
    scanned = [torch.randn(1, layout.num_tokens, *shape, dtype=torch.float64) for shape in shapes]
    rule = recurrent_delta_rule
    deltas = {
        "delta rule": delta_inputs(layout.num_tokens),
        "Kimi delta attention": delta_inputs(layout.num_tokens, of_channels=True),
    }
    return {
        "convolution": ([weight], [tokens], convolved, convolve),
        "Mamba-2 by states": ([-rates, bias], scanned, scan_alone, scan),
        **{
            f"{name} by {way}": ([], inputs, lambda *given: rule(*given)[0], run)
            for name, inputs in deltas.items()
            for way, run in (
                ("states", lambda *given: delta_rule_by_states(rule, given, pieces, group)),
                ("heads", lambda *given: delta_rule_by_heads(rule, given, layout, group)),
            )
        },
    }


def _channels_first(run: Callable[[Tensor], Tensor], channels: Tensor) -> Tensor:
    return run(channels.transpose(1, 2)).transpose(1, 2)


_ALONE: dict[tuple[str, tuple[int, ...]], tuple[Tensor, Tensor, tuple[Tensor, ...]]] = {}
"""Outputs, their upstream gradients and the gradients of documents alone, by operator and lengths."""


def errors(lengths: list[int], ring: int, ulysses: int) -> dict[str, float]:
    """The largest relative error of outputs and gradients on this rank, by operator."""
    group, rank = dist.group.WORLD, dist.get_rank()
    layout = layout_of(lengths, ring, ulysses)
    order = np.arange(layout.num_tokens) if layout.plan is None else layout.plan.permutation
    own = torch.from_numpy(order).chunk(ring * ulysses)[rank]
    found = {}
    for name, (weights, tokens, run_alone, run) in operators(layout, rank, group).items():
        key = name.partition(" by ")[0], tuple(lengths)
        if key not in _ALONE:  # inputs are the same in every arrangement
            whole = [x.clone().requires_grad_() for x in (*weights, *tokens)]
            expected = alone(partial(run_alone, *whole[: len(weights)]), whole[len(weights) :], lengths)
            upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
            _ALONE[key] = expected.detach(), upstream, torch.autograd.grad(expected, whole, upstream)
        expected, upstream, wanted = _ALONE[key]
        mine = [x.clone().requires_grad_() for x in (*weights, *(x[:, own] for x in tokens))]
        actual = run(*mine)
        grads = list(torch.autograd.grad(actual, mine, upstream[:, own]))
        for grad in grads[: len(weights)]:
            dist.all_reduce(grad)
        pairs = [(actual, expected[:, own]), *zip(grads[: len(weights)], wanted, strict=False)]
        pairs += [(x, y[:, own]) for x, y in zip(grads[len(weights) :], wanted[len(weights) :], strict=True)]
        found[name] = max(float((x - y).norm() / y.norm().clamp(min=1e-3)) for x, y in pairs)
    return found
