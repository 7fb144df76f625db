"""Layers that need less memory or time than a model's own: the head with its loss, MLPs, whole decoder layers."""
