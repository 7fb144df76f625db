"""How long a sequence can be: every memory option, alone and together, from traced steps.

    python -m benchmarks.memory > benchmarks/results/memory_traced_DATE.md     # all parts
    python -m benchmarks.memory --parts lengths --models Qwen3-0.6B --sp 8
    python -m benchmarks.memory --parts states time                            # real steps on the CPU, small model

Lengths are predicted, not measured. One training step is traced on fake tensors (`benchmarks.memory.step`), for
one rank of a fake process group, with FlashAttention-2 as the kernel and one document a row: FSDP2 over all devices in
accelerate's wrapping, fp32 shards, bf16 compute, AdamW, activation checkpointing. What the device or the host holds
while a part of the step runs is linear in the length and in the number of layers, so each part's line is fitted to
four traces (two depths, two lengths), and the longest sequence is the last at which every part fits. *check* is a
whole model at a third length, its traced peak over the fitted one.
"""
