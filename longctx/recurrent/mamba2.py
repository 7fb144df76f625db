"""The scan of Mamba-2 (arXiv 2405.21060) over a sequence group, as in Bamba, Falcon-H1, Granite 4 and Nemotron-H.

A head carries a state S [E, N] from token to token: S_t = exp(A·Δ_t) S_{t-1} + Δ_t x_t B_tᵀ. So the state behind a
piece of a document is a·S + B of the state S before it, where the decay a is one number of a head. transformers' own
operators compute it, one piece after the other; the kernels of mamba-ssm have not been compared.

Shape legend: s tokens of a rank, H heads of size E, states of N elements for each element of a head, G groups of heads
that share B and C.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx.recurrent.passing import by_piece, incoming_states, run_pieces, select
from longctx.recurrent.pieces import Pieces

Scan = Callable[..., Any]
"""transformers' `mamba2_chunk_scan`: (x [1, s, H, E], Δ [1, s, H], A [H], B, C [1, s, G, N], ...) -> [1, s, H, E]."""


def mamba2_by_states(
    scan: Scan,
    inputs: Sequence[Tensor],
    A: Tensor,
    pieces: Pieces,
    group: dist.ProcessGroup | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Compute the scan over this rank's pieces, from the states that other ranks compute.

    Args:
        inputs: x, Δ, B and C.
        A: [H], below 0.
        options: the other keywords of `mamba2_chunk_scan`, without states.
    """
    before = None
    if pieces.slots:
        maps = _maps(scan, select(inputs, pieces, pieces.gives), A, pieces.lengths[pieces.gives], options)
        before, inputs = incoming_states(maps, pieces, group, _apply, inputs)
        before = None if before is None else before.unflatten(2, (-1, inputs[2].shape[3]))
    return run_pieces(lambda *piece: mamba2_scan(scan, A, options, *piece)[0], inputs, pieces, before)


def mamba2_scan(
    scan: Scan,
    A: Tensor,
    options: Mapping[str, Any],
    inputs: Sequence[Tensor],
    lengths: np.ndarray,
    states: Tensor | None = None,
    *,
    gives: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the scan over pieces of these lengths: -> [1, s, H, E], and the states behind them if it `gives` them.

    Args:
        states: [n, H, E, N], the states before the pieces; None for 0.
    """
    run = inspect.unwrap(scan)

    def of_piece(piece: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x, steps, B, C = piece
        found = run(x, steps, A, B, C, initial_states=state, return_final_states=gives, **options)
        return found if gives else (found, None)

    return by_piece(of_piece, inputs, lengths, states)


def _maps(scan: Scan, inputs: Sequence[Tensor], A: Tensor, lengths: np.ndarray, options: Mapping[str, Any]) -> Tensor:
    """Return the affine map of each piece, [n, H, E·N + 1]: B as one row, then the decay."""
    x, steps, B, _ = inputs
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not len(lengths):
        return x.new_zeros(0, x.shape[2], x.shape[3] * B.shape[3] + 1, dtype=dtype)
    _, behind = mamba2_scan(scan, A, options, inputs, lengths, gives=True)
    assert behind is not None, "the scan returns its last states when asked"
    bias, (least, most) = options.get("dt_bias"), options.get("dt_limit", (0.0, float("inf")))
    steps = steps if bias is None else steps + bias.to(steps.dtype)
    steps = F.softplus(steps) if options.get("dt_softplus") else steps
    rates = A.to(dtype) * steps.clamp(least, most).to(dtype)  # [1, tokens, H]
    decays = torch.stack([rate.sum((0, 1)) for rate in rates.split(lengths.tolist(), dim=1)]).exp()
    return torch.cat([behind.flatten(2).to(dtype), decays[..., None]], dim=2)


def _apply(of_piece: Tensor, state: Tensor | None) -> Tensor:
    """Return the state behind a piece [H, E·N], from its map [H, E·N + 1] and the state before it."""
    made, decay = of_piece[..., :-1], of_piece[..., -1:]
    return made if state is None else made + decay * state
