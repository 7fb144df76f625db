"""Values that flags and a launcher's profile can both set, which must agree."""

from __future__ import annotations

from typing import Any

from longctx.settings.checks import check
from longctx.settings.flags import Flags
from longctx.settings.profile import DEEPSPEED_FLAGS, LaunchProfile, default_config_file
from longctx.settings.values import Values


def profile_name() -> str:
    """Return the profile's name for messages, with the default config file if there is one."""
    left_behind = default_config_file()
    if left_behind is not None:
        return f"accelerate's config (--config_file, or {left_behind} where none was given)"
    return "accelerate's config"


@check("distributed_type", "parallelism_config_tp_size", "mixed_precision")
def check_profile(profile: LaunchProfile) -> None:
    """Check that longctx supports what the profile asks for."""
    if profile.unsupported:
        raise ValueError(
            f"distributed_type {profile.unsupported} in {profile_name()} is not supported. "
            "Use a profile of configs/, such as --config_file configs/fsdp2.yaml."
        )
    if profile.tp > 1:
        raise ValueError(
            f"parallelism_config_tp_size {profile.tp} in {profile_name()}: longctx does not support tensor "
            "parallelism. Set it to 1: --sp spreads the sequence and FSDP2 or ZeRO-3 the weights (torchtitan or "
            "Megatron-LM have tensor parallelism)."
        )
    if profile.mixed_precision in ("fp16", "fp8"):
        raise ValueError(
            f"mixed_precision {profile.mixed_precision} in {profile_name()} is not verified against the reference yet. "
            "Use bf16, or leave the key out and set --bf16."
        )


@check(
    "dp_replicate",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "per_device_train_batch_size",
    *DEEPSPEED_FLAGS,
    "offload_optimizer_device",
    "offload_param_device",
    "communication_data_type",
)
def agree(flags: Flags, name: str, from_profile: Any, key: str) -> Any:
    """Check that a flag and the profile's key do not contradict each other.

    Returns:
        The value that is set, or None.
    """
    given = flags.values[name] if name in flags.explicit else None
    if given is not None and from_profile is not None and given != from_profile:
        raise ValueError(
            f"--{name} {given} contradicts {profile_name()}, which sets {key} {from_profile}. "
            "Change one of them, or set the key to auto."
        )
    return given if given is not None else from_profile


def take_profile(values: Values, profile: LaunchProfile) -> Values:
    """Take the values that a profile may set instead of a flag; with `auto`, the flag decides."""
    sources = (
        ("gradient_accumulation_steps", profile.gradient_accumulation_steps, "gradient_accumulation_steps"),
        ("max_grad_norm", profile.gradient_clipping, "gradient_clipping"),
        ("per_device_train_batch_size", profile.micro_batch_size, "train_micro_batch_size_per_gpu"),
        *((name, profile.deepspeed_values.get(name), key) for name, key in DEEPSPEED_FLAGS.items()),
    )
    for name, value, key in sources:
        agreed = agree(values.flags, name, value, key)
        if agreed is not None and agreed != values[name]:
            values = values.set(**{name: agreed}).note(f"{name} {agreed} is the profile's {key}")
    return values
