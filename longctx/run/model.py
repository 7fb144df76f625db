"""Load the model of a run, put sequence parallelism into it, and build its trainer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel
from trl.models import get_act_offloading_ctx_manager

import longctx
from longctx.attention.backends import BACKENDS
from longctx.attention.kernels import Kernel, prefer
from longctx.collate import SequenceCollator
from longctx.data.contents import content_digests
from longctx.forecast.memory_options import NVME
from longctx.launch.console import Line, show
from longctx.layers.compiled import install_compiled
from longctx.layers.liger import install_liger
from longctx.model.adapter import add_adapter, changes_base, obstacle_to_adapting_rows, quantization_of
from longctx.model.allow_list import has_experts, kernel_of
from longctx.model.load import load_model
from longctx.model.quantized import loading_pieces, make_shardable
from longctx.model.rows import obstacle_to_rows
from longctx.model.tiny import TINY
from longctx.parallel import SequenceParallel, parallelize
from longctx.ranks.agreement import gather_objects, on_all_ranks
from longctx.ranks.hang import limit_waiting
from longctx.run.preparation import PreparedRun
from longctx.sequence.host_tensors import SavedOnHost
from longctx.sequence.mesh import select_device
from longctx.settings.machine_checks import check_kernels
from longctx.settings.run import row_length
from longctx.training.checkpoint.masters import loaded_in_fp32
from longctx.training.dataset import read_template
from longctx.training.fingerprint import is_preference, needs_reference
from longctx.training.objective import Objective
from longctx.training.reference_model import ReferencedPreferenceLoss
from longctx.training.trainer import SequenceTrainer
from longctx.upstream.accelerate_internals import configure_fsdp, fsdp2_plugin


def load(prepared: PreparedRun, *, whole: bool = False) -> PreTrainedModel:
    """Choose among the attention kernels that were asked for, and read the weights, on all ranks together.

    On FSDP2, weights are on the meta device, except for rank 0's where it reads all of them.

    Args:
        whole: on FSDP2, have rank 0 read all weights, also where each rank could read its own rows.

    Raises:
        ValueError: if they cannot be read.
    """
    run, settings = prepared.run, prepared.run.settings
    name, revision = settings["model_name_or_path"], settings["model_revision"]
    prefer(settings["attn_implementation"], always_the_same=needs_reference(settings))
    read = partial(
        load_model,
        name,
        run.model_config,
        dtype=settings["dtype"],
        revision=revision,
        quantization=quantization_of(settings),
    )
    if run.engine != "fsdp2" or name == TINY:
        # Parameters on NVMe are written there while the model is loaded, in the dtype that is trained.
        on_nvme = run.memory_options.offload_param_device == NVME
        with nullcontext() if on_nvme else loaded_in_fp32():
            return on_all_ranks(read)
    rank, shards = dist.get_rank(), run.dims.world_size // run.dims.dp_replicate
    if settings["load_in_4bit"]:
        how = "every rank reads all weights and keeps its piece of those in 4 bits"
        with loading_pieces(rank % shards, shards):
            model = on_all_ranks(read)
    else:
        how = "every rank reads its own rows of the weights"
        model = on_all_ranks(partial(read, has_values=False))
        obstacle = "it takes a step by itself" if whole else obstacle_to_adapting_rows(settings)
        obstacle = obstacle or on_all_ranks(lambda: obstacle_to_rows(model, name, revision))
        if obstacle is not None:
            how = f"rank 0 reads all weights and sends the other ranks their rows, since {obstacle}"
            model = on_all_ranks(lambda: read() if rank == 0 else model)
    if rank == 0:
        show([Line("loading", how)])
    return model


def build_trainer(prepared: PreparedRun, model: PreTrainedModel) -> SequenceTrainer:
    """Put sequence parallelism into the model, and return a trainer with its data."""
    run, args, settings = prepared.run, prepared.args, prepared.run.settings
    _check_kernels(prepared, model)
    if run.liger_parts is not None:
        install_liger(model, run.liger_parts)
    model, sequence = parallelize(
        model,
        run.dims.sp,
        sp_backend=run.backend.name if run.dims.sp > 1 else "auto",
        ring_size=run.dims.ring if BACKENDS[run.backend.name].has_ring_size else None,
        dp_replicate=run.dims.dp_replicate,
        device=args.device,
        overlap_exchange=run.overlaps_exchange,
        **run.memory_options.parallelize_arguments(),
    )
    if settings["torch_compile"]:
        install_compiled(model, settings["torch_compile_backend"], settings["torch_compile_mode"])
    if run.has_group:
        limit_waiting(settings["ddp_timeout"], Path(args.output_dir))
    if settings["use_peft"]:
        model = add_adapter(model, settings)
    if settings["load_in_4bit"] and run.engine == "fsdp2":
        make_shardable(model)
    _prepare_for_trainer(prepared, model)
    collator = SequenceCollator(
        pad_token_id=prepared.tokenizer.pad_token_id,
        pad_to_multiple_of=settings["pad_to_multiple_of"],
        padding_free=settings["packing"] or settings["padding_free"],
    )
    trainer = SequenceTrainer(
        model,
        args,
        collator,
        prepared.data.rows,
        prepared.data.evaluation.rows if prepared.data.evaluation else None,
        prepared.tokenizer,
        sequence=sequence,
        objective=_objective(prepared, model, sequence),
        costs=prepared.data.costs,
        report=prepared.data.report,
        mixture=prepared.data.mixture,
        data_identity=prepared.data_identity,
        on_nonfinite=settings["on_nonfinite"],
        save_async=settings["save_async"],
        base_config=run.model_config if changes_base(settings) else None,
    )
    if run.engine == "fsdp2":
        reduce_in_bf16 = run.memory_options.communication_data_type == "bf16"
        configure_fsdp(fsdp2_plugin(trainer.accelerator), reduce_in_bf16=reduce_in_bf16, use_cpu=run.use_cpu)
    if run.memory_options.activation_offloading:
        trainer.saved_activations = SavedOnHost() if run.use_cpu else get_act_offloading_ctx_manager(trainer.model)
    return trainer


def _prepare_for_trainer(prepared: PreparedRun, model: PreTrainedModel) -> None:
    """Change the arguments, the model and the tokenizer as TRL's SFTTrainer does before it calls the Trainer."""
    args, settings = prepared.args, prepared.run.settings
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):  # one argument, two names
        if hasattr(args, name):
            of_longctx = ("selective", "whole_layers", "offload")  # which longctx.parallelize carries out
            given = {key: value for key, value in (getattr(args, name) or {}).items() if key not in of_longctx}
            # No RNG state has to be restored: dropout is refused, and nothing else in a layer is random. Shapes that
            # depend on values, which recomputing might change, are only those of routed tokens.
            check = {"determinism_check": "default" if has_experts(model.config) else "none"}
            setattr(args, name, {"use_reentrant": False, "preserve_rng_state": False, **check, **given})
    if args.gradient_checkpointing and settings["use_peft"]:
        model.enable_input_require_grads()
    if template := read_template(settings["chat_template_path"]):
        prepared.tokenizer.chat_template = template


def _objective(prepared: PreparedRun, model: PreTrainedModel, sequence: SequenceParallel) -> Objective:
    """Return the loss and the metrics of the run's method."""
    settings = prepared.run.settings
    if not is_preference(settings):
        return Objective(sequence, settings["label_smoothing_factor"])
    arithmetic = _arithmetic(prepared, model, sequence) if needs_reference(settings) else ""
    identity = {**prepared.reference_identity, "arithmetic": arithmetic}
    return ReferencedPreferenceLoss(
        sequence, settings, identity=identity, batch_size=settings["precompute_ref_batch_size"]
    )


def _arithmetic(prepared: PreparedRun, model: PreTrainedModel, sequence: SequenceParallel) -> str:
    """Return what decides how a forward pass rounds, besides the model, its dtype and what is computed together.

    This code is part of it: another release may plan a ring in another way, and so add up in another order.
    """
    run, device = prepared.run, sequence.device
    compiled = (f"torch_compile{name}" for name in ("", "_backend", "_mode"))
    flags = [run.settings[name] for name in ("attn_implementation", "pad_to_multiple_of", *compiled)]
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.get_num_threads()
    of_run = (run.dims, run.backend.arrangement, run.engine, run.memory_options, run.overlaps_exchange, run.liger_parts)
    kernel, planned_by = attention_kernel(prepared, model).name, getattr(sequence.time_of_plan, "args", ())
    code = content_digests(sorted(Path(longctx.__file__).parent.rglob("*.py")))
    return repr((*of_run, *flags, place, kernel, planned_by, code, torch.__version__, transformers.__version__))


def _check_kernels(prepared: PreparedRun, model: PreTrainedModel) -> None:
    """Call `check_kernels` with the kernels of all ranks."""
    run, device = prepared.run, select_device(prepared.args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found = gather_objects(on_all_ranks(lambda: (name, attention_kernel(prepared, model).name)))
    share = -(-row_length(run.settings) // run.dims.ring)
    on_all_ranks(lambda: check_kernels(found, min(run.settings["max_length"], share)))


def attention_kernel(prepared: PreparedRun, model: PreTrainedModel) -> Kernel:
    """Return the kernel that computes attention in training."""
    dtype = torch.bfloat16 if prepared.args.bf16 else model.dtype
    return kernel_of(model.config, prepared.args.device, dtype)
