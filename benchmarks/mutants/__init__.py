"""Bugs planted on purpose, one at a time, and the tests that notice them."""
