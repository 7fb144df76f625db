"""Command lines whose outcome is recorded: see `settings`, which resolves them, and `texts`, which has wrong ones."""

from __future__ import annotations

import re
from pathlib import Path

_SECTIONS = re.split(r"^\[(.+)\]\n", Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
_LINES = {title: text.strip().splitlines() for title, text in zip(_SECTIONS[1::2], _SECTIONS[2::2], strict=True)}

SETS = _LINES["train"]
"""Flags of `longctx train`, on every machine; with the tiny model unless they name another or start with `demo`."""

PAIRS = _LINES["dpo"]
"""Flags of `longctx dpo`."""

ON_8B = _LINES["8B"]
"""Flags for a model of 8 billion parameters on eight GPUs, where forecasts decide."""

_RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
_BY_ACCELERATE = {**_RANKS, "ACCELERATE_MIXED_PRECISION": "no"}
_ZERO = {**_BY_ACCELERATE, "ACCELERATE_USE_DEEPSPEED": "true"}
_FSDP = {**_BY_ACCELERATE, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
_CHECKPOINTING = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}
_PLAIN, _SP = "--max_length 256", "--sp 2 --sp_backend ring"
ENVIRONMENTS: dict[str, tuple[dict[str, str], list[str]]] = {
    "torchrun": (
        _RANKS,
        ["demo", _PLAIN, _SP, "--sp auto --max_length 4096", "--num_processes 2", "--sp 3", "--sp all"],
    ),
    "torchrun, 2 nodes": (_RANKS | {"WORLD_SIZE": "8"}, [_PLAIN, "--sp 8", "--sp 4 --sp_backend ulysses"]),
    "torchrun, no local size": ({"RANK": "0", "WORLD_SIZE": "16"}, [_PLAIN, "--sp 16 --sp_backend ring"]),
    "deepspeed": ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "4"}, [_PLAIN, _SP]),
    "bf16": (_BY_ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "bf16"}, [_PLAIN, "--bf16 False"]),
    "fp16": (_BY_ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "fp16"}, [_PLAIN]),
    "accumulation 3": (
        _BY_ACCELERATE | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"},
        [_PLAIN, "--gradient_accumulation_steps 2", "--global_batch_size 8"],
    ),
    "use_cpu": (_BY_ACCELERATE | {"ACCELERATE_USE_CPU": "true"}, [_PLAIN, "--use_cpu False"]),
    "one of several": ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, [_PLAIN, "--sp 2"]),
    "two machines on the CPU": (
        {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "10.0.0.1"},
        [_PLAIN],
    ),
    "ZeRO-0": (_ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, [_PLAIN]),
    "ZeRO-2": (
        _ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        [
            _PLAIN,
            _SP,
            "--offload_param_device cpu",
            "--offload_optimizer_device cpu --max_length 256",
            "--engine fsdp2",
        ],
    ),
    "ZeRO-3, clipped, offloaded": (
        _ZERO
        | {"ACCELERATE_GRADIENT_CLIPPING": "0.5", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
        | {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"},
        [_PLAIN, "--max_grad_norm 1.0", "--offload_optimizer_device none", "--offload_optimizer_device cpu"],
    ),
    "FSDP2, checkpointing": (_FSDP | _CHECKPOINTING, [_PLAIN, "--gradient_checkpointing False", "--engine deepspeed"]),
    "FSDP2, checkpoints offloaded": (
        _FSDP | _CHECKPOINTING | {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
        [_PLAIN, "--sp 2 --gradient_checkpointing False"],
    ),
    "FSDP2, parameters offloaded": (_FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, [_PLAIN, "--offload_param_device cpu"]),
    "FSDP1": (_FSDP | {"FSDP_VERSION": "1"}, [_PLAIN, _SP]),
    "cp 2": (_FSDP | {"PARALLELISM_CONFIG_CP_SIZE": "2"}, [_PLAIN, "--sp 4", "--sp_backend ulysses", "--cp 2"]),
    "sp 2": (_ZERO | {"PARALLELISM_CONFIG_SP_SIZE": "2"}, [_PLAIN, "--cp 2", "--sp 2"]),
    "cp 2, sp 2": (_FSDP | {"PARALLELISM_CONFIG_CP_SIZE": "2", "PARALLELISM_CONFIG_SP_SIZE": "2"}, [_PLAIN]),
    "tp 2": (_FSDP | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, [_PLAIN]),
    "dp_replicate 2": (
        _FSDP | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        [_PLAIN, "--dp_replicate 4", _SP],
    ),
    "Megatron-LM": (_BY_ACCELERATE | {"ACCELERATE_USE_MEGATRON_LM": "true"}, [_PLAIN]),
}
"""What launchers export, and lines of flags under each; with GPUs and without."""

WITH_PROFILES = [_PLAIN, "--use_cpu --max_length 256", "--sp 2 --max_length 256", "--sp 2 --sp_backend ring --use_cpu"]
WITH_PROFILES += [
    "--engine deepspeed --max_length 256",
    "--max_grad_norm 0.7 --gradient_accumulation_steps 2 --bf16 True",
]
"""Lines of flags under every profile."""

RUN_FILES = {
    "alst_ulysses_4gpu": "alst_ulysses_4gpu.yaml --model_name_or_path tiny",
    "context_parallel_2gpu": "context_parallel_2gpu.yaml --model_name_or_path tiny",
    "hybrid_8gpu": "hybrid_8gpu.yaml --model_name_or_path tiny",
    "zero3": "sft_packed.yaml --model_name_or_path tiny",
    "fsdp2": "demo.yaml --model_name_or_path tiny",
}
"""The file of flags that goes with a profile."""

ALONE: dict[str, list] = {
    "accelerator_config": ['{"split_batches": true}'],
    "data_seed": ["8"],
    "dataset_kwargs": ['{"skip_prepare_dataset": true}'],
    "dtype": ["bfloat16", "auto", "float16"],
    "eval_strategy": ["steps", "epoch"],
    "fsdp_config": ['{"version": 2}'],
    "include_num_input_tokens_seen": ["all"],
    "liger_kernel_config": ['{"rope": false}'],
    "logging_strategy": ["no", "epoch"],
    "lr_scheduler_kwargs": ['{"min_lr": 1e-6}', "[1]", '{"min_lr": NaN}'],
    "lr_scheduler_type": ["cosine", "reduce_lr_on_plateau"],
    "model_init_kwargs": ['{"hidden": 5}', '{"dtype": "bfloat16"}', '{"num_hidden_layers": 3}', '["a"]'],
    "optim": ["sgd", "adafactor"],
    "parallelism_config": ['{"cp_size": 2}'],
    "report_to": ["none", "tensorboard", "nothing"],
    "save_strategy": ["no", "epoch", "best"],
    "train_sampling_strategy": ["sequential", "group_by_length"],
    "warmup_steps": ["5"],
    "max_steps": ["5"],
    "learning_rate": ["1e-3", "nan", "1e39"],
    "adam_beta1": ["0.5", "1.0"],
    "trackio_static_space_id": ["False", "me/runs"],
    "rope_scaling": ["yarn:4", "dynamic:2", "yarn"],
}
"""Values of flags that are tried alone, where the kind of the flag does not give one."""

RANDOM = _LINES["random"]
"""More flags to draw from for random command lines."""

WRONG = _LINES["wrong"]
"""Commands that end with an error."""

WRONG_FILES = _LINES["wrong files"]
"""Lines of a YAML file for `longctx train --config` that end with an error."""

_PAIR = "--model_name_or_path tiny --dataset_name stdlib"
WRONG_ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({"RANK": "0", "WORLD_SIZE": "6"}, "train --sp 4"),
    ({"RANK": "0", "WORLD_SIZE": "4"}, "train --num_processes 2"),
    ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "train --sp 3"),
    ({"RANK": "0", "WORLD_SIZE": "4"}, "train --accelerate_config zero3"),
    (_ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, f"train {_PAIR} --offload_param_device cpu"),
    (_ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, f"train {_PAIR}"),
    (_ZERO | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none.json"}, f"train {_PAIR}"),
    (_FSDP | {"PARALLELISM_CONFIG_TP_SIZE": "2"}, "train"),
    (_FSDP | {"PARALLELISM_CONFIG_CP_SIZE": "2"}, "train --sp 4"),
    (_FSDP | {"FSDP_VERSION": "1"}, f"train {_PAIR}"),
    (_BY_ACCELERATE | {"ACCELERATE_MIXED_PRECISION": "fp8"}, f"train {_PAIR}"),
    (_BY_ACCELERATE | {"ACCELERATE_USE_MEGATRON_LM": "true"}, f"train {_PAIR}"),
    ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true", "OMPI_COMM_WORLD_SIZE": "4"}, f"train {_PAIR}"),
    (_FSDP | {"PARALLELISM_CONFIG_CP_SIZE": "2"}, "verify --sp 4"),
]
"""Environments, each with a command that ends with an error there."""
