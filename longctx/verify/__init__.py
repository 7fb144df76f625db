"""Compare a run with one device, on one's own model, data and machine: `python -m longctx.verify --sp N`."""
