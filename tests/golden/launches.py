"""What becomes of each key of a launch profile, for the group `surface`."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

PROFILES = {
    "FSDP": {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}},
    "DEEPSPEED": {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 3}},
    "MULTI_GPU": {"distributed_type": "MULTI_GPU", "num_processes": 4},
}
"""Profiles of accelerate, to each of which one key is added."""
KEYS: dict[str, dict[str, list[Any]]] = {
    "MULTI_GPU": {
        "distributed_type": ["NO", "MULTI_CPU", "MEGATRON_LM", "XLA", "TP"],
        "num_processes": [8],
        "num_machines": [2],
        "gpu_ids": ["0,1"],
        "mixed_precision": ["bf16", "fp16", "fp8"],
        "use_cpu": [True],
        "gradient_accumulation_steps": [4],
        "downcast_bf16": ["yes"],
        "debug": [True],
        "dynamo_config.dynamo_backend": ["INDUCTOR"],
        "enable_cpu_affinity": [True],
        "main_training_function": ["other"],
        "same_network": [False],
        "rdzv_backend": ["c10d"],
        "tpu_use_cluster": [True],
    },
    "FSDP": {
        "mixed_precision": ["bf16"],
        "fsdp_config.fsdp_version": [1],
        "fsdp_config.fsdp_activation_checkpointing": [True],
        "fsdp_config.fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"],
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
        "fsdp_config.fsdp_min_num_params": [1000],
        "fsdp_config.fsdp_cpu_ram_efficient_loading": [True, False],
        "fsdp_config.fsdp_offload_params": [True],
        "fsdp_config.fsdp_reshard_after_forward": [True, False],
        "fsdp_config.fsdp_sharding_strategy": ["FULL_SHARD"],
        "fsdp_config.fsdp_state_dict_type": ["FULL_STATE_DICT", "SHARDED_STATE_DICT"],
        "fsdp_config.fsdp_sync_module_states": [True],
        "fsdp_config.fsdp_use_orig_params": [True],
        "fsdp_config.fsdp_forward_prefetch": [True],
        "fsdp_config.fsdp_backward_prefetch": ["BACKWARD_PRE"],
        "parallelism_config.parallelism_config_cp_size": [2],
        "parallelism_config.parallelism_config_sp_size": [2],
        "parallelism_config.parallelism_config_tp_size": [2],
        "parallelism_config.parallelism_config_dp_replicate_size": [2],
        "parallelism_config.parallelism_config_dp_shard_size": [4],
    },
    "DEEPSPEED": {
        "mixed_precision": ["bf16"],
        "deepspeed_config.zero_stage": [0, 1, 2],
        "deepspeed_config.gradient_accumulation_steps": [4],
        "deepspeed_config.gradient_clipping": [0.5],
        "deepspeed_config.offload_optimizer_device": ["cpu"],
        "deepspeed_config.offload_param_device": ["cpu"],
        "deepspeed_config.zero3_init_flag": [True, False],
        "deepspeed_config.zero3_save_16bit_model": [True],
        "deepspeed_config.deepspeed_moe_layer_cls_names": ["Layer"],
        "deepspeed_config.deepspeed_multinode_launcher": ["standard"],
        "deepspeed_config.deepspeed_hostfile": ["hosts"],
        "parallelism_config.parallelism_config_sp_size": [2],
    },
}
"""Keys with values, by the profile that they are tried in."""


def profile_keys() -> Iterator[tuple[str, str]]:
    """Yield what becomes of each key of a profile: read, refused, given to accelerate, or nothing."""
    import pytest

    found = {}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, silent():
        patch.chdir(folder)
        for kind, keys in KEYS.items():
            base: dict[str, Any] = PROFILES[kind]
            plain = _launched(patch, base)
            for section, key, value in (
                (*path.rpartition(".")[::2], v) for path, values in keys.items() for v in values
            ):
                changed = {section: base.get(section, {}) | {key: value}} if section else {key: value}
                found[f"key of a {kind} profile, {value}: {key}"] = _effect(plain, _launched(patch, base | changed))
    yield from found.items()


def _effect(plain: tuple[Any, Any], changed: tuple[Any, Any]) -> str:
    if isinstance(changed[1], str):
        return changed[1]
    if changed[1] != plain[1]:
        return "read"
    return "given to accelerate" if changed[0] != plain[0] else "without effect"


def _launched(patch: Any, profile: Mapping[str, Any]) -> tuple[Any, Any]:
    """What accelerate starts with a profile, and what `longctx train` makes of it there, or who refuses it.

    Adapter: all that this module knows of how a launch resolves.
    """
    import torch
    import yaml

    from longctx.settings.launcher import read_profile
    from longctx.settings.read import parse_flags
    from longctx.settings.resolve import resolve
    from tests.settings.conftest import launcher
    from tests.settings.test_specification import described, environment
    from tests.test_docs import machine_of

    Path("profile.yaml").write_text(yaml.safe_dump(profile))
    with (
        mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 8),
        mock.patch.dict(os.environ),
    ):
        try:
            started = launcher(patch)("profile.yaml")
        except Exception:
            return None, "refused by accelerate"
    env, gpus = environment(started)
    given = dict(env)
    with machine_of(gpus):
        try:
            flags = parse_flags(["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--max_length", "256"])
            return given, described(resolve(flags, read_profile(env), env))
        except ValueError:
            return given, "refused"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Print nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
