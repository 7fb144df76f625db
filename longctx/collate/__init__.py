"""Make batches of packs or documents; the only place that pads."""
