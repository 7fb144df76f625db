"""Documents that branch: a trunk, such as a prompt, and branches that share it, such as answers to the prompt.

A branch sees the trunk and its own tokens, and no other branch. The trunk is computed once. It leaves the prompt's last
token to the branches, each of which begins with it: so each token has one target at most, and the trunk has none.

prompt p0 p1 p2, answers a0 a1 and b0:

input_ids       p0    p1 |  p2   a0   a1 |  p2   b0
labels        -100  -100  -100   a0   a1  -100   b0
position_ids     0     1     2    3    4     2    3
branch_starts                2              5
cu_seqlens       0                                   7

Shape legend: T tokens, n documents, b branches, m segments. A segment is a trunk, a branch, or a whole document that
does not branch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

NO_BRANCHES = np.zeros(0, dtype=np.int64)


class Segments(NamedTuple):
    """The segments of a row: trunks, branches, and whole documents that do not branch."""

    bounds: NDArray[np.int64]
    """int64 [m + 1]: boundaries of the segments, from 0 to T."""
    document: NDArray[np.int64]
    """int64 [m]: the document of each segment."""
    is_branch: NDArray[np.bool_]
    """bool [m]."""

    @classmethod
    def of(cls, cu_seqlens: NDArray[np.integer], branch_starts: NDArray[np.int64]) -> Segments:
        """Return the segments of documents with boundaries int [n + 1], whose branches begin at int64 [b].

        Raises:
            ValueError: for branches that do not begin one after the other within documents, each after a trunk.
        """
        wrong = np.isin(branch_starts, cu_seqlens) | (branch_starts < 0) | (branch_starts > cu_seqlens[-1])
        if wrong.any() or (np.diff(branch_starts) <= 0).any():
            raise ValueError(
                f"branch_starts {branch_starts[:8].tolist()} do not ascend within documents that begin at "
                f"{cu_seqlens[:8].tolist()}. A branch begins after at least one token of a trunk; give a document "
                "without a trunk no branches."
            )
        bounds = np.union1d(cu_seqlens, branch_starts).astype(np.int64)
        document = np.searchsorted(cu_seqlens, bounds[:-1], side="right") - 1
        return cls(bounds, document, np.isin(bounds[:-1], branch_starts))

    @property
    def are_trunks(self) -> NDArray[np.bool_]:
        """bool [m]: the segments that branches follow."""
        return ~self.is_branch & np.append(self.is_branch[1:], False)

    @property
    def answers(self) -> NDArray[np.int64]:
        """int64 [m]: each segment's number among those that are no trunk. A trunk has that of its first branch."""
        return np.cumsum(~self.are_trunks) - ~self.are_trunks

    @property
    def trunk_lengths(self) -> NDArray[np.int64]:
        """int64 [n]: the tokens of each document's trunk; 0 for a document that does not branch."""
        return np.bincount(self.document, np.where(self.are_trunks, np.diff(self.bounds), 0)).astype(np.int64)

    def position_ids(self) -> NDArray[np.int64]:
        """Return int64 [T], the position of each token. A document counts from 0, and a branch from its trunk's end."""
        starts, lengths = self.bounds[:-1], np.diff(self.bounds)
        first = self.trunk_lengths[self.document] * self.is_branch
        return np.arange(self.bounds[-1]) - np.repeat(starts - first, lengths)

    def num_repeated(self) -> int:
        """Return how many more tokens there would be if each branch had a trunk of its own."""
        return int((self.trunk_lengths * (np.bincount(self.document, self.is_branch) - 1)).clip(min=0).sum())

    def num_pairs(self) -> int:
        """Return the number of query-key pairs that attend to each other."""
        lengths = np.diff(self.bounds)
        on_trunk = lengths * self.trunk_lengths[self.document] * self.is_branch
        return int((lengths * (lengths + 1) // 2 + on_trunk).sum())


def branches_of(values: ArrayLike | None) -> NDArray[np.int64]:
    """Return `branch_starts` of a row or a batch, int64 [b]; none if it has no such field."""
    return NO_BRANCHES if values is None else np.asarray(values, dtype=np.int64)
