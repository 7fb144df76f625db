"""The memory of one training step, traced on fake tensors: no weights, no devices, no messages."""
