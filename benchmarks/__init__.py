"""Benchmarks; each prints the table that is committed."""
