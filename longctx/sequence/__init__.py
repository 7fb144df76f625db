"""The parallel degrees, the types that cross stages, and the functions that cut batches and shift labels.

`Layout.spread` decides which rank holds a token, in a ring by `longctx.ring.planner`.
"""
