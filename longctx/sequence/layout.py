"""The layout of a batch, which says where its documents lie. It is made and checked once, where the batch is made.

Documents may branch: a branch, such as an answer, sees its document's trunk, such as the prompt, and its own tokens,
and no other branch. The trunk is computed once. It leaves the prompt's last token to the branches, each of which begins
with it: so each token has one target at most, and the trunk has none.

prompt p0 p1 p2, answers a0 a1 and b0, one padding token:

input_ids       p0    p1 |  p2   a0   a1 |  p2   b0 |  pad
labels        -100  -100  -100   a0   a1  -100   b0   -100
position_ids     0     1     2    3    4     2    3      0
bounds           0           2              5           7     8
kind         TRUNK      BRANCH         BRANCH     PADDING
cu_seqlens       0                                      7     8

Shape legend: B rows of S tokens are flattened to one row of T = B·S tokens; P = ring · ulysses ranks hold T/P of them
each. m segments: trunks, branches, whole documents and padded tails. n documents, padded tails included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import ArrayLike, NDArray

from longctx.data import IGNORE_INDEX
from longctx.ring.plan import RingPlan
from longctx.ring.planner import TimeOfPlan, plan_ring
from longctx.sequence.mesh import ParallelDims

WHOLE, TRUNK, BRANCH, PADDING = range(4)
"""Kinds of segments."""

_UNREAD = (
    *("inputs_embeds", "past_key_values", "cache", "pixel_values", "seq_idx"),
    *("seq_lengths", "cu_seqlens", "loss_mask", "completion_mask", "assistant_masks"),
)
"""Inputs of transformers' models, and keys of rows and of other collators' batches, that nothing here reads."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """The segments of a batch, its targets, and which rank of a sequence group holds which token."""

    shape: tuple[int, int]
    """(B, S) of the batch before it was flattened."""
    bounds: NDArray[np.int64]
    """int64 [m + 1]: boundaries of the segments, from 0 to T. Rows are boundaries."""
    kind: NDArray[np.uint8]
    """uint8 [m]: WHOLE, TRUNK, BRANCH or PADDING. Branches follow their trunk; padding ends a row."""
    lengths: Sequence[int] | None = None
    """Tokens of each row before it was padded, or of each row that was joined to one; None for a batch from elsewhere
    that does not say what is padding."""
    num_targets: int = 0
    """Tokens that are learnt: labels that are not −100 after the shift."""
    digest: int = 0
    """62 bits of a digest of tokens, labels and segments, by which ranks see that they have the same batch."""
    ring: int = 1
    """Ranks that pass keys and values around."""
    ulysses: int = 1
    """Ranks that exchange tokens for heads."""
    plan: RingPlan | None = None
    """The ring's plan of the cut. If None, rank r holds the r-th of P equal slices."""

    def __post_init__(self) -> None:
        assert self.bounds[0] == 0, "the first segment begins at token 0"
        assert self.bounds[-1] == self.num_tokens, "the last segment ends at token T"
        assert (np.diff(self.bounds) > 0).all(), "segments have tokens"
        before = np.append(PADDING, self.kind[:-1])
        assert np.isin(before[self.is_branch], (TRUNK, BRANCH)).all(), "branches follow their trunk"

    @classmethod
    def of_documents(
        cls,
        ids: torch.Tensor,
        labels: torch.Tensor,
        starts: NDArray[np.int64],
        *,
        branch_starts: ArrayLike | None = None,
        row_lengths: NDArray[np.int64] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Layout:
        """Return the layout of a batch whose documents are known.

        Args:
            ids, labels: int64 [B, S], labels not shifted.
            starts: int64 [n], where documents and padded tails begin in the flattened row.
            branch_starts: int64 [b], where branches begin in it, as `check_branch_starts` demands.
            row_lengths: int64 [B], tokens of each row without padding; None if unknown.
            lengths: see `Layout.lengths`.
        """
        rows, width = ids.shape
        branches = np.zeros(0, np.int64) if branch_starts is None else np.asarray(branch_starts, dtype=np.int64)
        bounds = np.append(np.union1d(starts, branches), rows * width)
        is_branch = np.isin(bounds[:-1], branches)
        kind = np.where(is_branch, BRANCH, np.where(np.append(is_branch[1:], False), TRUNK, WHOLE)).astype(np.uint8)
        if row_lengths is not None:
            row, place = np.divmod(bounds[:-1], width)
            kind[place >= row_lengths[row]] = PADDING
        flat = _host(labels)
        learnt = int((flat != IGNORE_INDEX).sum() - (flat[starts] != IGNORE_INDEX).sum())
        state = xxhash.xxh3_64(f"{rows} {width}".encode())
        for part in (_host(ids), flat, bounds, branches):
            state.update(part.data)
        return cls(
            shape=(rows, width),
            bounds=bounds,
            kind=kind,
            lengths=lengths,
            num_targets=learnt,
            digest=state.intdigest() >> 2,
        )

    @classmethod
    def of_batch(cls, batch: Mapping[str, Any]) -> Layout:
        """Check a batch that was made elsewhere, and return its layout.

        Documents are those of the batch's `layout`; else of `cu_seq_lens_q` or of `position_ids` that restart at 0, and
        of both where it has both; else each row is one. Padding is what a right-padded `attention_mask` or `lengths`
        say, and begins a segment.

        Args:
            batch: `input_ids`, `labels` (not shifted) int64 [B, S], and what describes them.

        Raises:
            ValueError: for descriptions that contradict each other, left padding, labels on padding, in trunks or below
                0 other than −100, and inputs that nothing would read.
        """
        batch = {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if value is not None
        }
        _check_inputs(batch)
        ids, labels = batch["input_ids"], batch["labels"]
        real = _row_lengths(batch)
        starts = _starts(batch)
        if real is not None:
            padded = np.arange(len(real)) * ids.shape[1] + real
            starts = np.union1d(starts, padded[real < ids.shape[1]])
        branches = _host(batch.get("branch_starts", ()))
        check_branch_starts(branches, starts, ids.numel())
        layout = cls.of_documents(
            ids,
            labels,
            starts,
            branch_starts=branches,
            row_lengths=real,
            lengths=None if real is None else [int(n) for n in batch.get("lengths", real)],
        )
        _check_labels(layout, _host(labels))
        if len(branches):
            _check_branches(layout, batch)
        if (given := batch.get("layout")) is None:
            return layout
        same = (given.shape, given.digest) == (layout.shape, layout.digest)
        if not same or (real is not None and (given.kind != layout.kind).any()):
            raise ValueError(
                f"the batch's layout is of another batch, of {given.shape[0]} × {given.shape[1]} tokens with "
                f"{given.num_targets} targets. Leave layout out, or make it of this batch."
            )
        return given

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.shape[0] * self.shape[1]

    @property
    def sp(self) -> int:
        """P, the ranks that share the row."""
        return self.ring * self.ulysses

    @property
    def local_length(self) -> int:
        """T/P, the tokens each rank holds."""
        return self.num_tokens // self.sp

    @cached_property
    def is_branch(self) -> NDArray[np.bool_]:
        """bool [m]."""
        return self.kind == BRANCH

    @cached_property
    def cu_seqlens(self) -> NDArray[np.int64]:
        """int64 [n + 1]: boundaries of documents and padded tails. A document with branches is one document."""
        return np.append(self.bounds[:-1][~self.is_branch], self.bounds[-1])

    @cached_property
    def document(self) -> NDArray[np.int64]:
        """int64 [m]: the document of each segment."""
        return np.cumsum(~self.is_branch) - 1

    @property
    def segments(self) -> Layout | None:
        """This layout, for attention that has to know branches; None if no document branches."""
        return self if self.is_branch.any() else None

    @property
    def answers(self) -> NDArray[np.int64]:
        """int64 [m]: the number of each segment, where trunks do not count; a trunk has that of its first branch."""
        return np.cumsum(self.kind != TRUNK) - (self.kind != TRUNK)

    @property
    def answer_of_token(self) -> NDArray[np.int64]:
        """int64 [T]: the number of each token's answer, as in `answers`."""
        return np.repeat(self.answers, np.diff(self.bounds))

    @property
    def is_padding(self) -> NDArray[np.bool_]:
        """bool [answers]: those that are padding; all False if the batch does not say what is padding."""
        return (self.kind == PADDING)[self.kind != TRUNK]

    @property
    def trunk_lengths(self) -> NDArray[np.int64]:
        """int64 [n]: the tokens of each document's trunk; 0 for a document that does not branch."""
        return np.bincount(self.document, np.where(self.kind == TRUNK, np.diff(self.bounds), 0)).astype(np.int64)

    def position_ids(self) -> NDArray[np.int64]:
        """Return int64 [T], the position of each token. A document counts from 0, and a branch from its trunk's end."""
        first = self.bounds[:-1] - self.trunk_lengths[self.document] * self.is_branch
        return np.arange(self.num_tokens) - np.repeat(first, np.diff(self.bounds))

    def real_tokens(self) -> NDArray[np.bool_]:
        """Return bool [T], the tokens that are not padding as far as the batch says."""
        return np.repeat(self.kind != PADDING, np.diff(self.bounds))

    def num_repeated(self) -> int:
        """Return how many more tokens there would be if each branch had a trunk of its own."""
        return int((self.trunk_lengths * (np.bincount(self.document, self.is_branch) - 1)).clip(min=0).sum())

    def work(self, sp_rank: int) -> float:
        """Return the query-key pairs that a rank computes, padding included.

        With branches it is an estimate: the rank's share of the ring's plan, which counts a branching document as one
        causal document, times the pairs that there really are.
        """
        documents, lengths = np.diff(self.cu_seqlens), np.diff(self.bounds)
        planned = int((documents * (documents + 1) // 2).sum())
        on_trunk = lengths * self.trunk_lengths[self.document] * self.is_branch
        pairs = int((lengths * (lengths + 1) // 2 + on_trunk).sum())
        if self.plan is None:
            return pairs / self.sp
        return float(self.plan.area_per_rank[sp_rank // self.ulysses]) / self.ulysses * (pairs / planned)

    def spread(self, dims: ParallelDims, time_of: TimeOfPlan | None = None) -> Layout:
        """Decide which rank of a sequence group holds each token, and return a layout that records it.

        With a ring of at least two ranks, `plan_ring` puts the tokens into another order; otherwise they keep theirs.
        Rank r of the P ranks then holds the r-th of P equal slices. A layout that is spread already stays as it is.

        Args:
            time_of: as in `plan_ring`, which plans a document with branches as one causal document.

        Raises:
            ValueError: if B·S is not a multiple of what the degrees need, or the layout is spread over other degrees.
        """
        rows, length = self.shape
        if self.sp > 1:
            if (self.ring, self.ulysses) != (dims.ring, dims.ulysses):
                raise ValueError(
                    f"the batch's layout is of ring {self.ring} × ulysses {self.ulysses}, and the batch is cut for "
                    f"ring {dims.ring} × ulysses {dims.ulysses}. Leave layout out, or plan it for these degrees."
                )
            return self
        if self.num_tokens % dims.multiple:
            raise ValueError(
                f"A batch of {rows} × {length} tokens cannot be cut evenly: ring {dims.ring} × ulysses {dims.ulysses} "
                f"needs a multiple of {dims.multiple} tokens. Pass pad_to_multiple_of={dims.multiple} to the collator."
            )
        plan = _plan(self.cu_seqlens.tobytes(), dims.ring, time_of) if dims.ring > 1 else None
        return replace(self, ring=dims.ring, ulysses=dims.ulysses, plan=plan)


@lru_cache(maxsize=8)
def _plan(cu_seqlens: bytes, ring: int, time_of: TimeOfPlan | None) -> RingPlan:
    """Return the plan of `plan_ring`. The last ones are kept: every pass of a policy step has the same batch."""
    return plan_ring(np.frombuffer(cu_seqlens, np.int64), ring, time_of=time_of)


def _host(values: ArrayLike | torch.Tensor) -> NDArray[Any]:
    return torch.as_tensor(values).contiguous().numpy().reshape(-1)


def _check_inputs(batch: Mapping[str, Any]) -> None:
    for name in ("input_ids", "labels"):
        if name not in batch:
            given = ", ".join(sorted(map(str, batch)))
            raise ValueError(f"the batch has no {name}, only {given}. Make it with longctx.collate.SequenceCollator.")
    shape = tuple(batch["input_ids"].shape)
    for name in ("labels", "position_ids"):
        if name in batch and (len(shape) != 2 or batch[name].shape != shape):
            raise ValueError(
                f"{name} have shape {tuple(batch[name].shape)}, and input_ids {shape}. Give both as [B, S]."
            )
    unread = [name for name in _UNREAD if name in batch]
    if "token_type_ids" in batch and batch["token_type_ids"].any():
        unread.append("token_type_ids")
    if unread:
        raise ValueError(
            f"the batch has {unread[0]}, which is not supported: only input_ids, labels and position_ids (or "
            "cu_seq_lens_q) are read. Leave it out, and say by these where documents begin and what is learnt."
        )


def _check_labels(layout: Layout, labels: NDArray[np.int64]) -> None:
    learnt = labels != IGNORE_INDEX
    if (lowest := int(labels.min(where=learnt, initial=0))) < 0:
        raise ValueError(f"labels hold {lowest}. Mark tokens that are not learnt by -100.")
    if stray := np.count_nonzero(learnt & ~layout.real_tokens()):
        raise ValueError(f"{stray} labels stand on padding (by attention_mask or lengths). Set them to -100.")


def _starts(batch: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return int64 [n], where documents begin in the flattened row, from positions and boundaries that agree."""
    rows, width = batch["input_ids"].shape
    of_rows = np.arange(rows) * width
    positions, bounds = batch.get("position_ids"), batch.get("cu_seq_lens_q")
    if bounds is not None:
        bounds = _host(bounds).astype(np.int64)
        ascends = (np.diff(bounds) > 0).all() and np.isin(np.append(of_rows, rows * width), bounds).all()
        if not ascends or (bounds[0], bounds[-1]) != (0, rows * width):
            raise ValueError(
                f"cu_seq_lens_q {bounds[:8].tolist()} must ascend from 0 to the batch's {rows * width} tokens, "
                "with a boundary wherever a row begins. Make the batch with longctx.collate.SequenceCollator."
            )
    if positions is None:
        return of_rows if bounds is None else bounds[:-1]
    positions = positions.numpy()
    starts = np.flatnonzero(positions == 0)
    if len(batch.get("branch_starts", ())):  # with which positions are compared as a whole
        starts = np.union1d(starts, of_rows)
    elif (positions[:, 0] != 0).any() or ((np.diff(positions) != 1) & (positions[:, 1:] != 0)).any():
        raise ValueError(
            "position_ids must start at 0 in every row and then either count up by 1 or restart at 0 where a "
            "document begins; left-padded and re-ordered rows cannot be cut exactly. Make the batch with "
            "longctx.collate.SequenceCollator, or pad on the right."
        )
    if bounds is not None and not np.array_equal(bounds[:-1], starts):
        raise ValueError(
            f"position_ids begin documents at {starts[:8].tolist()}, and cu_seq_lens_q at {bounds[:-1][:8].tolist()}. "
            "Leave one of them out, or make the batch with longctx.collate.SequenceCollator."
        )
    return starts


def _row_lengths(batch: Mapping[str, Any]) -> NDArray[np.int64] | None:
    """Return int64 [B], the tokens of each row that are not padding by `lengths` or `attention_mask`."""
    rows, width = batch["input_ids"].shape
    lengths, mask = batch.get("lengths"), batch.get("attention_mask")
    by_mask = None
    if mask is not None:
        real = mask.bool().numpy()
        numbers = (mask > 1).any() and "position_ids" not in batch and "cu_seq_lens_q" not in batch
        if real.shape != (rows, width) or numbers or (real[:, 1:] & ~real[:, :-1]).any():
            raise ValueError(
                f"attention_mask of shape {real.shape} must be [B, S], and ones followed by zeros in every row (right "
                "padding). Set padding_side='right', give position_ids that restart at 0 with every document, or make "
                "the batch with longctx.collate.SequenceCollator."
            )
        by_mask = real.sum(1)
    if lengths is None:
        return by_mask
    fits = all(0 <= n <= width for n in lengths) and sum(lengths) <= rows * width
    if not fits or (rows > 1 and len(lengths) != rows):
        raise ValueError(f"lengths {list(lengths)} do not fit a batch of {rows} × {width} tokens.")
    found = np.array([sum(lengths)] if rows == 1 else list(lengths), dtype=np.int64)
    if by_mask is not None and not np.array_equal(found, by_mask):
        raise ValueError(
            f"lengths {list(lengths)} and an attention_mask with {by_mask.tolist()} tokens a row contradict each "
            "other. Leave one of them out."
        )
    return found


def padding_documents(batch: Mapping[str, Any], layout: Layout) -> NDArray[np.bool_]:
    """Return bool [answers]: the padding that an `attention_mask` marks, which callers do not count as documents.

    The padded end of a packed row counts as a document.
    """
    return layout.is_padding & (batch.get("attention_mask") is not None)


def check_branch_starts(branches: NDArray[np.int64], starts: NDArray[np.int64], num_tokens: int) -> None:
    """Raise ValueError unless branches [b] begin within documents that begin at `starts` [n], each after a trunk."""
    if not len(branches):
        return
    wrong = np.isin(branches, starts) | (branches < 0) | (branches >= num_tokens)
    if wrong.any() or (np.diff(branches) <= 0).any():
        raise ValueError(
            f"branch_starts {branches[:8].tolist()} do not ascend within documents that begin at "
            f"{starts[:8].tolist()}. A branch begins after at least one token of a trunk; give a document without a "
            "trunk no branches."
        )


def _check_branches(layout: Layout, batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless positions and labels are those that branches need."""
    starts = layout.bounds[:-1][layout.is_branch]
    positions = batch.get("position_ids")
    real = layout.real_tokens()
    if positions is None or (layout.position_ids() != _host(positions))[real].any():
        raise ValueError(
            f"position_ids do not fit branch_starts {starts[:8].tolist()}: they must start at 0 in every document and "
            "at the length of its trunk in every branch. Make the batch with longctx.collate.SequenceCollator."
        )
    unlearnt = np.repeat(layout.kind == TRUNK, np.diff(layout.bounds))
    unlearnt[starts] = True
    if learnt := np.count_nonzero(_host(batch["labels"])[unlearnt] != IGNORE_INDEX):
        raise ValueError(
            f"{learnt} labels stand in a trunk or at the first token of a branch, which belongs to the prompt. Only "
            "later tokens of a branch are learnt: set these labels to -100."
        )
