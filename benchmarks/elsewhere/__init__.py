"""What the stock stack does with packed documents, next to longctx, on this machine's CPU.

    python -m benchmarks.elsewhere                    # all cases, 15 minutes on two cores
    python -m benchmarks.elsewhere --only mask packs  # some of them

"Stock stack" is transformers' Trainer or TRL's SFTTrainer with accelerate's ParallelismConfig: Ulysses on DeepSpeed
(sp_size) or context_parallel on FSDP2 (cp_size). Both columns train one optimizer step from the same weights on the
same rows, in real gloo processes that nothing else has used. "Exact" is one process with stock transformers, one
document after the other, token-weighted.

accelerate refuses both engines on a machine without an accelerator. What it takes to run them, and nothing else of
the stock stack, is changed: accelerate's state is set as longctx sets it (longctx.training.engines.start_on_cpu);
torch's context_parallel gets the CPU's attention kernel beside the CUDA ones (`_give_ring_the_cpu_kernel`); and on
four processes the backward of an all-gather does what it does on NCCL (`_repair_gather_backward`). The rows called
"control" show that the stock stack, driven so, is exact where it has no reason not to be.

The case "recurrent" compares releases: it installs each in an environment of its own, and trains a tiny Qwen3.5 there
on one packed row of one device, without longctx and with nothing changed.
"""
