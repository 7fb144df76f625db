"""Attention over several ranks against one process with as many threads: time of forward and backward.

    python -m benchmarks.attention                                 # two gloo ranks, 32k tokens, fp32 and bf16
    python -m benchmarks.attention --tokens 2048 --repeats 2       # quicker
    python -m benchmarks.attention --virtual_ranks 2 4 8 --tokens 16384 32768
    python -m benchmarks.attention --virtual_ranks 2 4 8 --tokens 65536 524288 --device cuda --dtype bfloat16

*Ranks.* Every rank has one thread; "one process" has as many threads as there are ranks, and the whole pack; all have
huge pages, as in training. All ways take turns within each repetition, from a barrier to the slowest rank's end.
"speed" is the time of one process over a way's own, "over zigzag" the time of the per-document zigzag over it, "CPU"
the processor time of all ranks, which waiting does not count in, over that of one process; each in the same
repetition: median (lowest to highest). Before the timing, each way's output and gradients are compared with one
process: "error" is the largest of the four, relative in norm.

*Per-document zigzag* is the ring as published: every document, padded to a multiple of 2P, is cut into 2P pieces, of
which rank r has the r-th and the r-th from the end, and all keys and values visit every rank.

*Virtual ranks.* One device works off the ranks one after another, each calling `ring_attention` (or the zigzag) in a
process group that sends nothing: what is left is a rank's blocks, copies and merges, without communication. "slowest
x P", with its forward and backward, and "mean x P" are over one `varlen_attention` of the whole pack in the same
repetition. On the CPU one thread works and its own seconds are counted.
"""
