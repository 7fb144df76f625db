"""Private names of other libraries that longctx leans on: all are in a table with a reason, and all are still there.

A name that a new release takes away is found here, and not by a run: a private method that longctx overrides and that
nobody calls any more would change a run silently.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "longctx"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.resolve().is_relative_to(PACKAGE)]

ATTRIBUTES = {
    # torch: kernels
    "_flash_attention_forward": ("torch.ops.aten", "the varlen flash kernel with its log-sum-exp"),
    "_flash_attention_backward": ("torch.ops.aten", "its backward pass from a log-sum-exp over several blocks"),
    "_scaled_dot_product_cudnn_attention": ("torch.ops.aten", "cuDNN's kernel with its log-sum-exp"),
    "_scaled_dot_product_cudnn_attention_backward": ("torch.ops.aten", "its backward pass"),
    "_scaled_dot_product_efficient_attention": ("torch.ops.aten", "the memory-efficient kernel, for fp32 on GPUs"),
    "_scaled_dot_product_efficient_attention_backward": ("torch.ops.aten", "its backward pass"),
    "_scaled_dot_product_flash_attention_for_cpu": ("torch.ops.aten", "the CPU's flash kernel"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("torch.ops.aten", "its backward pass"),
    "_c10d_functional": ("torch.ops", "traces tell waiting from computing"),
    # torch: autograd and tensors
    "_C": ("torch", "the two names below it"),
    "_autograd": ("torch._C", "saved-tensor hooks that are already set"),
    "_top_saved_tensors_default_hooks": ("torch._C._autograd", "the operator packs what it saves as others do"),
    "_current_autograd_node": ("torch._C", "traces tell the backward pass of a layer"),
    "_current_graph_task_id": ("torch._C", "traces tell a backward pass inside another"),
    "_cdata": ("torch:UntypedStorage", "one key for all tensors of a storage"),
    "_local_tensor": ("torch.distributed.tensor:DTensor", "traces count a rank's shard"),
    "_pytree": ("torch.utils", "arguments are made fake wherever they lie"),
    "_version": ("torch:Tensor", "labels that were changed in place are counted anew"),
    # torch: modules and optimizers
    "_buffers": ("torch.nn:Module", "buffers that a model saves go to every rank"),
    "_non_persistent_buffers_set": ("torch.nn:Module", "which of them are saved"),
    "_last_lr": ("torch.optim.lr_scheduler", "a resumed schedule goes on where it was"),
    "_step_count": ("torch.optim.lr_scheduler", "the same"),
    # torch: process groups
    "_get_default_store": ("torch.distributed.distributed_c10d", "ranks talk through the store of their group"),
    "_set_pg_timeout": ("torch.distributed.distributed_c10d", "--ddp_timeout holds for groups that engines make"),
    "_world": ("torch.distributed.distributed_c10d", "all groups that there are"),
    "_get_backend": ("torch.distributed:ProcessGroup", "groups of a sequence wait as long as the world does"),
    "_timeout": ("", "the same; the options of NCCL, which a build of torch for CPUs lacks"),
    # transformers
    "_attn_implementation": ("transformers:PretrainedConfig", "a config may name code on the hub there"),
    "_experts_implementation": ("transformers:PretrainedConfig", "the same"),
    "_gradient_checkpointing_func": (
        "transformers:PreTrainedModel",
        "what a layer keeps",
    ),
    "_globalstep_last_logged": ("transformers:Trainer", "a resumed log goes on where it was"),
    "_memory_tracker": ("transformers:Trainer", "evaluation keeps its report of memory"),
    "_n_gpu": ("transformers:TrainingArguments", "one device a process, or the Trainer wraps in DataParallel"),
    "_no_split_modules": ("transformers:PreTrainedModel", "the layers that FSDP2 shards"),
    "_set_gradient_checkpointing": ("transformers:PreTrainedModel", "checkpoints keep attention's output"),
    "_supports_sdpa": ("transformers:PreTrainedModel", "the reference of a verification"),
    "_tied_weights_keys": ("transformers:PreTrainedModel", "weights that no file has to hold"),
    "_total_loss_scalar": ("transformers:Trainer", "a resumed run's mean loss"),
    "_tr_loss": ("transformers:Trainer", "a resumed run's running loss"),
    "_weight_conversions": ("transformers.core_model_loading", "a text part is saved as any model of its type"),
    "_train_batch_size": ("transformers:Trainer", "sequences of a step"),
    # trl, accelerate, deepspeed
    "_get_unique_tensor_key": ("trl.models.activation_offloading", "fake tensors have no addresses"),
    "_shared_state": ("accelerate:PartialState", "an engine on gloo, which accelerate itself refuses"),
    "_hf_deepspeed_config_weak_ref": ("transformers.integrations.deepspeed", "a model on the meta device stays whole"),
    "_get_param_partition_rank": (
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "which part of a parameter is a rank's",
    ),
    "_swappable_optimizer_subgroup": (
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "states that lie on NVMe",
    ),
    "_hp_mapping": ("deepspeed.utils.mixed_precision_linkage", "the fp32 weights of ZeRO-1 and 2"),
    "_z3_leaf": ("deepspeed.utils.z3_leaf_module", "ZeRO-3 gathers a layer once for all of its tiles"),
    # datasets
    "_ex_iterable": ("datasets:IterableDataset", "streams that are read as Arrow tables"),
    "_fingerprint": ("datasets:Dataset", "the key under which a step's result is kept"),
    "_indices": ("datasets:Dataset", "rows that are selected, without copying them"),
    "_resolve_features": ("datasets:IterableDataset", "columns of a stream before it is read"),
    # the standard library
    "_action_groups": ("argparse:ArgumentParser", "our flags come first in --help-all"),
    "_actions": ("argparse:ArgumentParser", "the names of all flags"),
    "_asdict": ("collections:namedtuple", "documented"),
    "_current_frames": ("sys", "documented; where the main thread is"),
    "_exit": ("os", "documented; a rank that hangs is ended"),
    "_reconstructor": ("copyreg", "TrainingArguments are saved as SFTConfig"),
    "_replace": ("collections:namedtuple", "documented"),
    # flash-attn, which is not in the tests' environment: tests/attention/test_kernel_choice.py has its signatures
    "_flash_attn_forward": ("", "flash-attn 3 and 4"),
    "_flash_attn_backward": ("", "flash-attn 3 and 4"),
    "_flash_attn_fwd": ("", "flash-attn 4"),
    "_flash_attn_bwd": ("", "flash-attn 4"),
    "_flash_attn_varlen_forward": ("", "flash-attn 2"),
    "_flash_attn_varlen_backward": ("", "flash-attn 2"),
}
"""Attributes by name: `module` or `module:Class` that has it, and why longctx needs it."""

MODULES = {
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor._utils",
    "torch.testing._internal.distributed.fake_pg",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
}
"""Private modules: all but distributed.tensor._utils, for the places of FSDP2's shards, are for traces."""

OVERRIDDEN = {
    "longctx.settings.flags:_HelpFormatter": {"_format_action_invocation", "_get_help_string"},
    "longctx.training.checkpoint.hub:PushingTrainer": {"_finish_current_push", "_push_from_checkpoint"},
    "longctx.training.checkpoint.trainer:ResumableTrainer": {
        "_load_best_model",
        "_load_from_checkpoint",
        "_load_rng_state",
        "_prepare_for_training",
        "_run_epoch",
        "_save",
        "_save_checkpoint",
    },
    "longctx.training.trainer:SequenceTrainer": {
        "_finalize_training",
        "_get_grad_norm",
        "_get_num_items_in_batch",
        "_name",
        "_prepare_for_training",
        "_prepare_inputs",
        "_save",
        "_save_checkpoint",
    },
}
"""Private methods of libraries that classes of longctx override."""


def _defined_here() -> set[str]:
    """Names that longctx defines itself."""
    names = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            for target in [inner for outer in targets for inner in ast.walk(outer)]:
                if isinstance(target, ast.Name):
                    names.add(target.id)
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls"):
                    names.add(target.attr)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
    return names


def _of_others() -> tuple[set[str], set[str]]:
    """Private attributes that longctx uses and does not define, and private modules that it imports."""
    attributes, modules = set(), set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr[:1] == "_" and node.attr[:2] != "__":
                attributes.add(node.attr)
            if isinstance(node, ast.ImportFrom) and not node.level and "._" in f".{node.module}":
                modules |= {node.module} - {"__future__", "longctx.__main__"}
    return attributes - _defined_here(), modules


def test_every_private_name_is_in_the_table_and_no_other():
    attributes, modules = _of_others()
    also_ours = {"_fingerprint", "_tr_loss"}  # longctx has names of its own that are called the same
    assert attributes - ATTRIBUTES.keys() == set(), "say in ATTRIBUTES why longctx needs these"
    assert ATTRIBUTES.keys() - attributes - also_ours == set(), "nothing needs these any more"
    assert modules == MODULES


@pytest.mark.parametrize("name", [name for name, (owner, _) in ATTRIBUTES.items() if owner])
def test_a_private_name_is_still_there(name):
    owner = ATTRIBUTES[name][0]
    module, _, class_name = owner.partition(":")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError:  # torch.ops.aten and the like
        parent, _, last = module.rpartition(".")
        holder = getattr(importlib.import_module(parent) if parent != "torch._C" else __import__("torch")._C, last)
    holder = getattr(holder, class_name) if class_name else holder
    if not hasattr(holder, name):  # given to each instance
        assert f".{name}" in inspect.getsource(holder), f"{owner} has no {name} any more: {ATTRIBUTES[name][1]}"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_is_overridden_is_still_the_librarys(name):
    module, _, class_name = name.partition(":")
    own = getattr(importlib.import_module(module), class_name)
    others = [base for base in own.__mro__ if base.__module__.partition(".")[0] not in ("longctx", "builtins")]
    private = {method for method in vars(own) if method[:1] == "_" and method[:2] != "__"}
    assert {method for method in private if any(method in vars(base) for base in others)} == OVERRIDDEN[name]
