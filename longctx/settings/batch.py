"""The sequences of an optimizer step."""

from __future__ import annotations

from longctx.sequence.mesh import ParallelDims
from longctx.settings.checks import check
from longctx.settings.profile import LaunchProfile
from longctx.settings.profile_values import profile_name
from longctx.settings.values import Values


@check("global_batch_size", "gradient_accumulation_steps", "per_device_train_batch_size", "sp")
def accumulate(values: Values, profile: LaunchProfile, dims: ParallelDims) -> Values:
    """Check that --global_batch_size is a whole number of micro-batches, and set the accumulation that it needs.

    Raises:
        ValueError: if it is not, or if the accumulation is set to another number.
    """
    wanted = values["global_batch_size"]
    if wanted is None:
        return values
    micro = values["per_device_train_batch_size"]
    at_once = micro * dims.dp
    if wanted < 1 or wanted % at_once:
        nearest = max(at_once, wanted // at_once * at_once)
        raise ValueError(
            f"--global_batch_size {wanted} is not a multiple of the {at_once} sequences that {dims.world_size} devices "
            f"take at once: per_device_train_batch_size {micro} × (world {dims.world_size} / sp {dims.sp}). "
            f"Use {nearest} or {nearest + at_once}, another --sp, or another number of devices."
        )
    steps = wanted // at_once
    is_flag = values.is_given("gradient_accumulation_steps")
    if (is_flag or profile.gradient_accumulation_steps is not None) and values["gradient_accumulation_steps"] != steps:
        name = "gradient_accumulation_steps"
        where, remedy = f"{name} in {profile_name()}", "Set the key to auto."
        if is_flag:
            where, remedy = f"--{name}", "Leave out one of the two."
        raise ValueError(
            f"--global_batch_size {wanted} needs {steps} micro-batches a step here, and {where} is {values[name]}. "
            f"{remedy}"
        )
    return values.set(gradient_accumulation_steps=steps)
