"""Treat input of unknown origin safely: in a bounded process, with its files checked, and kept out of imports."""
