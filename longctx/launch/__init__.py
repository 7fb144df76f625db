"""Start processes on any machine, and have them meet: here, in SLURM, after a restart."""
