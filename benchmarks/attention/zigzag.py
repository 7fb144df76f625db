"""A ring whose documents all lie on all ranks, as pieces r and 2P-1-r of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from longctx.attention.kernels import Entries, block_backward, block_forward

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ZigzagBlocks:
    """The blocks of a rank in a ring whose documents all lie on all ranks: pieces r and 2P-1-r of each, in order."""

    group: dist.ProcessGroup
    own: Entries
    """Causal, over the rank's own tokens."""
    earlier: Entries
    """All queries over the first pieces of a rank before this one."""
    later: Entries
    """The second pieces' queries over all tokens of a rank after this one."""
    first_pieces: Tensor
    """int64 [S/2]: rows of the first pieces."""
    second_pieces: Tensor

    @classmethod
    def of(cls, lengths: Ints, group: dist.ProcessGroup) -> ZigzagBlocks:
        """From the even lengths of the documents' parts on one rank."""
        end = np.cumsum(lengths)
        whole = np.stack((end - lengths, end), axis=1)
        first, second = (np.stack((end - lengths + n, end - lengths // 2 + n), axis=1) for n in (0, lengths // 2))
        return cls(
            group,
            Entries(whole, whole, causal=True),
            Entries(whole, first, causal=False),
            Entries(second, whole, causal=False),
            *(torch.from_numpy(np.concatenate([np.arange(*r) for r in ranges])) for ranges in (first, second)),
        )

    def exchange(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Send `x` to the next rank; the buffer that the previous rank's will fill, and what to wait for."""
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        received = torch.empty_like(x)
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=(rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(rank - 1) % world_size),
        ]
        return received, dist.batch_isend_irecv(operations)

    def visits(self, kv: Tensor) -> Iterator[tuple[bool, Tensor]]:
        """(whether the owner is an earlier rank, its `kv`) at each hop, the next one on its way meanwhile."""
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        coming, works = self.exchange(kv)
        for hop in range(1, world_size):
            for work in works:
                work.wait()
            kv = coming
            if hop + 1 < world_size:
                coming, works = self.exchange(kv)
            yield hop <= rank, kv


class ZigzagRing(torch.autograd.Function):
    """In the manner of ring-flash-attention's zigzag varlen ring (github.com/zhuzilin/ring-flash-attention)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, blocks: ZigzagBlocks) -> Tensor:
        scale, visits = q.shape[-1] ** -0.5, blocks.visits(torch.stack((k, v)))
        out, lse = block_forward(q, k, v, blocks.own, scale)
        out = out.to(lse.dtype)
        for earlier, (k_there, v_there) in visits:
            if earlier:
                out, lse = _merged(out, lse, *block_forward(q, k_there, v_there, blocks.earlier, scale))
            else:
                rows = blocks.second_pieces
                there = block_forward(q, k_there, v_there, blocks.later, scale)
                merged = _merged(out.index_select(2, rows), lse.index_select(2, rows), *there)
                out.index_copy_(2, rows, merged[0])
                lse.index_copy_(2, rows, merged[1])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        blocks: ZigzagBlocks = ctx.blocks
        scale, visits = q.shape[-1] ** -0.5, blocks.visits(torch.stack((k, v)))
        dq, *dkv = block_backward(grad_out, q, k, v, out, lse, blocks.own, scale)
        dq, grad_kv = dq.to(lse.dtype), torch.stack(dkv).to(lse.dtype)
        travelling, works = blocks.exchange(grad_kv)
        for earlier, (k_there, v_there) in visits:
            entries = blocks.earlier if earlier else blocks.later
            dq_there, *dkv = block_backward(grad_out, q, k_there, v_there, out, lse, entries, scale)
            for work in works:
                work.wait()
            grad_kv = travelling
            if earlier:
                dq += dq_there
                grad_kv.index_add_(3, blocks.first_pieces, torch.stack(dkv).to(lse.dtype))
            else:
                dq.index_add_(2, blocks.second_pieces, dq_there.to(lse.dtype))
                grad_kv += torch.stack(dkv)
            travelling, works = blocks.exchange(grad_kv)
        for work in works:
            work.wait()
        return dq.to(q.dtype), *travelling.to(k.dtype), None


def _merged(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over two sets of keys from the softmax over each."""
    weight = torch.sigmoid(block_lse - lse)[..., None]
    return torch.lerp(out, block_out.to(out.dtype), weight), lse - F.logsigmoid(lse - block_lse)
