"""Layers of a model that take less memory or time than their originals: the head with its loss, MLPs, whole blocks."""
