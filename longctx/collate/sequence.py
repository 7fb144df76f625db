"""The collator makes tensors of rows of documents, in which no document can see another.

[{"input_ids": [11 12 13 14 15], "seq_lengths": [3, 2]}, {"input_ids": [21 22 23]}], pad_to_multiple_of=4:

input_ids      11   12   13   14   15    0    0    0 |   21   22   23    0    0    0    0    0
labels       -100   12   13 -100   15 -100 -100 -100 | -100   22   23 -100 -100 -100 -100 -100
position_ids    0    1    2    0    1    0    1    2 |    0    1    2    0    1    2    3    4
cu_seq_lens     0              3         5             8              11                      16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longctx.data.columns import IGNORE_INDEX
from longctx.sequence.layout import Layout, check_branch_starts

_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True)
class SequenceCollator:
    """Make a batch of packs or single documents on which every attention implementation of transformers is exact.

    Recurrent layers of transformers may not be.

    In an HF Trainer set `remove_unused_columns=False`: it removes `seq_lengths` and the masks before they get
    here.

    Raises:
        ValueError: no pad token, a multiple below 1.
    """

    pad_token_id: int
    """Token of padding, which no document attends to and which is no target."""

    pad_to_multiple_of: int = 1
    """The length S is rounded up to a multiple of this, in tokens: `dims.multiple` of `parallelize`."""

    padding_free: bool = False
    """Whether all rows become one single row, so that only its end is padded."""

    def __post_init__(self) -> None:
        if not _is_count(self.pad_token_id, 0):
            raise ValueError(
                f"pad_token_id must be a token number of at least 0, got {self.pad_token_id!r}; for a tokenizer "
                "without a pad token use its eos_token_id"
            )
        if not _is_count(self.pad_to_multiple_of, 1):
            raise ValueError(
                f"pad_to_multiple_of must be a number of tokens of at least 1, got {self.pad_to_multiple_of!r}; 1 "
                "pads to the longest sequence only"
            )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate rows into one batch.

        Args:
            examples: each with `input_ids` [n]; optional `labels` [n], not shifted (otherwise the input ids,
                without the tokens where a `completion_mask` or `assistant_masks` [n] is 0); optional
                `seq_lengths` [documents], or else `position_ids` [n] that start again at 0 for each document;
                optional `branch_starts` [branches], where branches of documents begin in the row, see
                `longctx.sequence.layout`.
                Other keys are ignored. Lists, NumPy arrays or CPU tensors of integers.

        Returns:
            `input_ids`, `labels`, `position_ids`: int64 [B, S] (B = 1 if padding_free). Labels are not
            shifted, and -100 at the first token of every document and on padding. Positions start at 0 in
            every document and in the padded tail of a row.

            Where each row is one document: `attention_mask`, int64 [B, S], 0 on padding. Otherwise (a row of
            several documents, or padding_free): `use_cache` False; `cu_seq_lens_q`, `cu_seq_lens_k`, int32
            [segments + 1], borders of the documents and padded tails in the B * S tokens; `max_length_q`,
            `max_length_k`, the longest segment.

            With branches: `branch_starts`, int64 [branches], where they begin in the B * S tokens. Positions go back to
            the end of the trunk with each of them, and their first labels are -100.

        Raises:
            ValueError: no examples; an empty row; labels or masks of another length than `input_ids`;
                `seq_lengths` that do not sum to it; `position_ids` of another form; an attention_mask with
                zeros.
        """
        if not examples:
            raise ValueError("no examples to collate; for a rank that ran out of data use collator.empty()")
        return self.with_layout(examples)[0]

    def empty(self) -> dict[str, Any]:
        """Return a batch of padding alone, [1, S] with S the multiple (at least 2 tokens), every label -100.

        With it, a data-parallel rank without rows, while others have some, takes part in every collective and adds
        nothing to the loss. The padding is one segment, so that no attention kernel meets a fully masked row.
        """
        return self.with_layout([])[0]

    def with_layout(self, examples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Layout]:
        """Return the batch of rows as a call does, or `empty` without rows, and where its documents lie."""
        rows = [_read_row(example, number) for number, example in enumerate(examples)]
        lengths = [len(row.input_ids) for row in rows]
        packed = self.padding_free or any(len(row.seq_lengths) > 1 for row in rows) or not rows
        if self.padding_free or not rows:
            rows = [_join_rows(rows)]
        widths = np.array([len(row.input_ids) for row in rows])
        width = -(-max(*widths, 1 if examples else 2) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        input_ids = torch.full((len(rows), width), self.pad_token_id, dtype=torch.int64)
        labels = torch.full((len(rows), width), IGNORE_INDEX, dtype=torch.int64)
        starts, branches = [], []
        for b, row in enumerate(rows):
            input_ids[b, : widths[b]] = torch.from_numpy(row.input_ids.astype(np.int64))
            labels[b, : widths[b]] = torch.from_numpy(row.labels.astype(np.int64))
            of_row = np.append(0, np.cumsum(row.seq_lengths))
            starts.append(b * width + of_row[of_row < width])
            branches.append(b * width + row.branch_starts)
        labels.view(-1)[np.concatenate((*starts, *branches))] = IGNORE_INDEX
        documents, branch_starts = np.concatenate(starts), np.concatenate(branches)
        layout = Layout.of_documents(
            input_ids, labels, documents, branch_starts=branch_starts, row_lengths=widths, lengths=lengths
        )
        position_ids = torch.from_numpy(layout.position_ids()).view(len(rows), width)
        batch: dict[str, Any] = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        if len(branch_starts):
            batch["branch_starts"] = torch.from_numpy(branch_starts)
        if packed:
            return batch | _varlen_arguments(layout.cu_seqlens), layout
        mask = torch.from_numpy(layout.real_tokens()).view(len(rows), width)
        return batch | {"attention_mask": mask.to(torch.int64)}, layout


class _Row(NamedTuple):
    input_ids: NDArray[np.integer]  # [n]
    labels: NDArray[np.integer]  # [n], document starts not masked yet
    seq_lengths: NDArray[np.int64]  # [documents], none of them 0
    branch_starts: NDArray[np.int64]  # [branches]


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def _varlen_arguments(borders: NDArray[np.int64]) -> dict[str, Any]:
    """Return what transformers' flash attention needs in place of a mask, from the segments' borders [segments + 1]."""
    if borders[-1] > np.iinfo(np.int32).max:
        raise ValueError(
            f"the batch has {borders[-1]} tokens, more than 32-bit cu_seq_lens can count "
            f"({np.iinfo(np.int32).max}); use fewer sequences per batch"
        )
    cu_seq_lens = torch.from_numpy(borders.astype(np.int32))
    longest = int(np.diff(borders).max())
    return {
        "use_cache": False,
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _join_rows(rows: list[_Row]) -> _Row:
    nothing = _Row(*[np.zeros(0, dtype=np.int64)] * 4)
    starts = np.cumsum([0, *(len(row.input_ids) for row in rows)])
    moved = [row._replace(branch_starts=row.branch_starts + start) for row, start in zip(rows, starts, strict=False)]
    return _Row(*map(np.concatenate, zip(nothing, *moved, strict=True)))


def _read_row(example: Mapping[str, Any], number: int) -> _Row:
    """Check one example and find its labels and documents."""
    if "input_ids" not in example:
        raise ValueError(f"example {number} has no input_ids, only {', '.join(map(str, example)) or 'nothing'}")
    input_ids = _integers(example, "input_ids", number)
    if len(input_ids) == 0:
        raise ValueError(f"example {number} has no tokens; leave empty documents out")
    if "attention_mask" in example:
        mask = _per_token(example, "attention_mask", number, len(input_ids))
        if not mask.all():
            raise ValueError(
                f"example {number} is padded already: its attention_mask has {np.count_nonzero(mask == 0)} zeros. "
                "Tokenise without padding; the collator pads"
            )
    lengths = _seq_lengths(example, number, len(input_ids))
    branches = np.asarray(() if example.get("branch_starts") is None else example["branch_starts"], dtype=np.int64)
    check_branch_starts(branches, np.cumsum(lengths) - lengths, len(input_ids))
    return _Row(input_ids, _labels(example, number, input_ids), lengths, branches)


def _labels(example: Mapping[str, Any], number: int, input_ids: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the example's labels, or its input ids without the tokens that a mask leaves out, [n]."""
    if example.get("labels") is not None:
        return _per_token(example, "labels", number, len(input_ids))
    labels = input_ids
    for name in _MASKS:
        if example.get(name) is not None:
            mask = _per_token(example, name, number, len(input_ids))
            labels = np.where(mask != 0, labels, IGNORE_INDEX)
    return labels


def _seq_lengths(example: Mapping[str, Any], number: int, tokens: int) -> NDArray[np.int64]:
    """Return the tokens of each document in the sequence, int64 [documents], without empty ones."""
    if example.get("seq_lengths") is not None:
        lengths = _integers(example, "seq_lengths", number).astype(np.int64)
        if (lengths < 0).any() or lengths.sum() != tokens:
            raise ValueError(
                f"seq_lengths of example {number} sum to {lengths.sum()}, but it has {tokens} input_ids; give the "
                "length of each document in the sequence, in order"
            )
        return lengths[lengths > 0]
    if example.get("position_ids") is not None:
        return _from_positions(_per_token(example, "position_ids", number, tokens), number)
    return np.array([tokens], dtype=np.int64)


def _from_positions(positions: NDArray[np.integer], number: int) -> NDArray[np.int64]:
    """Return the lengths of the documents that position_ids [n] count through, int64 [documents]."""
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=len(positions))
    if not len(starts) or starts[0] != 0 or (np.diff(positions) != 1).sum() != len(starts) - 1:
        raise ValueError(
            f"position_ids of example {number} do not count 0, 1, 2, ... in each document, so its documents are "
            "unknown; give seq_lengths, the length of each document in the sequence"
        )
    return lengths


def _per_token(example: Mapping[str, Any], name: str, number: int, tokens: int) -> NDArray[np.integer]:
    values = _integers(example, name, number)
    if len(values) != tokens:
        raise ValueError(
            f"{name} of example {number} has {len(values)} values, but it has {tokens} input_ids; give one value per "
            f"token (labels are not shifted)"
        )
    return values


def _integers(example: Mapping[str, Any], name: str, number: int) -> NDArray[np.integer]:
    """Return a flat array of integers or booleans."""
    values = np.asarray(example[name])
    if values.size == 0:
        values = values.astype(np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise ValueError(
            f"{name} of example {number} must be a flat list of integers, got shape {values.shape} of {values.dtype}"
        )
    return values
