"""What longctx sets and reads in DeepSpeed: its start on gloo, its step, and where ZeRO keeps its fp32 weights.

DeepSpeed documents `safe_get_full_fp32_param` and the like, which gather a parameter; a checkpoint needs a rank's part.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def stay_on_cpu() -> None:
    """Keep DeepSpeed, which accelerate imports for every engine, from looking for a GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def start_deepspeed_on_gloo() -> None:
    """Let DeepSpeed use gloo in place of its shared-memory op, which it would compile here.

    That takes half a minute, and crashes without a compiler.
    """
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # As DeepSpeed's launcher does, or it starts nine processes in every step to ask how many devices there are.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def lighten_steps() -> None:
    """Skip a quarter of the function calls of a ZeRO-3 step, whose results are not used.

    - ZeRO does not name its functions for Nsight, which DeepSpeed switches off itself for compiled models. `--profile`
      shows longctx's own regions.
    - Debug messages, which are not printed, no longer ask for the rank.
    - The signatures of ZeRO-3's autograd functions are stored, since torch would compose them in every call. ZeRO-3
      defines two functions for each module in its first forward pass, and one for all linear layers.
    """
    from deepspeed.runtime.zero import linear, partition_parameters
    from deepspeed.utils import nvtx
    from torch.autograd import Function

    nvtx.enable_nvtx = False
    partition_parameters.print_rank_0 = _print_rank_0

    def store_signature(cls: type, **kwargs: Any) -> None:
        if cls.__module__.startswith("deepspeed."):
            cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    store_signature(linear.LinearFunctionForZeroStage3)
    Function.__init_subclass__ = classmethod(store_signature)  # type: ignore[assignment]


def _print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """DeepSpeed's function of this name, which asks for the rank before it looks at `debug` and `force`."""
    import deepspeed.comm as dist

    if (debug or force) and dist.get_rank() == 0:
        print(message)


def gather_once(module: nn.Module) -> None:
    """Make ZeRO-3 gather the module once for all of its tiles or chunks, and not each of its layers for each of them.

    `deepspeed.utils.set_z3_leaf_modules` sets the same attribute, for all modules of a class and with DeepSpeed loaded.
    """
    module._z3_leaf = True  # type: ignore[assignment]


def call_before_step(engine: Any, work: Callable[[], None]) -> None:
    """Call `work` when gradients are complete: the engine takes the optimizer step inside of backward."""
    take_step = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        work()
        return take_step(*args, **kwargs)

    engine.step = step


def is_managed(parameter: nn.Parameter) -> bool:
    """Return whether ZeRO keeps the parameter's gradient."""
    return any(hasattr(parameter, name) for name in ("ds_id", "_hp_mapping", "_z3_optimizer"))


def is_zero(optimizer: Any) -> bool:
    """Return whether this is the optimizer of ZeRO-1, 2 or 3."""
    return _is_zero3(optimizer) or hasattr(optimizer, "single_partition_of_fp32_groups")


def _is_zero3(optimizer: Any) -> bool:
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def is_on_nvme(zero: Any, parameter: nn.Parameter) -> bool:
    """Return whether the states of a parameter are in a file."""
    return _is_zero3(zero) and zero._swappable_optimizer_subgroup(zero.grad_position[zero.get_param_id(parameter)][0])


def flat_range(zero: Any, parameter: Any) -> tuple[Tensor, int, int, int] | None:
    """Return where this rank's part of a trained parameter lies; None if it has none.

    ZeRO-3 cuts each parameter into equal, padded parts, of which a flat tensor holds many. ZeRO-1 and 2 give each rank
    a range of all parameters laid end to end.

    Returns:
        The flat fp32 tensor, the part's first element in it, its first element in the parameter, and its length.
    """
    if _is_zero3(zero):
        group, offset, numel = zero.grad_position[zero.get_param_id(parameter)]
        start = zero._get_param_partition_rank(parameter) * numel
        return zero.fp32_partitioned_groups_flat[group], offset, start, numel
    fragment = parameter._hp_mapping
    if fragment is None:
        return None
    flat = zero.single_partition_of_fp32_groups[fragment.param_group_index]
    at = fragment.hp_fragment_address
    return flat, at.start, fragment.lp_fragment_address.start, at.numel


def copy_to_working_weights(zero: Any, parameters: Iterable[Any]) -> None:
    """Copy changed fp32 weights to those that layers compute with. Called by all ranks together."""
    if not _is_zero3(zero):
        zero.update_lp_params()
        return
    zero.checkpoint_event_prologue()  # partitions every parameter, small ones too
    for parameter in parameters:
        group, offset, numel = zero.grad_position[zero.get_param_id(parameter)]
        parameter.ds_tensor.data.copy_(zero.fp32_partitioned_groups_flat[group].narrow(0, offset, numel))
    # All stay partitioned, as at the start of a run: DeepSpeed only notices that a layer reads the weights of
    # another one, as in DoRA, if it finds them partitioned in the forward pass.
    zero.invalidate_secondary_tensor()
