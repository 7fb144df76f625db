"""What attends to what in documents with branches (`longctx.sequence.layout`), as entries of kernels.

A branch sees its trunk and the causal part of itself. Entries of one list have each query once, so there are two lists:
one of segments with themselves, and one of all branches of a document with their trunk. The results are merged.

document    trunk [0, 4), branches [4, 7) and [7, 9)
causal      [0, 4) × [0, 4), [4, 7) × [4, 7), [7, 9) × [7, 9)
full        [4, 9) × [0, 4)

Shape legend: S tokens of a rank, in the order of its shard: a document's tokens follow each other in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from torch import Tensor

from longctx.attention.kernels import Entries, add, block_forward, merge
from longctx.ring.plan import IntArray
from longctx.sequence.batch import AttentionKind
from longctx.sequence.layout import Layout

Ranges = list[tuple[int, int, int, int]]


def segments_of_tokens(segments: Layout, tokens: IntArray) -> IntArray:
    """Return int64 [S], the segment of each of these tokens of the row."""
    return np.searchsorted(segments.bounds, tokens, side="right") - 1


def own_entries(segments: Layout, of_token: IntArray, softcap: float | None) -> list[Entries]:
    """Return what a rank's tokens see of each other: causal entries of all, then full entries of branches, if any.

    Args:
        of_token: int64 [S], from `segments_of_tokens`.
    """
    bounds = np.concatenate(([0], np.flatnonzero(np.diff(of_token)) + 1, [len(of_token)]))
    segment = of_token[bounds[:-1]]
    document = segments.document[segment]
    first = np.flatnonzero(np.diff(document, prepend=-1))
    last = np.append(first[1:], len(document))
    branches = ~segments.is_branch[segment[first]] & (last - first > 1)
    first, last = first[branches], last[branches]
    full = np.stack((bounds[first + 1], bounds[last], bounds[first], bounds[first + 1]), axis=1)
    return [Entries.of_documents(bounds, softcap=softcap), *full_entries([full], softcap)]


def other_entries(
    segments: Layout, entries: IntArray, of_query: IntArray, of_key: IntArray, softcap: float | None
) -> list[Entries]:
    """Return the parts of entries between two ranks' tokens that branches see. An entry's keys precede its queries.

    Args:
        entries: int64 [m, 4], (q_start, q_end, kv_start, kv_end); no query and no key is in two of them.
        of_query, of_key: the segments of the two ranks' tokens, from `segments_of_tokens`.
    """
    on_trunk: Ranges = []
    within: Ranges = []
    for q_start, q_end, kv_start, kv_end in entries.tolist():
        trunk_end = kv_start + int((~segments.is_branch[of_key[kv_start:kv_end]]).sum())
        if trunk_end > kv_start:
            on_trunk.append((q_start, q_end, kv_start, trunk_end))
        queries, keys = of_query[q_start:q_end], of_key[trunk_end:kv_end]
        for segment in np.intersect1d(queries, keys):
            q_range = q_start + np.searchsorted(queries, [segment, segment + 1])
            kv_range = trunk_end + np.searchsorted(keys, [segment, segment + 1])
            within.append((*q_range.tolist(), *kv_range.tolist()))
    return full_entries([np.array(ranges, np.int64).reshape(-1, 4) for ranges in (on_trunk, within)], softcap)


def refuse_branches(kind: AttentionKind) -> NoReturn:
    """Raise ValueError: layers of this kind do not see the whole of a document."""
    raise ValueError(
        f"documents with branches under attention with window={kind.window}, chunk_size={kind.chunk_size}: branches "
        "need layers that see the whole document. Leave branch_starts out, and give every branch its own trunk."
    )


def full_entries(tables: Sequence[IntArray], softcap: float | None) -> list[Entries]:
    """Return full entries of tables int64 [m, 4], (q_start, q_end, kv_start, kv_end), that are not empty."""
    return [Entries(table[:, :2], table[:, 2:], causal=False, softcap=softcap) for table in tables if len(table)]


def parts_forward(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Entries], scale: float, *, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute attention over the keys of all parts, the first of which has every query in order.

    q [1, H, S, D], k and v [1, K, S, D] -> out [1, H, S, D] of q's dtype and lse [1, H, S], fp32 or wider.

    Args:
        wide: whether out has lse's dtype, for further parts to be merged. A second part alone is as exact without.
    """
    out, lse = block_forward(q, k, v, parts[0], scale)
    if wide:
        out = out.to(lse.dtype)
    for entries in parts[1:]:
        merge(out, lse, entries.q_rows, *block_forward(q, k, v, entries, scale))
    return out, lse


def add_gradients(gradients: Sequence[Tensor], entries: Entries, of_part: Sequence[Tensor]) -> None:
    """Add the gradients of a part's q, k and v to those of all rows, in place."""
    for gradient, rows, part in zip(
        gradients, (entries.q_rows, entries.kv_rows, entries.kv_rows), of_part, strict=True
    ):
        add(gradient, rows, part)
