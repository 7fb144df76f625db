"""Start processes and connect them: on one machine, in SLURM, after a restart."""
