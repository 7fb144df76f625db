"""Attention: the registry of backends and the choice among them, the operator, its kernels, transformers' interface."""
