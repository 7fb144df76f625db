"""What the model is given of a batch that was cut.

Shape legend: B rows of S tokens are flattened to one row of T = B·S tokens; each of P ranks holds T/P of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor

from longctx.sequence.layout import Layout


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """How a layer's attention differs from plain causal attention within each document.

    Layers of one kind share a schedule.

    Raises:
        ValueError: for a window or chunks below 1, or a cap that is not above 0.
    """

    window: int | None = None
    """Tokens of its document that each query sees, itself included; None means all tokens before it."""
    chunk_size: int | None = None
    """Tokens of a chunk, if documents are cut into chunks that do not see each other (Llama 4); None for no chunks."""
    softcap: float | None = None
    """c: the softmax is over c·tanh(s/c) instead of the scores s (Gemma 2, arXiv 2408.00118); None for plain scores."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1: every token sees itself.")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"chunk_size {self.chunk_size} must be at least 1: every token sees itself.")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap {self.softcap} must be above 0. Use None for scores without a cap.")

    def boundaries(self, cu_seqlens: np.ndarray) -> np.ndarray:
        """Return the boundaries of documents, or of the chunks into which they are cut, int64 [m + 1].

        [0, 5, 8], in chunks of 2 tokens -> [0, 2, 4, 5, 7, 8]

        Args:
            cu_seqlens: int [n + 1], boundaries of the documents.
        """
        cu_seqlens = np.asarray(cu_seqlens, np.int64)
        if self.chunk_size is None:
            return cu_seqlens
        count = -(-np.diff(cu_seqlens) // self.chunk_size)
        chunk = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.append(np.repeat(cu_seqlens[:-1], count) + chunk * self.chunk_size, cu_seqlens[-1:])


PLAIN = AttentionKind()

T = TypeVar("T")

Attend = Callable[..., Tensor]
"""(q [1, H, T/P, D], k and v [1, K, T/P, D], scale=, sinks= [H]) -> [1, H, T/P, D], for one batch and one kind."""


class AttentionContext:
    """What layers that mix tokens know of the batch. It passes through the model as the keyword `sequence`.

    Not a dataclass: wrappers such as FSDP walk and rebuild dataclasses among the arguments.

    Args:
        layout: where the batch's documents and tokens lie.
        group: the ranks that exchange tokens for heads; None for one device, and for a ring without Ulysses.
        make: attention of a kind. Called once for each kind that layers have.
        schedule: the same for a rank's heads after an exchange, as a `longctx.attention.operator.Schedule`; None if the
            backend has none for the sequence-chunked step.
        ranks: all ranks that share the batch; None for one device.
    """

    def __init__(
        self,
        layout: Layout,
        group: dist.ProcessGroup | None,
        make: Callable[[AttentionKind], Attend],
        schedule: Callable[[AttentionKind], Any] | None = None,
        ranks: dist.ProcessGroup | None = None,
    ):
        self.layout, self.local_length, self.cu_seqlens = layout, layout.local_length, layout.cu_seqlens
        self.group, self.ranks = group, ranks
        self._make, self.schedule = make, schedule
        self._by_kind: dict[AttentionKind, Attend] = {}
        self._shared: dict[Hashable, Any] = {}
        self.calls = 0
        """Attention layers, linear ones too, that have run on this batch, recomputation included."""
        self.calls_before = 0
        """The value of `calls` when the last forward pass began."""
        self.real_tokens: Tensor | None = None
        """bool [T/P]: this rank's tokens that are not padding, where routers of a mixture of experts count them."""
        self.position_ids: Tensor | None = None
        """int64 [1, T/P]: the positions of this rank's tokens in their documents, of a batch that was cut."""
        self.before_first_pass: Callable[[], None] | None = None
        """A check to run when the model is first called with this batch. It needs all ranks of the group."""
        self._learnt: tuple[Tensor, int, Tensor] | None = None

    @property
    def rank(self) -> int:
        """Which shard of the batch this rank holds."""
        return 0 if self.ranks is None else dist.get_rank(self.ranks)

    def attend(self, kind: AttentionKind) -> Attend:
        """Return the attention of the layers of this kind."""
        if kind not in self._by_kind:
            self._by_kind[kind] = self._make(kind)
        return self._by_kind[kind]

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the object that all layers of the batch share under this key, made when the first one asks for it."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def know_learnt(self, shift_labels: Tensor, positions: Tensor) -> None:
        """Remember where labels that the host has just sent to the device are not −100.

        Args:
            shift_labels: int64 [1, T/P].
            positions: int64 [n], where they are not −100.
        """
        if not shift_labels.is_inference():  # whose changes are not counted
            self._learnt = shift_labels, shift_labels._version, positions

    def learnt_positions(self, shift_labels: Tensor) -> Tensor | None:
        """Return int64 [n], where labels are not −100, or None for labels that the host does not know.

        These are labels from elsewhere, and the batch's own after they have been changed in place.
        """
        if self._learnt is None:
            return None
        known, version, positions = self._learnt
        return positions if shift_labels is known and shift_labels._version == version else None


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedBatch:
    """One rank's part of a batch."""

    inputs: dict[str, object]
    """Keywords for the model: `input_ids` and `position_ids` int64 [1, T/P], `use_cache`, `sequence`."""
    shift_labels: Tensor
    """int64 [1, T/P]: the token that follows each input token in its document; −100 where nothing is learnt."""
    layout: Layout
    """Puts per-token results back in order."""
    context: AttentionContext
    """The object passed as `sequence`."""


def refuse_uncut(part: str) -> NoReturn:
    """Raise ValueError: this part of a parallelized model was given a batch that `shard` has not cut."""
    raise ValueError(
        f"{part} was put in place by longctx.parallelize and needs batches cut by its second result: "
        "model(**sequence.shard(batch).inputs). To use the model as before, for generation say, call "
        "model.set_attn_implementation('sdpa') first, and model.set_attn_implementation('longctx') before training "
        "goes on."
    )
