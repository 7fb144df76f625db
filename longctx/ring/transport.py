"""Transports, which bring keys and values to the ranks that need them, and gradients back to the ranks that own them.

A transport serves one pass, forward or backward. K and V are one buffer with tokens first, [S, 2, K, D], so that what
travels is a contiguous prefix. `prefixes` int64 [P, P + 1] holds at [s, h] how many tokens of shard s are needed by
ranks at distance h or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longctx.regions import region
from longctx.ring.plan import RingPlan, RingStep


class Transport(Protocol):
    """One pass over the ring. Every rank calls the same methods in the same order."""

    in_head_groups: bool
    """Whether it sends a few key/value heads at a time, to hold less at once."""

    def __init__(self, group: dist.ProcessGroup, rank: int, prefixes: np.ndarray, kv: Tensor):
        """Start sending this rank's `kv` [S, 2, K, D]."""

    def receive(self, step: RingStep) -> Tensor:
        """Return the source's tokens that this step needs, [step.recv_tokens, 2, K, D].

        Called for each step in order.
        """

    def collect_gradients(self, own_grad: Tensor) -> None:
        """Start to add returning gradients to `own_grad` [S, 2, K, D]. Backward only, before the first `receive`."""

    def give(self, step: RingStep, grad_kv: Tensor) -> None:
        """Take this rank's gradient of what it received. Backward only, after each `receive`."""

    def gradients(self) -> Tensor:
        """Return `own_grad` with every rank's part added."""


class PeerToPeer:
    """Each hop passes the buffer on to the next rank while the block of the hop before is computed.

    Gradients follow one step behind. Those of tokens that no later rank needs go directly to their owner.
    """

    in_head_groups = False

    def __init__(self, group: dist.ProcessGroup, rank: int, prefixes: np.ndarray, kv: Tensor):
        self.group, self.rank, self.prefixes = group, rank, prefixes
        self.world_size = len(prefixes)
        self.own_grad: Tensor | None = None
        self._pass_on(kv, hop=1)

    def receive(self, step: RingStep) -> Tensor:
        _wait(self._coming)
        received = self._received
        self._pass_on(received, step.hop + 1)
        if self.own_grad is not None:
            self._send_home(step.hop)
        return received

    def collect_gradients(self, own_grad: Tensor) -> None:
        self.own_grad = own_grad
        self._travelling = own_grad[:0]

    def give(self, step: RingStep, grad_kv: Tensor) -> None:
        self._collect(grad_kv)
        self._travelling = grad_kv

    def gradients(self) -> Tensor:
        assert self.own_grad is not None, "collect_gradients was not called"
        self._send_home(self.world_size)
        self._collect(self.own_grad[:0])
        return self.own_grad

    def _pass_on(self, held: Tensor, hop: int) -> None:
        """Send the prefix of `held` that travels at `hop` to the next rank, and receive the previous rank's."""
        self._received = held.new_empty(self._length(self.rank - hop, hop), *held.shape[1:])
        sends = [(held[: self._length(self.rank - hop + 1, hop)], self.rank + 1)]
        self._coming = self._exchange(sends, [(self._received, self.rank - 1)])

    def _send_home(self, hop: int) -> None:
        """Send the gradient of the K/V held at hop - 1: a prefix to the next rank at `hop`, the rest to its owner."""
        distance = hop - 1
        sent, lengths = self._travelling, self.prefixes
        onward = head = 0
        self._home = slice(0, 0)
        if distance:
            onward, head = self._length(self.rank - distance, hop), self._length(self.rank - hop, hop)
            self._home = slice(int(lengths[self.rank, hop]), int(lengths[self.rank, distance]))
        self._head = sent.new_empty(head, *sent.shape[1:])
        self._tail = sent.new_empty(self._home.stop - self._home.start, *sent.shape[1:])
        sends = [(sent[:onward], self.rank + 1), (sent[onward:], self.rank - distance)]
        receives = [(self._head, self.rank - 1), (self._tail, self.rank + distance)]
        self._following = self._exchange(sends, receives)

    def _collect(self, grad_kv: Tensor) -> None:
        """Wait for the arriving gradients. Add those that travel on to `grad_kv` and the others to `own_grad`."""
        assert self.own_grad is not None, "collect_gradients was not called"
        _wait(self._following)
        grad_kv[: len(self._head)] += self._head
        self.own_grad[self._home] += self._tail

    def _length(self, source: int, hop: int) -> int:
        return int(self.prefixes[source % self.world_size, hop])

    def _exchange(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> list[dist.Work]:
        """Post all non-empty messages at once; between two ranks they match in the order given."""
        operations = [
            dist.P2POp(op, tensor, dist.get_global_rank(self.group, peer % self.world_size), self.group)
            for op, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in messages
            if len(tensor)
        ]
        return dist.batch_isend_irecv(operations) if operations else []


class Gather:
    """One all-gather of every shard's prefix before the first step; one reduce-scatter of the gradients after the last.

    Collectives need equal parts, so all shards send prefixes as long as the longest.
    """

    in_head_groups = True

    def __init__(self, group: dist.ProcessGroup, rank: int, prefixes: np.ndarray, kv: Tensor):
        self.group = group
        self.longest = int(prefixes[:, 1].max())
        self._gathered = kv.new_empty(len(prefixes) * self.longest, *kv.shape[1:])
        self._coming = []
        if self.longest:
            prefix = kv[: self.longest]
            self._coming = [dist.all_gather_into_tensor(self._gathered, prefix, group=group, async_op=True)]

    def receive(self, step: RingStep) -> Tensor:
        _wait(self._coming)
        self._coming = []
        start = step.source * self.longest
        return self._gathered[start : start + step.recv_tokens]

    def collect_gradients(self, own_grad: Tensor) -> None:
        self.own_grad = own_grad
        self._grads = own_grad.new_zeros(self._gathered.shape)

    def give(self, step: RingStep, grad_kv: Tensor) -> None:
        start = step.source * self.longest
        self._grads[start : start + step.recv_tokens] = grad_kv

    def gradients(self) -> Tensor:
        if self.longest:
            home = self.own_grad.new_empty(self.longest, *self.own_grad.shape[1:])
            with region("wait", "communication"):
                dist.reduce_scatter_tensor(home, self._grads, group=self.group)
            self.own_grad[: self.longest] += home
        return self.own_grad


TRANSPORTS: dict[str, type[Transport]] = {"p2p": PeerToPeer, "gather": Gather}


def _wait(works: list[dist.Work]) -> None:
    with region("wait", "communication"):
        for work in works:
            work.wait()


def fuse(k: Tensor, v: Tensor) -> Tensor:
    """Two [1, K, S, D] -> [S, 2, K, D]."""
    return torch.stack((k[0].transpose(0, 1), v[0].transpose(0, 1)), dim=1)


def split(kv: Tensor) -> tuple[Tensor, Tensor]:
    """[S, 2, K, D] -> two views [1, K, S, D]."""
    k, v = kv.permute(1, 2, 0, 3)
    return k[None], v[None]


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
