"""Resolve flags, profile, environment and model config into one typed, frozen run, with all checks between them."""
