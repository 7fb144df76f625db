"""Compare a run with one device, on one's own model, data and machine: `python -m longctx.verify --sp N`."""

from longctx.verify.reference import single_device_step

__all__ = ["single_device_step"]
