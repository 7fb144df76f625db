"""The keys of accelerate's config and of a deepspeed_config_file: those that are read, and those that may be passed on.

Whatever is in none of these tables is refused. Paths with dots are keys of the file, capitals are the variables that
`accelerate launch` exports.
"""

from __future__ import annotations

import json
from typing import Any

READ = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "communication_data_type": "communication_data_type",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.weight_decay": "weight_decay",
    "optimizer.params.eps": "adam_epsilon",
    **{
        f"zero_optimization.offload_{kind}.{key}": f"offload_{kind}_{key}"
        for kind in ("optimizer", "param")
        for key in ("device", "nvme_path")
    },
}
"""The flag that each of these keys of the file sets."""

_OFFLOAD = (
    "buffer_count buffer_size cpuadam_cores_perc fast_init max_in_cpu pin_memory pipeline pipeline_read pipeline_write"
)
_PASSED = {
    "": """aio. comms_logger. flops_profiler. timers. disable_python_gc dump_state log_level memory_breakdown
        seq_parallel_communication_data_type steps_per_print train_batch_size wall_clock_breakdown
        zero_allow_untested_optimizer""",
    "checkpoint.": "parallel_write.pipeline_stage tag_validation",
    "optimizer.": "type params.betas params.torch_adam",
    "zero_optimization.": """allgather_bucket_size allgather_partitions contiguous_gradients enable_sanity_checks
        ignore_unused_parameters log_trace_cache_warnings memory_efficient_linear overlap_comm reduce_bucket_size
        reduce_scatter round_robin_gradients stage stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
        stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce""",
    "zero_optimization.offload_optimizer.": _OFFLOAD,
    "zero_optimization.offload_param.": _OFFLOAD,
}
PASSED = frozenset(f"{section}{key}" for section, keys in _PASSED.items() for key in keys.split())
"""Keys, and sections with a dot, that change no result (sizes, overlap, reports), or that a function reads."""

_ONLY = {
    "false": """prescale_gradients disable_allgather sparse_gradients dataloader_drop_last zero_force_ds_cpu_optimizer
        bf16.immediate_grad_update bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
        checkpoint.use_node_local_storage checkpoint.load_universal compile.deepcompile
        optimizer.legacy_fusion optimizer.params.amsgrad
        activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing
        activation_checkpointing.contiguous_memory_optimization activation_checkpointing.profile
        activation_checkpointing.synchronize_checkpoint_boundary zero_optimization.elastic_checkpoint
        zero_optimization.legacy_stage1 zero_optimization.parameter_alignment
        zero_optimization.pipeline_loading_checkpoint zero_optimization.cpu_offload
        zero_optimization.cpu_offload_param zero_optimization.cpu_offload_params
        zero_optimization.cpu_offload_use_pin_memory zero_optimization.mics_hierarchical_params_gather
        zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.zero_quantized_weights
        zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zero_quantized_gradients
        zero_optimization.offload_optimizer.super_offload""",
    "true": """bf16.check_grad_overflow optimizer.params.adam_w_mode optimizer.params.bias_correction
        zero_optimization.compute_grad_norm zero_optimization.load_from_fp32_weights
        zero_optimization.override_module_apply""",
    "null": "activation_checkpointing.number_checkpoints data_types.grad_accum_dtype",
    "1": """gradient_predivide_factor sequence_parallel_size zero_optimization.zero_hpz_partition_size
        zero_optimization.offload_optimizer.ratio""",
    "-1": "zero_optimization.mics_shard_size",
    '"mean"': "gradient_allreduce_op",
    '"linear"': "scheduler.params.warmup_type",
}
ONLY: dict[str, Any] = {key: json.loads(value) for value, keys in _ONLY.items() for key in keys.split()}
"""Keys of the file with the only value, mostly DeepSpeed's default, that gives the result of one device."""

_SWITCHED = """amp autotuning comet csv_monitor curriculum_learning data_efficiency eigenvalue elasticity fp16
    hybrid_engine nebula progressive_layer_drop tensorboard torch_autocast wandb"""
SWITCHED = frozenset(_SWITCHED.split())
"""Sections of the file that do nothing unless their `enabled` is true, which is refused."""

FILLED = (
    "fp16.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_prefetch_bucket_size",
)
"""Keys whose `auto` accelerate or transformers fills in. Elsewhere `auto` is DeepSpeed's default."""

SCHEDULERS = {
    "WarmupLR": ("constant_with_warmup", "warmup_max_lr warmup_num_steps"),
    "WarmupDecayLR": ("linear", "warmup_max_lr warmup_num_steps total_num_steps"),
}
"""--lr_scheduler_type by DeepSpeed's scheduler, and the keys that must be `auto`: its defaults are other schedules."""

SCHEDULE_KEYS = frozenset({"type", "params.warmup_min_lr"}) | {
    f"params.{key}" for _, keys in SCHEDULERS.values() for key in keys.split()
}

_DEEPSPEED = {
    True: """gradient_accumulation_steps gradient_clipping mixed_precision offload_optimizer_device
        offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_save_16bit_model zero_stage""",
    False: """deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile deepspeed_inclusion_filter
        deepspeed_moe_layer_cls_names deepspeed_multinode_launcher seq_parallel_communication_data_type
        zero3_init_flag""",
}
DEEPSPEED_FIELDS = {key: is_in_file for is_in_file, keys in _DEEPSPEED.items() for key in keys.split()}
"""Keys of accelerate's deepspeed_config, and whether accelerate wants them in the file where there is one."""

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""Variables that begin so are accelerate's."""

_VARIABLES = {
    "ACCELERATE_": """CONFIG_DS_FIELDS CPU_AFFINITY DEBUG_MODE DISABLE_RICH DYNAMO_MODE DYNAMO_USE_DYNAMIC
        DYNAMO_USE_FULLGRAPH DYNAMO_USE_REGIONAL_COMPILATION ENABLE_RICH GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING
        LOG_LEVEL MIXED_PRECISION USE_CPU USE_DEEPSPEED USE_FSDP USE_PARALLELISM_CONFIG""",
    "ACCELERATE_DEEPSPEED_": """CONFIG_FILE MOE_LAYER_CLS_NAMES OFFLOAD_OPTIMIZER_DEVICE OFFLOAD_OPTIMIZER_NVME_PATH
        OFFLOAD_PARAM_DEVICE OFFLOAD_PARAM_NVME_PATH ZERO3_INIT ZERO3_SAVE_16BIT_MODEL ZERO_STAGE""",
    "FSDP_": """ACTIVATION_CHECKPOINTING ACTIVATION_CHECKPOINTING_OFFLOAD AUTO_WRAP_POLICY BACKWARD_PREFETCH
        CPU_RAM_EFFICIENT_LOADING FORWARD_PREFETCH MIN_NUM_PARAMS OFFLOAD_PARAMS RESHARD_AFTER_FORWARD STATE_DICT_TYPE
        SYNC_MODULE_STATES TRANSFORMER_CLS_TO_WRAP VERSION""",
    "PARALLELISM_CONFIG_": "CP_SIZE DP_REPLICATE_SIZE DP_SHARD_SIZE SP_SEQ_LENGTH SP_SIZE TP_SIZE",
}
VARIABLES: dict[str, str] = {f"{prefix}{key}": "" for prefix, keys in _VARIABLES.items() for key in keys.split()} | {
    **dict.fromkeys(("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"), "true false 0 no"),
    "ACCELERATE_MIXED_PRECISION": "bf16 no",
    "FSDP_SHARDING_STRATEGY": "full_shard 1 shard_grad_op 2",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_VERSION": "1 2",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather alltoall",
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa none eager flash_attention_2 flash_attention_3",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed accelerate",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "true",
}
"""Variables that are read or change no result, with the values for which that is so; "" for any."""

INERT = ("", "0", "false", "no", "none")
"""Values of other variables that ask for nothing."""

SAID = {
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": ("allgather", "longctx's ring passes keys and values from rank to rank"),
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": ("sdpa", "longctx chooses the kernel, see --attn_implementation"),
}
"""Variables whose values change no result, with accelerate's default and what happens in place of another value."""

_BF16 = "Use bf16, or leave the key out and set --bf16."
REMEDIES = {
    "": "Take the key out: longctx does not carry it out.",
    "activation_checkpointing": "Use --activation_checkpointing and --activation_offloading.",
    "amp": _BF16,
    "checkpoint": "longctx writes checkpoints of its own: see --save_strategy and --save_on_each_node.",
    "comet": "Use --report_to comet_ml.",
    "communication_data_type": "Use --communication_data_type.",
    "compile": "Use --torch_compile.",
    "csv_monitor": "Use --report_to.",
    "dataloader_drop_last": "Use --dataloader_drop_last.",
    "fp16": _BF16,
    "optimizer": "Take the section out and use --optim; of DeepSpeed's optimizers AdamW and Adam are translated.",
    "scheduler": "Take the section out, and use --lr_scheduler_type, --learning_rate and --warmup_steps.",
    "sequence_parallel_size": "Use --sp with --sp_backend ulysses.",
    "tensor_parallel": "Use --sp, which spreads the sequence, and ZeRO-3, which spreads the weights.",
    "tensorboard": "Use --report_to tensorboard.",
    "torch_autocast": _BF16,
    "wandb": "Use --report_to wandb.",
    "zero_optimization.cpu_offload": "Use offload_optimizer.device or offload_param.device.",
    "ACCELERATE_DYNAMO_BACKEND": "accelerate would compile the model around longctx's attention. Use --torch_compile.",
    "ACCELERATE_FP8": _BF16,
    "ACCELERATE_MIXED_PRECISION": _BF16,
    "ACCELERATE_USE_DEEPSPEED": "accelerate would not act on this word. Use true or false.",
    "ACCELERATE_USE_FSDP": "accelerate would not act on this word. Use true or false.",
    "ACCELERATE_TORCH_DEVICE": "Use CUDA_VISIBLE_DEVICES, or --use_cpu.",
    "FSDP_IGNORED_MODULES": "No process would reduce the gradients of modules that are not sharded. Take the key out.",
    "FSDP_SHARDING_STRATEGY": "Use fsdp_version: 2, with parallelism_config_dp_replicate_size for hybrid shards.",
    "FSDP_VERSION": "Use 2, or 1 for FSDP1.",
    "FSDP_USE_ORIG_PARAMS": "FSDP1 would apply --weight_decay to norms and biases, too. Set the key to true.",
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "Set the key to true: --max_length limits sequences, and longctx pads them.",
}
"""What to use instead, by the start of a key's path or of a variable's name; the longest start counts."""
