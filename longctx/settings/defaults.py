"""The demo preset, and the defaults of longctx that differ from TRL's."""

DEMO = {
    "model_name_or_path": "tiny",
    "dataset_name": "stdlib",
    "packing": True,
    "max_length": 8192,
    "overlong": "split",
    "max_steps": 20,
    "per_device_train_batch_size": 1,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "output_dir": "longctx-output",
}
"""The preset of a run without model and data set."""

DEFAULTS = {
    "packing": True,
    "max_length": None,
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
}
"""Defaults of other runs that differ from SFTConfig's. The max_length None stands for the model's context length. One
packed sequence fills a device, and a step of such sequences can take minutes."""

ADAPTER_DEFAULTS = {"lora_dropout": 0.0}
"""Defaults with --use_peft that differ from ModelConfig's: dropout is refused."""
