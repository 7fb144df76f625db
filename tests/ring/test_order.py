"""The order of a ring's messages: what is held at once, by a walk through the hops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longctx.ring.order import MessageOrder

TOKENS = 100
shrinking = st.lists(st.integers(0, TOKENS), min_size=1, max_size=9).map(lambda longest: sorted(longest, reverse=True))
"""The longest message of each hop; the first stands for the own tokens."""


@given(shrinking)
def test_no_more_is_held_than_memory_is_planned_for(longest):
    order, last_hop = MessageOrder.of(np.array([TOKENS, *longest[1:]]), TOKENS), len(longest) - 1
    sent, coming, returning = order.sent[0], set(range(1, order.sent[0] + 1)), set()

    def tokens(hops):
        return sum(longest[hop] for hop in hops)

    for hop in range(1, last_hop + 1):
        assert hop in coming, "keys and values are sent before they are attended to"
        assert tokens(coming) <= 2 * TOKENS
        coming |= set(range(sent + 1, order.sent[hop] + 1))
        sent = order.sent[hop]
        assert tokens(coming) <= 2 * TOKENS
        coming.remove(hop)
        returning = {before for before in returning if before > order.returned[hop]} | {hop}
        assert tokens(returning) <= 1.5 * TOKENS
        assert order.own_after < hop or order.returned[hop] <= 0, "ranks wait after their own blocks"
    assert sent == last_hop
    assert not coming
