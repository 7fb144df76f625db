"""Goldens: what longctx computes, recorded, so that a change shows what it changes and nothing changes unnoticed.

    python -m tests.golden                     # everything, against what is recorded
    python -m tests.golden orders tokens       # these groups
    python -m tests.golden --record orders     # record anew what a change alters on purpose
    python -m tests.golden --against COMMIT    # both trees on this machine, floating-point results bit for bit

A group is a module of this package. Its `golden(quick)` yields pairs of a name and a JSON value: integers, orders,
texts, names and digests, which are the same on every machine and are committed in `data/GROUP.json`. With `quick`, it
yields those that `.ci/run` compares: of `training` two runs, of the others everything. A module may also have
`measured()`, which yields results of floating-point arithmetic, as hexadecimal floats or digests of bytes. These depend
on the processor, so they are not committed: `--against` computes them with both trees.

A module whose values may differ within limits defines `differs(name, recorded, now)`, which returns what is wrong, or
an empty text. Unless it does, values must be equal.
"""

GROUPS = ("orders", "tokens", "texts", "surface", "counts", "training")
