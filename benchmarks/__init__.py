"""Benchmarks; each prints the table that is committed."""

import longctx  # noqa: F401  (first, since it leaves the working directory out of imports)
