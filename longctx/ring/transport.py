"""Transports, which bring keys and values to the ranks that need them, and gradients back to the ranks that own them.

A transport serves one pass, forward or backward. Every rank calls its methods in the same order. `Gather` has those of
`PeerToPeer`, whose docstrings hold for both. K and V are one buffer with tokens first, [S, 2, K, D], so that what
travels is a contiguous prefix. `prefixes` int64 [P, P] is `RingPlan.prefix_tokens`: at [s, h], how many tokens of shard
s are needed by ranks at distance h or more.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.regions import region
from longctx.ring.order import MessageOrder
from longctx.ring.plan import RingPlan, RingStep


class PeerToPeer:
    """Every rank sends its keys and values to each rank that attends to them, hop by hop, and some hops ahead.

    The gradients of a block go straight back to the rank that owns its keys, while later blocks are computed.
    """

    in_head_groups = False
    """Whether key/value heads are sent a few at a time, so that fewer bytes are held at once."""

    def __init__(self, group: dist.ProcessGroup, rank: int, prefixes: np.ndarray, kv: Tensor):
        """Start sending this rank's `kv` [n, 2, K, D], as many of its tokens as the longest prefix of any rank has."""
        self.group, self.rank, self.prefixes, self.kv = group, rank, prefixes, kv
        self.order = _order(prefixes.max(axis=0).tobytes(), int(prefixes[rank, 0]))
        self.own_after = self.order.own_after
        """The hop after which a rank computes its own block in the backward pass; 0 means before the first hop."""
        self._coming: deque[tuple[Tensor, list[dist.Work]]] = deque()
        """What is received for the hops after the last one that was computed, and the messages to wait for."""
        self._returning: deque[tuple[int, Tensor, Tensor, list[dist.Work]]] = deque()
        """Hop, the gradients sent, those received, and the messages to wait for. A tensor is kept until it is sent."""
        self._sent = 0
        self._send_up_to(self.order.sent[0])

    def receive(self, step: RingStep) -> Tensor:
        """Return the source's tokens that this step needs, [step.recv_tokens, 2, K, D].

        Called for each step in order.
        """
        received, works = self._coming.popleft()
        _wait(works)
        self._send_up_to(self.order.sent[step.hop])
        return received

    def collect_gradients(self, own_grad: Tensor) -> None:
        """Start to add returning gradients to `own_grad` [S, 2, K, D]. Backward only, before the first `receive`."""
        self.own_grad = own_grad

    def give(self, step: RingStep, grad_kv: Tensor) -> None:
        """Take this rank's gradient of what it received. Backward only, after each `receive`."""
        self._add_up_to(self.order.returned[step.hop])
        home = self.own_grad.new_empty(self._length(self.rank, step.hop), *self.own_grad.shape[1:])
        works = self._exchange((grad_kv, self.rank - step.hop), (home, self.rank + step.hop))
        self._returning.append((step.hop, grad_kv, home, works))

    def gradients(self) -> Tensor:
        """Return `own_grad` with every rank's part added."""
        self._add_up_to(len(self.prefixes))
        return self.own_grad

    def _send_up_to(self, last_hop: int) -> None:
        """Start to send this rank's prefixes of all hops up to this one, and to receive the other ranks' prefixes."""
        for hop in range(self._sent + 1, last_hop + 1):
            received = self.kv.new_empty(self._length(self.rank - hop, hop), *self.kv.shape[1:])
            prefix = self.kv[: self._length(self.rank, hop)]
            works = self._exchange((prefix, self.rank + hop), (received, self.rank - hop))
            self._coming.append((received, works))
            self._sent = hop

    def _add_up_to(self, last_hop: int) -> None:
        """Wait for the gradients that return up to a hop, and add them to `own_grad`."""
        while self._returning and self._returning[0][0] <= last_hop:
            _, _, home, works = self._returning.popleft()
            _wait(works)
            self.own_grad[: len(home)] += home

    def _length(self, source: int, hop: int) -> int:
        return int(self.prefixes[source % len(self.prefixes), hop])

    def _exchange(self, send: tuple[Tensor, int], receive: tuple[Tensor, int]) -> list[dist.Work]:
        """Send a tensor to one rank while another is received, unless they are empty."""
        operations = [
            dist.P2POp(op, tensor, group=self.group, group_peer=peer % len(self.prefixes))
            for op, (tensor, peer) in ((dist.isend, send), (dist.irecv, receive))
            if len(tensor)
        ]
        return dist.batch_isend_irecv(operations) if operations else []


@lru_cache(maxsize=8)
def _order(longest: bytes, num_tokens: int) -> MessageOrder:
    """Return `MessageOrder.of`. Recent results are kept, since all layers of a batch use the same order."""
    return MessageOrder.of(np.frombuffer(longest, np.int64), num_tokens)


class Gather:
    """One all-gather of every shard's prefix before the first step; one reduce-scatter of gradients after the last.

    Collectives need equal parts, so all shards send prefixes as long as the longest.
    """

    in_head_groups = True

    def __init__(self, group: dist.ProcessGroup, rank: int, prefixes: np.ndarray, kv: Tensor):
        self.group, self.own_after, self.longest = group, len(prefixes) - 1, len(kv)
        self._gathered = kv.new_empty(len(prefixes) * self.longest, *kv.shape[1:])
        self._coming = []
        if self.longest:
            self._coming = [dist.all_gather_into_tensor(self._gathered, kv, group=group, async_op=True)]

    def receive(self, step: RingStep) -> Tensor:
        _wait(self._coming)
        self._coming = []
        start = step.source * self.longest
        return self._gathered[start : start + step.recv_tokens]

    def collect_gradients(self, own_grad: Tensor) -> None:
        self.own_grad = own_grad
        self._grads = own_grad.new_zeros(self._gathered.shape)
        self._home = own_grad.new_empty(self.longest, *own_grad.shape[1:])

    def give(self, step: RingStep, grad_kv: Tensor) -> None:
        start = step.source * self.longest
        self._grads[start : start + step.recv_tokens] = grad_kv
        if step.hop == self.own_after and self.longest:
            self._coming = [dist.reduce_scatter_tensor(self._home, self._grads, group=self.group, async_op=True)]

    def gradients(self) -> Tensor:
        _wait(self._coming)
        self.own_grad[: self.longest] += self._home
        return self.own_grad


Transport: TypeAlias = PeerToPeer | Gather

TRANSPORTS: dict[str, type[Transport]] = {"p2p": PeerToPeer, "gather": Gather}


def _wait(works: list[dist.Work]) -> None:
    with region("wait", "communication"):
        for work in works:
            work.wait()


def fuse(k: Tensor, v: Tensor) -> Tensor:
    """Two [1, K, S, D] -> [S, 2, K, D]."""
    return torch.stack((k.squeeze(0).transpose(0, 1), v.squeeze(0).transpose(0, 1)), dim=1)


def split(kv: Tensor) -> tuple[Tensor, Tensor]:
    """[S, 2, K, D] -> two views [1, K, S, D]."""
    k, v = kv.permute(1, 2, 0, 3).unsqueeze(1).unbind()
    return k, v


def check_shard(plan: RingPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for tensors that are not one rank's part of the plan's sequence."""
    length = plan.num_tokens // plan.world_size
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[0] != 1 or x.shape[2] != length or x.shape[1] == 0:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected [1, heads, {length}, D]: {plan.num_tokens} tokens on "
                f"{plan.world_size} ranks. Flatten several sequences into one, and shard with the same plan."
            )
    if q.shape[1] % k.shape[1] or k.shape != v.shape:
        raise ValueError(f"{q.shape[1]} query heads cannot share k {tuple(k.shape)} and v {tuple(v.shape)} evenly.")
