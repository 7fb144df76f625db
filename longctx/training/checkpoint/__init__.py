"""Checkpoints that any layout can resume: states by parameter, without pickles, written atomically."""
