"""A table of scale: real runs at 2 to 48 processes beside formulas, and computed rows of large models to 1,024 ranks.

    python -m benchmarks.scale                                          # about half an hour on two cores
    python -m benchmarks.scale --ranks 2 --layers 2 --hidden 256        # a minute
    python -m benchmarks.scale --ranks --node_gbs 10 --storage_gbs 400  # the computed rows alone

Real runs are `longctx train` on FSDP2 and gloo, of a Llama on disk in bf16: one step, a checkpoint, and a second start
that resumes from it. Some resume with fewer ranks. Every rank measures itself: the peak of its resident memory in
/proc/self/status, above what was resident when the phase began and so above its imports, without huge pages and with
tensors that glibc returns to the system at once; the bytes that it asks of files; every opening of a file, by Python's
audit events and around safetensors' functions; and its calls of the process group's store. Groups of 8 ranks take
themselves for the ranks of a node. Where a run has a limit for the bytes of a file, it takes the place of 5 GB for
files of weights and of 2 GiB for files of states, so that a small model has several.

`measured` is of the rank that has most, unless the row names ranks, and `computed` is what the formulas of
benchmarks/scale/formulas.py give for the same model. Counts and sizes of files may differ by 2%, longctx.json, which
has seconds of each rank in decimals, by 15%, and memory by 15% and 8 MiB; what differs by more is marked with **!**.
Computed seconds are those of reading and writing files, at the speed of the disk that was measured before the runs.
Computation is left out. A row is marked `slower` if the run took over 15% longer than that, and `faster` if it took
less time, which happens where files are still in memory.
"""
