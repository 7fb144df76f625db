"""Packs of documents, and the ways in which ranks attend to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longctx.attention.operator import varlen_attention
from longctx.packing import pack
from longctx.ring import plan_ring, ring_attention
from longctx.ulysses.attention import ulysses_attention

from ..packing import histogram
from ..plan import arrange_document_zigzag
from .zigzag import Ints, ZigzagBlocks, ZigzagRing

Attend = Callable[..., Tensor]

SHORT = 1024  # longest document of the case "short documents"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative in norm; sums of up to a pack's terms in another order, and bf16's 8 bits once for each block."""


def draw_packs(num_tokens: int, longest: int, num_packs: int) -> list[Ints]:
    """Draw the document lengths of packs from data/document_lengths.csv, none above `longest`.

    The lengths of each pack add up to `num_tokens`.
    """
    rng = np.random.default_rng(0)
    lengths = histogram(rng, 1000 + 50 * num_packs * num_tokens // min(longest, num_tokens), num_tokens)
    lengths = lengths[lengths <= longest]
    packs = [lengths[np.asarray(documents)] for documents in pack(lengths, num_tokens).bins]
    full = [np.append(p, num_tokens - p.sum()) if p.sum() < num_tokens else p for p in packs[:-1] or packs]
    return [full[i] for i in rng.permutation(len(full))[:num_packs]]


CASES: dict[str, Callable[[int, int], list[Ints]]] = {
    "packed": lambda num_tokens, num_packs: draw_packs(num_tokens, num_tokens, num_packs),
    "short documents": lambda num_tokens, num_packs: draw_packs(num_tokens, min(SHORT, num_tokens), num_packs),
    "one document": lambda num_tokens, num_packs: [np.array([num_tokens])],
}


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Shape of the attention layer."""

    query: int
    key_value: int
    dim: int

    def tensors(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """q, k, v and the output's gradient of a whole pack, [1, H or K, T, D], the same on every rank.

        A token's heads lie together, as a model's projections leave them.
        """
        generator = torch.Generator(device).manual_seed(0)
        heads = (self.query, self.key_value, self.key_value, self.query)
        shapes = [(1, num_tokens, h, self.dim) for h in heads]
        return [torch.randn(s, generator=generator, device=device).to(dtype).transpose(1, 2) for s in shapes]


@dataclass(frozen=True)
class Part:
    """One rank's tokens of a pack, and the attention that it computes for them."""

    rows: Tensor
    """int64 [S]: the pack's tokens that lie on this rank, in its order; T stands for padding."""
    attend: Attend
    """(q [1, H, S, D], k, v [1, K, S, D]) -> [1, H, S, D]."""
    num_threads: int = 1

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[1, h, T, D] each -> [1, h, S, D], zero where padding is."""
        tokens = [F.pad(x, (0, 0, 0, 1)).transpose(1, 2) for x in tensors]
        return [x.index_select(1, self.rows.to(x.device)).transpose(1, 2) for x in tokens]


def one_process(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part | None:
    if dist.get_rank(group):
        return None
    rows = torch.arange(int(cu_seqlens[-1]))
    return Part(rows, partial(varlen_attention, cu_seqlens=cu_seqlens), dist.get_world_size(group))


def ring(cu_seqlens: Ints, group: dist.ProcessGroup, transport: str = "p2p") -> Part:
    plan = plan_ring(cu_seqlens, dist.get_world_size(group))
    rows = _share(plan.permutation, group)
    return Part(rows, partial(ring_attention, plan=plan, group=group, transport=transport))


def gather(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part:
    return ring(cu_seqlens, group, "gather")


def ulysses(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part:
    rows = _share(np.arange(cu_seqlens[-1]), group)
    return Part(rows, partial(ulysses_attention, cu_seqlens=cu_seqlens, group=group))


def document_zigzag(cu_seqlens: Ints, group: dist.ProcessGroup) -> Part:
    arranged = arrange_document_zigzag(np.diff(cu_seqlens), dist.get_world_size(group))
    document = np.repeat(np.arange(len(arranged.lengths)), arranged.lengths)
    position = np.arange(len(document)) - (np.cumsum(arranged.lengths) - arranged.lengths)[document]
    original = np.where(position < np.diff(cu_seqlens)[document], cu_seqlens[document] + position, cu_seqlens[-1])
    blocks = ZigzagBlocks.of(arranged.lengths // dist.get_world_size(group), group)
    rows = _share(original[arranged.permutation], group)
    return Part(rows, lambda q, k, v: ZigzagRing.apply(q, k, v, blocks))


def _share(rows: Ints, group: dist.ProcessGroup) -> Tensor:
    """This rank's equal slice."""
    return torch.from_numpy(rows.reshape(dist.get_world_size(group), -1)[dist.get_rank(group)])


ZIGZAG = "per-document zigzag"
WAYS: dict[str, Callable[[Ints, dist.ProcessGroup], Part | None]] = {
    "one process": one_process,
    "ring": ring,
    "gather": gather,
    "Ulysses": ulysses,
    ZIGZAG: document_zigzag,
}
