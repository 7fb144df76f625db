"""What a step asks of the host, beside TRL's: function calls, processor time, and time by the clock.

    python -m benchmarks.host_time
    python -m benchmarks.host_time --layouts "sp 1" --modes full --steps 40 --against COMMIT --output FILE

Arithmetic is made negligible: 28 layers of width 64 and one document of 48 tokens a step, on the CPU with one thread.
What is left is the host's work. On a GPU, it overlaps with the device's work or delays it. `longctx` is
`python -m longctx.train`, and `TRL` is its SFTTrainer, at sp 2 with accelerate's cp_size 2 on FSDP2 or sp_size 2 on
DeepSpeed ZeRO-3. Both train the same model on the same documents in the same order, with the same optimizer and a log
entry every ten steps, and their losses have to agree.

Each trainer runs in processes of its own, since longctx puts its own functions into some of the libraries' classes.
Their steps alternate: one trainer takes a step while the others wait. So all of them are slowed alike when the machine
becomes slower. All are started several times, because the time of a step also depends on the start: it differs by up to
a tenth, and stays so until the processes end.
"""
