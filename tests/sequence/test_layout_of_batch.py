"""Batches from elsewhere: what describes their documents is read as it says, or refused."""

from __future__ import annotations

import re

import pytest
import torch

from longctx.collate import SequenceCollator
from longctx.sequence.layout import Layout

IDS = torch.arange(1, 17).view(2, 8)
COUNTED = torch.arange(8).expand(2, 8)
RESTARTED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 2)
GAP = COUNTED + (COUNTED > 2)
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
UNPADDED = IDS.masked_fill(MASK == 0, -100)
BRANCHES = {  # a trunk of 2 tokens with branches of 3 in both rows; the padding of the second row is one more branch
    "labels": torch.tensor([[-100, -100, -100, 4, 5, -100, 7, 8], [-100, -100, -100, 12, 13, -100, -100, -100]]),
    "position_ids": torch.tensor([[0, 1, 2, 3, 4, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]]),
    "branch_starts": torch.tensor([2, 5, 10]),
}


def batch_of(**more: object) -> dict[str, object]:
    return {"input_ids": IDS, "labels": IDS} | more


REFUSED = {
    "a gap, and no branches": ({"position_ids": GAP, "branch_starts": torch.tensor([])}, "either count up by 1"),
    "a gap, and branches in padding alone": (
        {"position_ids": GAP, "labels": UNPADDED, "attention_mask": MASK, "branch_starts": torch.tensor([14])},
        "position_ids do not fit",
    ),
    "positions of one row for two": ({"position_ids": COUNTED[:1]}, "position_ids have shape (1, 8)"),
    "labels of another order": ({"labels": IDS.T}, "labels have shape (8, 2), and input_ids (2, 8)"),
    "flat tokens": ({"input_ids": IDS.flatten(), "labels": IDS.flatten()}, "Give both as [B, S]"),
    "a length below 0": ({"lengths": [8, -1]}, "lengths [8, -1] do not fit"),
    "no boundaries": ({"cu_seq_lens_q": torch.tensor([], dtype=torch.int32)}, "must ascend from 0"),
    "a layout with other padding": (
        {"layout": Layout.of_batch(batch_of(position_ids=RESTARTED, labels=UNPADDED))}
        | {"position_ids": RESTARTED, "labels": UNPADDED, "attention_mask": MASK},
        "the batch's layout is of another batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_refused(name):
    more, said = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(said)):
        Layout.of_batch(batch_of(**more))


ACCEPTED = {
    "boundaries as a list": ({"cu_seq_lens_q": [0, 5, 8, 13, 16]}, [0, 5, 8, 13, 16], 12),
    "fields without a value": (
        {"attention_mask": MASK, "labels": UNPADDED, "lengths": None, "position_ids": None, "branch_starts": None},
        [0, 8, 13, 16],
        11,
    ),
    "a mask of bfloat16": ({"attention_mask": MASK.bfloat16(), "labels": UNPADDED}, [0, 8, 13, 16], 11),
    "branches as a list, with a branch that counts through padding": (
        BRANCHES | {"branch_starts": [2, 5, 10], "attention_mask": MASK},
        [0, 2, 5, 8, 10, 13, 16],
        6,
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_complete_is_read(name):
    more, bounds, num_targets = ACCEPTED[name]
    layout = Layout.of_batch(batch_of(**more))
    assert (layout.bounds.tolist(), layout.num_targets) == (bounds, num_targets)
    assert layout.lengths is None or sum(layout.lengths) == layout.real_tokens().sum() == 13


def test_rows_may_have_no_branches():
    """A data set in which other rows have some gives None."""
    row = {"input_ids": [5, 6, 7], "branch_starts": None}
    assert SequenceCollator(pad_token_id=0).with_layout([row])[1].segments is None
