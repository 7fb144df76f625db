"""How long sequences can be, on which devices, and how fast: `python -m longctx.plan`, before anything runs."""
