"""Private names of other libraries that longctx leans on: all are in a table with a reason, and all are still there.

A name that a new release takes away is found here, and not by a run: a private method that longctx overrides and that
nobody calls any more would change a run silently.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer

from longctx.upstream.accelerate_internals import update_shards
from tests.workers import run_ranks

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
    # torch: autograd and tensors
    "_C": ("torch", "the two names below it"),
    "_autograd": ("torch._C", "saved-tensor hooks that are already set"),
    "_top_saved_tensors_default_hooks": ("torch._C._autograd", "the operator packs what it saves as others do"),
    "_is_profiler_enabled": ("torch.autograd.profiler", "named regions cost nothing while nobody traces"),
    "_version": ("torch:Tensor", "labels that were changed in place are counted anew"),
    # torch: modules and optimizers
    "_buffers": ("torch.nn:Module", "buffers that a model saves go to every rank"),
    "_forward_hooks": ("torch.nn:Module", "routers that are watched already"),
    "_non_persistent_buffers_set": ("torch.nn:Module", "which of them are saved"),
    "_parameters": ("torch.nn:Module", "weights that are yet to be read have stand-ins"),
    "_last_lr": ("torch.optim.lr_scheduler", "a resumed schedule goes on where it was"),
    "_step_count": ("torch.optim.lr_scheduler", "the same"),
    # torch: process groups
    "_get_default_store": ("torch.distributed.distributed_c10d", "ranks talk through the store of their group"),
    "_set_pg_timeout": ("torch.distributed.distributed_c10d", "--ddp_timeout holds for groups that engines make"),
    "_world": ("torch.distributed.distributed_c10d", "all groups that there are"),
    "_get_backend": ("torch.distributed:ProcessGroup", "groups of a sequence wait as long as the world does"),
    "_timeout": ("", "the same; the options of NCCL, which a build of torch for CPUs lacks"),
    # datasets
    "_ex_iterable": ("datasets:IterableDataset", "streams that are read as Arrow tables"),
    "_fingerprint": ("datasets:Dataset", "the key under which a step's result is kept"),
    "_indices": ("datasets:Dataset", "rows that are selected, without copying them"),
    "_resolve_features": ("datasets:IterableDataset", "columns of a stream before it is read"),
    # the standard library
    "_current_frames": ("sys", "documented; where the main thread is"),
    "_exit": ("os", "documented; a rank that hangs is ended"),
    "_replace": ("collections:namedtuple", "documented"),
    # flash-attn, which is not in the tests' environment: tests/attention/flash_stand_ins.py has its signatures
    "_flash_attn_forward": ("", "flash-attn 3 and 4"),
    "_flash_attn_backward": ("", "flash-attn 3 and 4"),
    "_flash_attn_fwd": ("", "flash-attn 4"),
    "_flash_attn_bwd": ("", "flash-attn 4"),
    "_flash_attn_varlen_forward": ("", "flash-attn 2"),
    "_flash_attn_varlen_backward": ("", "flash-attn 2"),
}
"""Attributes by name: `module` or `module:Class` that has it, and why longctx needs it."""

ROOM = {
    "transformers:PretrainedConfig": {"_attn_implementation", "_experts_implementation", "_commit_hash"},
    "transformers:PreTrainedModel": {
        *("_can_record_outputs", "_gradient_checkpointing_func", "_no_split_modules", "_set_gradient_checkpointing"),
        *("_supports_sdpa", "_tied_weights_keys"),
    },
    "transformers:Trainer": {"_globalstep_last_logged", "_memory_tracker", "_total_loss_scalar", "_tr_loss"},
    "transformers:TrainingArguments": {"_n_gpu"},
    "transformers.core_model_loading": {"_weight_conversions"},
    "transformers.integrations.bitsandbytes:Bnb4bitQuantize": {"convert"},
    "transformers.integrations.deepspeed": {"_hf_deepspeed_config_weak_ref"},
    "transformers.utils.chat_template_utils": {"datetime"},
    "accelerate:PartialState": {"_shared_state"},
    "accelerate.utils.dataclasses": {
        *("ACCELERATE_DEEPSPEED_ZERO3_INIT", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "FSDP_AUTO_WRAP_POLICY"),
        *("ACCELERATE_DEEPSPEED_ZERO_STAGE", "RESHARD_AFTER_FORWARD", "FSDP_STATE_DICT_TYPE", "OFFLOAD_PARAMS"),
        *("CPU_RAM_EFFICIENT_LOADING", "VERSION"),
    },
    "accelerate.state": {"ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"},
    "deepspeed.accelerator.real_accelerator": {"DS_ACCELERATOR"},
    "deepspeed.ops": {"__compatible_ops__"},
    "deepspeed.runtime.engine:DeepSpeedEngine": {"step"},
    "deepspeed.runtime.zero.linear": {"LinearFunctionForZeroStage3"},
    "deepspeed.runtime.zero.partition_parameters": {"ds_id", "ds_tensor", "print_rank_0"},
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": {
        *("_get_param_partition_rank", "_swappable_optimizer_subgroup", "checkpoint_event_prologue", "get_param_id"),
        *("fp32_partitioned_groups_flat", "grad_position", "invalidate_secondary_tensor", "_z3_optimizer"),
    },
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": {
        *("single_partition_of_fp32_groups", "update_lp_params")
    },
    "deepspeed.utils.mixed_precision_linkage": {"_hp_mapping", "param_group_index"},
    "deepspeed.utils.nvtx": {"enable_nvtx"},
    "deepspeed.utils.tensor_fragment": {"hp_fragment_address", "lp_fragment_address"},
    "deepspeed.utils.z3_leaf_module": {"_z3_leaf"},
    "torch.distributed.fsdp:FullyShardedDataParallel": {"_handle"},
    "torch.distributed.tensor:DTensor": {"_local_tensor"},
    "torch.optim:Adam": {"_init_group"},
    "torch.distributed.fsdp._flat_param:FlatParameter": {"_params", "_shapes", "_shard_param_infos"},
}
"""What longctx/upstream/ reads, replaces or sets, whose docstrings say why, by `module` or `module:Class`."""

OF_ROOM = {name for names in ROOM.values() for name in names if name[0] == "_"}

MODULES = {"torch._subclasses.fake_tensor", "torch.distributed.tensor._utils"}
"""Private modules: for steps on fake tensors, and for the places of FSDP2's shards."""

OVERRIDDEN = {
    "longctx.training.checkpoint.hub:PushingMixin": {"_finish_current_push", "_push_from_checkpoint"},
    "longctx.training.checkpoint.trainer:ResumableMixin": {
        "_init_training_state",
        "_load_best_model",
        "_load_from_checkpoint",
        "_load_rng_state",
        "_prepare_for_training",
        "_run_epoch",
    },
    "longctx.training.checkpoint.saving:SavingMixin": {"_finalize_training", "_save", "_save_checkpoint"},
    "longctx.training.trainer:SequenceMixin": {
        "_finalize_training",
        "_get_grad_norm",
        "_prepare_for_training",
        "_prepare_inputs",
    },
}
"""Private methods of transformers' Trainer that mixins of longctx override."""


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
                modules |= {node.module} - {"__future__", "longctx.__main__", "longctx.verify.__main__"}
    return attributes - _defined_here(), modules


def test_every_private_name_is_in_the_table_and_no_other():
    attributes, modules = _of_others()
    also_ours = {"_fingerprint", "_timeout"}  # longctx has names of its own that are called the same
    assert attributes - ATTRIBUTES.keys() - OF_ROOM == set(), "say in ATTRIBUTES why longctx needs these"
    assert ATTRIBUTES.keys() - attributes - also_ours == set(), "nothing needs these any more"
    assert modules == MODULES


def _touched(source: str) -> set[str]:
    """Return the private names of longctx/upstream that a module uses, and the attributes that it replaces."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (node.attr in OF_ROOM or node.attr == "__class__"):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and node.value in OF_ROOM:
            found.add(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "forward":
            found.add(node.attr)
        elif isinstance(node, ast.Assign | ast.Call) and "os.environ" in (text := ast.unparse(node)):
            found |= set(re.findall(r"os\.environ(?:\[|\.setdefault\(|\.pop\()'((?:ACCELERATE|DS|FSDP)_\w+)", text))
    return found


def test_only_one_room_touches_what_other_libraries_keep_private():
    outside = {path: _touched(path.read_text(encoding="utf-8")) for path in FILES if path.parent.name != "upstream"}
    assert {str(path): names for path, names in outside.items() if names} == {}, "put these into longctx/upstream/"
    room = " ".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "upstream").glob("*.py"))
    unused = {name for names in ROOM.values() for name in names if name not in room}
    assert unused == set(), "longctx/upstream/ no longer needs these"


@pytest.mark.parametrize(
    "source",
    [
        *("x = trainer._tr_loss", "hasattr(p, '_hp_mapping')", "layer.forward = f", "a.__class__ = B"),
        *("os.environ['FSDP_VERSION'] = '2'", "os.environ.setdefault('DS_ACCELERATOR', 'cpu')"),
    ],
)
def test_touching_is_seen(source):
    assert _touched(source)


NAMES = [(owner, name) for name, (owner, _) in ATTRIBUTES.items() if owner]
NAMES += [(owner, name) for owner, names in ROOM.items() for name in sorted(names)]


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_a_private_name_is_still_there(owner, name):
    module, _, class_name = owner.partition(":")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError:  # torch.ops.aten and the like
        parent, _, last = module.rpartition(".")
        holder = getattr(importlib.import_module(parent) if parent != "torch._C" else __import__("torch")._C, last)
    holder = getattr(holder, class_name) if class_name else holder
    if not hasattr(holder, name):  # given to each instance
        assert re.search(rf"\b{name}\b", inspect.getsource(holder)), f"{owner} has no {name} any more"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_is_overridden_is_still_the_librarys(name):
    module, _, class_name = name.partition(":")
    own = getattr(importlib.import_module(module), class_name)
    private = {method for method in vars(own) if method[:1] == "_" and method[:2] != "__"}
    assert private & vars(Trainer).keys() == OVERRIDDEN[name]


def on_two_ranks():
    """Update the same shards with and without DTensor. The bias has one element, so that rank 1 has none of it."""
    weights = []
    for own in (update_shards, lambda optimizer: None):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        own(optimizer)
        for step in range(3):
            model(torch.arange(12.0).view(2, 6) + step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert sum(isinstance(value, DTensor) for value in states) == 4
        weights.append([weight.full_tensor() for weight in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_adam_updates_shards_as_through_dtensor():
    run_ranks(2, f"{__name__}:on_two_ranks")
