"""The order of a ring's messages: each is sent as early as memory allows, and all ranks send theirs in one order.

Two ranks match their messages by the order in which they are sent, so the order depends on the plan alone, not on how
far a rank is.

Shape legend: P ranks, S tokens a rank. Hop h takes keys and values to the rank at distance h.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longctx.ring.plan import IntArray


class MessageOrder(NamedTuple):
    """What has been sent, and what has returned, when a pass comes to the block of a hop."""

    sent: list[int]
    """[P]: at [h], the last hop whose keys and values are sent before block h is computed; at [0], at the beginning."""
    returned: list[int]
    """[P]: at [h], the last hop whose gradients have to return before those of hop h are sent."""
    own_after: int
    """The hop after which a rank computes its own block in the backward pass, while gradients return.

    It is the hop before the first one at which ranks wait for gradients of others, or else the last: ranks have
    different work at a hop, and their own blocks fill the time until the last of them is done.
    """

    @classmethod
    def of(cls, longest: IntArray, num_tokens: int) -> MessageOrder:
        """Return the order of messages that shrink from hop to hop.

        The keys and values of one block and those that arrive meanwhile are at most 2 · S tokens, and the gradients
        that return are at most 1.5 · S, unless those of a single hop are more.

        Args:
            longest: int64 [P], at [h] the tokens of the longest message of hop h; [0] is not read.
            num_tokens: S.
        """
        hop, last_hop = np.arange(len(longest)), len(longest) - 1
        tokens = np.where(hop > 0, longest, 0)
        total = np.cumsum(tokens)
        sent = np.searchsorted(total, total - tokens + 2 * num_tokens, side="right") - 1
        returned = np.clip(np.searchsorted(total, total - 1.5 * num_tokens), 0, hop - 1)
        waits = np.flatnonzero(returned > 0)
        return cls(
            sent=np.clip(sent, hop + 1, last_hop).tolist(),
            returned=returned.tolist(),
            own_after=int(waits[0]) - 1 if len(waits) else last_hop,
        )


def heads_at_a_time(num_key_value_heads: int, heads_k_stride: int | None) -> int:
    """Return how many heads a gather collects at a time; a quarter of them without a stride."""
    return heads_k_stride or -(-num_key_value_heads // 4)
