"""The training run: which rows a step takes, the trainer, its log, its checkpoints."""
