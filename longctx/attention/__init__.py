"""Attention backends: local kernels, and the registry that transformers calls."""
