"""Carry out a resolved run: processes and data first, then weights and training."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import auth_check, create_repo
from transformers import EarlyStoppingCallback, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig

import longctx
from longctx.attention.backends import BACKENDS
from longctx.attention.choice import Documents
from longctx.attention.cost import measured
from longctx.attention.kernels import Kernel
from longctx.collate import SequenceCollator
from longctx.data import DataError, name_data
from longctx.forecast.closed_form import ModelSizes
from longctx.forecast.memory_options import NVME
from longctx.launch.failures import FollowSteps
from longctx.launch.network import choose_interface
from longctx.launch.restarts import renew_store
from longctx.layers.liger import check_liger, install_liger
from longctx.model.adapter import add_adapter, changes_base, quantization_of
from longctx.model.allow_list import kernel_of
from longctx.model.files import check_savable
from longctx.model.load import (
    count_parameters,
    count_trained_parameters,
    is_template_file,
    load_model,
    load_tokenizer,
    take_chat_template,
)
from longctx.parallel import parallelize
from longctx.ranks.agreement import check_agreement, first_ranks, gathered, sharing, together
from longctx.ranks.watchdog import leave, limit_waiting
from longctx.report.page import reported
from longctx.sequence.host_tensors import SavedOnHost
from longctx.sequence.mesh import select_device
from longctx.settings.machine_checks import check_kernels
from longctx.settings.run import Run, row_length
from longctx.settings.versions import MINIMUM_VERSIONS, REQUIRED_VERSIONS
from longctx.training.checkpoint import (
    MANIFEST,
    Manifest,
    candidates,
    check_files,
    check_same,
    check_side_files,
    optimization_flags,
    read_manifest,
)
from longctx.training.checkpoint.masters import loaded_in_fp32
from longctx.training.dataset import StreamedRows, TrainingRows, prepare_rows
from longctx.training.engines import (
    load_on_every_rank,
    offload_fsdp,
    promote,
    settle_deepspeed,
    settle_fsdp,
    start_on_cpu,
    start_on_gpu,
    stay_on_cpu,
)
from longctx.training.fingerprint import compare_files, data_identity
from longctx.training.profiling import ProfileSteps
from longctx.training.reference import single_device_step
from longctx.training.schedule import check_learning_rates, check_training_steps
from longctx.training.trainer import SequenceTrainer

logger = logging.getLogger(__name__)

SAMPLED_ROWS = 8
"""Micro-batches that stand for all when a backend is chosen."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Processes are up and data is ready; no weights are loaded."""

    run: Run
    args: SFTConfig
    tokenizer: PreTrainedTokenizerBase
    data: TrainingRows | StreamedRows
    data_identity: Callable[[], Mapping[str, Any]]
    """What the rows are made from, by name; all of them are read for it, once, where a checkpoint asks for it."""
    resume_from: Path | None
    """The checkpoint to go on from."""


def prepare(run: Run) -> PreparedRun:
    """Start the process group, then load, tokenise and pack the data.

    Raises:
        ValueError: for data that cannot be trained on as asked.
    """
    settings = run.settings
    if run.has_group:
        renew_store()
        choose_interface(os.environ)
    if run.promotes_engine:
        promote(run.engine)
    if run.engine == "fsdp2" and settings["load_in_4bit"]:
        load_on_every_rank()
    if run.engine == "fsdp2" and run.levers.offload_param_device == "cpu":
        offload_fsdp()
    if run.use_cpu:
        stay_on_cpu()
    if run.has_group:
        timeout = timedelta(seconds=settings["ddp_timeout"])
        if run.use_cpu:
            start_on_cpu(run.engine, timeout)
        else:
            start_on_gpu(timeout, settings.get("ddp_backend"))
    args = SFTConfig(**run.training_arguments() | _degrees(run))
    if dist.is_initialized():
        check_agreement(together(partial(_decided, run, args)))
        _settle_output(args)
    if args.max_steps > 0:
        together(lambda: check_learning_rates(args, args.max_steps))
    together(lambda: _check_hub(args))
    if args.n_gpu > 1:  # one process on a machine with several: the Trainer would copy the model to all of them
        args._n_gpu = 1
    if run.engine == "deepspeed":
        settle_deepspeed(
            args.deepspeed_plugin.deepspeed_config,
            run.levers,
            ModelSizes.of_config(run.model_config),
            num_ranks=run.dims.world_size,
            use_cpu=run.use_cpu,
        )
    tokenizer = together(lambda: _tokenizer(settings, run.model_config))
    data = prepare_rows(settings, tokenizer, run.model_config)
    together(lambda: check_training_steps(args, data.rows, run.dims.dp))
    files = compare_files(run.settings, run.model_config, data, args)
    run = _with_data(run, args, data)
    identity = cache(partial(data_identity, data, run.settings, run.model_config, files))
    return PreparedRun(
        run=run,
        args=args,
        tokenizer=tokenizer,
        data=data,
        data_identity=identity,
        resume_from=_checkpoint(run, args, identity),
    )


def _check_hub(args: SFTConfig) -> None:
    """That the hub lets the model be written, before data is prepared and weights are read. Rank 0 asks for all."""
    if not args.push_to_hub or args.process_index != 0:
        return
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        repository = create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
        auth_check(repository.repo_id, token=args.hub_token, write=True)
    except Exception as error:  # of several libraries
        raise ValueError(
            f"--push_to_hub True: {name} cannot be written on the hub ({type(error).__name__}: "
            f"{' '.join(str(error).split())}). Give a token that may write it (hf auth login, or --hub_token), or "
            "leave --push_to_hub out."
        ) from error


_OF_A_NODE = (
    "dataset_name",
    "disable_tqdm",
    "hub_token",
    "local_rank",
    "log_level",
    "log_level_replica",
    "logging_dir",
    "model_name_or_path",
    "output_dir",
    "report_to",
    "run_name",
)
"""Settings that nodes may differ in: reports, and where files are, which are compared by their contents."""


def _decided(run: Run, args: SFTConfig) -> dict[str, str]:
    """What all ranks have to have in common: settings, what followed from them and from the node, and releases."""
    settings = {name: value for name, value in run.settings.items() if name not in _OF_A_NODE}
    packages = (*REQUIRED_VERSIONS, *MINIMUM_VERSIONS.get(run.engine, {}))
    decided = {f"--{name}": getattr(value, "value", value) for name, value in settings.items()}
    decided |= {"mesh": run.dims, "backend": run.backend.name, "engine": run.engine}
    decided |= {"longctx": longctx.__version__} | {package: version(package) for package in packages}
    if run.settings["resume_from_checkpoint"] is not None:
        found = candidates(str(run.settings["resume_from_checkpoint"]), Path(args.output_dir))
        decided["checkpoints"] = [folder.name for folder in found]
    return {name: str(value) for name, value in decided.items()}


def _settle_output(args: SFTConfig) -> None:
    """Where nodes share --output_dir, leave its files to rank 0, with --save_on_each_node, too.

    Raises:
        ValueError: where they do not, and what each would keep cannot be used.
    """
    owners = [0] if args.save_only_model else sharing(Path(args.output_dir))
    if not any(owners):
        args.save_on_each_node = False
        return
    where = f"--output_dir {args.output_dir} on {socket.gethostname()} is not the folder that rank 0 has by that name"

    def check() -> None:
        if args.local_process_index != 0 or args.process_index == 0:
            return
        if not args.save_on_each_node:
            raise ValueError(
                f"{where}. Name one on a file system that all nodes share, or add --save_on_each_node True, which "
                "keeps on each node the files of its own ranks."
            )
        if owners[args.process_index] != args.process_index:
            raise ValueError(f"{where}, and another node has it, too. Name one that all nodes share, or none.")
        if args.load_best_model_at_end:
            raise ValueError(
                f"{where}, and --load_best_model_at_end reads the files of all ranks. Name one on a file system that "
                "all nodes share, or leave it out."
            )

    together(check)


def _checkpoint(run: Run, args: SFTConfig, identity: Callable[[], Mapping[str, Any]]) -> Path | None:
    """The one that --resume_from_checkpoint means, whole and of this run's data. All ranks look at a part of it.

    Raises:
        CheckpointError: where there is none, or it is not.
    """
    asked = run.settings["resume_from_checkpoint"]
    if asked is None:
        return None
    for folder in candidates(str(asked), Path(args.output_dir)):
        owners = sharing(folder)
        among = [rank for rank, owner in enumerate(owners) if owner == owners[args.process_index]]
        try:
            manifest = together(partial(read_manifest, folder))
            together(partial(check_files, folder, manifest, part=among.index(args.process_index), parts=len(among)))
            together(partial(check_side_files, folder, manifest, args.process_index))
            if dist.is_initialized():
                check_agreement({f"{folder.name}/{MANIFEST}": manifest.digest})
        except ValueError as error:
            if asked != "auto" or any(owners):  # nodes that have it in parts: the run is to go on from it
                raise
            if args.process_index == 0:
                logger.warning("%s An earlier one is looked for.", error)
            continue
        together(partial(_check_same, run, args, manifest, folder, identity))
        return folder
    return None


def _check_same(
    run: Run, args: SFTConfig, manifest: Manifest, folder: Path, identity: Callable[[], Mapping[str, Any]]
) -> None:
    """Rank 0 reads the data for all."""
    if args.process_index != 0:
        return
    sequences = args.per_device_train_batch_size * run.dims.dp * args.gradient_accumulation_steps
    flags = optimization_flags(args)
    check_same(manifest, folder, sequences_per_step=sequences, data=identity(), optimization=flags)


def _with_data(run: Run, args: SFTConfig, data: TrainingRows | StreamedRows) -> Run:
    """The run with its backend modelled, and chosen where it is `auto`, by the packs there are. Rank 0 decides.

    Of a stream none are known, and the choice stays.
    """
    if run.dims.sp == 1 or isinstance(data, StreamedRows) or not len(data.rows):
        return run
    setup = measured(run.setup, args.device) if run.settings["measure_links"] else run.setup
    decided = first_ranks(run.choose_again(_sampled(data, args), setup) if dist.get_rank() == 0 else None)
    assert decided is not None, "rank 0 decides"
    return run.spread_as(decided)


def _sampled(data: TrainingRows, args: SFTConfig) -> Documents:
    """The documents of a few micro-batches, from packs all over the data set."""
    num_rows = min(SAMPLED_ROWS, len(data.rows))
    packs = np.linspace(0, len(data.rows) - 1, num_rows * args.per_device_train_batch_size).round().astype(int)
    lengths = [data.rows[int(pack)]["seq_lengths"] for pack in packs]
    rows = [np.concatenate(lengths[i::num_rows]) for i in range(num_rows)]
    mean = np.concatenate(rows).mean()
    return Documents(rows=rows, source=f"{num_rows} sampled rows, documents of {mean:,.0f} tokens on average")


def prepare_data(run: Run) -> TrainingRows:
    """Load, tokenise and pack in this process alone, for later runs to find on disk; no weights are read.

    Raises:
        ValueError: for data that cannot be trained on as asked.
    """
    data = prepare_rows(run.settings, _tokenizer(run.settings, run.model_config), run.model_config)
    assert isinstance(data, TrainingRows), "--prepare_only is refused for a stream"
    return data


def _tokenizer(settings: Mapping[str, Any], model_config: PretrainedConfig) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(
        settings["model_name_or_path"],
        revision=settings["model_revision"],
        trust_remote_code=settings["trust_remote_code"],
    )
    for kind in ("eos_token", "pad_token"):
        if settings[kind] is not None:
            if settings[kind] not in tokenizer.get_vocab():
                raise ValueError(f"--{kind} {settings[kind]!r} is not in the tokenizer's vocabulary. Name one that is.")
            setattr(tokenizer, kind, settings[kind])
    path = settings["chat_template_path"]
    if path and not is_template_file(path):
        take_chat_template(tokenizer, path)
    vocab_size = model_config.get_text_config().vocab_size
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocab_size:
        raise ValueError(
            f"The tokenizer's pad token {tokenizer.pad_token!r} has number {tokenizer.pad_token_id}, and the model has "
            f"embeddings for 0 to {vocab_size - 1}. Name a token that both have with --pad_token."
        )
    return tokenizer


def load(prepared: PreparedRun) -> PreTrainedModel:
    """Read the weights, on all ranks together.

    Raises:
        ValueError: if they cannot be read, or the model could not be saved after training.
    """
    settings = prepared.run.settings
    name = settings["model_name_or_path"]
    # Parameters on NVMe are written there while the model is loaded, as they are trained.
    on_nvme = prepared.run.levers.offload_param_device == NVME
    with nullcontext() if on_nvme else loaded_in_fp32():
        model = together(
            lambda: load_model(
                name,
                prepared.run.model_config,
                dtype=settings["dtype"],
                revision=settings["model_revision"],
                quantization=quantization_of(settings),
            )
        )
    parts = [model.config, model.generation_config, prepared.tokenizer] if prepared.args.should_save else []
    together(lambda: check_savable(name, parts))
    return model


def build_trainer(prepared: PreparedRun, model: PreTrainedModel) -> SequenceTrainer:
    """Put sequence parallelism into the model, and give it its data."""
    run, args, settings = prepared.run, prepared.args, prepared.run.settings
    _check_kernels(prepared, model)
    if run.liger_parts is not None:
        _install_liger(prepared, model, run.liger_parts)
    model, sequence = parallelize(
        model,
        run.dims.sp,
        sp_backend=run.backend.name if run.dims.sp > 1 else "auto",
        ring_size=run.dims.ring if BACKENDS[run.backend.name].has_ring_size else None,
        dp_replicate=run.dims.dp_replicate,
        device=args.device,
        **run.levers.parallelize_arguments(),
    )
    if run.has_group:
        limit_waiting(timedelta(seconds=settings["ddp_timeout"]))
    if settings["use_peft"]:
        model = add_adapter(model, settings)
    collator = SequenceCollator(
        pad_token_id=prepared.tokenizer.pad_token_id,
        pad_to_multiple_of=settings["pad_to_multiple_of"],
        padding_free=settings["packing"] or settings["padding_free"],
    )
    trainer = SequenceTrainer(
        model,
        args,
        sequence=sequence,
        rows=prepared.data.rows,
        collator=collator,
        documents=prepared.data.documents,
        processing_class=prepared.tokenizer,
        costs=prepared.data.costs,
        report=prepared.data.report,
        mixture=prepared.data.mixture,
        eval_rows=prepared.data.evaluation.rows if prepared.data.evaluation else None,
        data_identity=prepared.data_identity,
        on_nonfinite=settings["on_nonfinite"],
        base_config=run.model_config if changes_base(settings) else None,
    )
    if run.engine == "fsdp2":
        settle_fsdp(trainer.accelerator.state.fsdp_plugin, run.levers, use_cpu=run.use_cpu)
    if run.levers.activation_offloading and run.use_cpu:
        trainer.maybe_activation_offload_context = SavedOnHost()
    return trainer


def _check_kernels(prepared: PreparedRun, model: PreTrainedModel) -> None:
    """Refuse on all ranks together what `check_kernels` refuses."""
    run, device = prepared.run, select_device(prepared.args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found = gathered(together(lambda: (name, _kernel(prepared, model).name)))
    share = -(-row_length(run.settings) // run.dims.ring)
    together(lambda: check_kernels(found, min(run.settings["max_length"], share)))


def _install_liger(prepared: PreparedRun, model: PreTrainedModel, parts: tuple[str, ...]) -> None:
    """Put Liger's kernels into the model, once every rank has compared them with torch's operators."""
    device = select_device(prepared.args.device)
    together(lambda: check_liger(model.config, parts, device, _activation_dtype(prepared, model)))
    install_liger(model, parts)


def _kernel(prepared: PreparedRun, model: PreTrainedModel) -> Kernel:
    """The kernel that computes attention in training."""
    return kernel_of(model.config, prepared.args.device, _activation_dtype(prepared, model))


def _activation_dtype(prepared: PreparedRun, model: PreTrainedModel) -> torch.dtype:
    return torch.bfloat16 if prepared.args.bf16 else model.dtype


def fit(prepared: PreparedRun, model: PreTrainedModel) -> SequenceTrainer:
    """Train, and save the model and trainer_state.json in output_dir; or, stopped by a signal, a checkpoint there."""
    run = prepared.run
    trainer = build_trainer(prepared, model)
    trainer.add_callback(FollowSteps())
    if run.settings["profile"]:
        trainer.add_callback(
            ProfileSteps(trainer.args.output_dir, run.settings["profile_steps"], trainer.sequence.rank)
        )
    if (patience := run.settings["early_stopping_patience"]) is not None:
        trainer.add_callback(EarlyStoppingCallback(patience, run.settings["early_stopping_threshold"]))
    disable_progress_bar()  # of every file that is saved; the run has a bar of its own
    is_first = trainer.sequence.rank == 0
    if is_first:
        print("\n".join(f"longctx: {line}" for line in [*run.describe(), *_sizes(prepared, model)]), flush=True)
    with reported(run, trainer):
        trainer.train(resume_from_checkpoint=None if prepared.resume_from is None else str(prepared.resume_from))
        if is_first and trainer.stream_read is not None:
            read = trainer.stream_read
            print(f"longctx: packing   {read.report}; the data set was begun {read.passes} times", flush=True)
            print("".join(f"longctx: mixture   {source}\n" for source in trainer.mixture_read()), end="", flush=True)
        if trainer.stop_on_signal.stopped_by is None:
            _check_labels_seen(trainer, run)
            if is_first and trainer.has_stopped_early:
                print(f"longctx: {_stopped_early(trainer, run.settings['early_stopping_patience'])}", flush=True)
            trainer.save_results()
    if trainer.stop_on_signal.stopped_by is not None:
        return trainer
    if trainer.args.push_to_hub:  # the page above with the rest
        trainer.push_results()
    if run.is_demo and is_first and trainer.state.log_history[1].get("step") == 1:
        print(f"longctx: {_first_step_report(trainer, run)}", flush=True)
    return trainer


def _check_labels_seen(trainer: SequenceTrainer, run: Run) -> None:
    """Check that a stream, whose documents are not known beforehand, had something to learn. Called after training.

    Raises:
        DataError: if no step had a token with a label, so that nothing was trained.
    """
    if trainer.stream_read is not None and not trainer.has_seen_labels:
        raise DataError(
            f"the stream of {name_data(run.settings)} had no token with a label in {trainer.state.global_step} steps: "
            f"{trainer.stream_read.report}. Nothing was trained, and no model is saved. Use a longer --max_length, or "
            "--overlong split."
        )


def _stopped_early(trainer: SequenceTrainer, patience: int) -> str:
    state, metric = trainer.state, str(trainer.args.metric_for_best_model).removeprefix("eval_")
    best = f"eval_{metric} {state.best_metric:.6g}"
    return f"stopped early after step {state.global_step}: {patience} evaluations in a row were no better than {best}"


def finish() -> None:
    """Leave the process group together."""
    leave()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _degrees(run: Run) -> dict[str, object]:
    """What accelerate is told of the mesh: replicas of HSDP, and shards, which sequence groups are a part of.

    It makes FSDP2's mesh from them, of the kind of device that it runs on. Told of none, it leaves the mesh to torch,
    which takes GPUs wherever it sees one, those of a run on the CPU too.
    """
    if run.dims.dp_replicate == 1 and not (run.engine == "fsdp2" and run.use_cpu):
        return {}
    from accelerate import ParallelismConfig

    shards = run.dims.world_size // run.dims.dp_replicate
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=run.dims.dp_replicate, dp_shard_size=shards)}


def _sizes(prepared: PreparedRun, model) -> list[str]:
    """The lines that need the data and the model: batch equation, tokens, kernel."""
    dims, args, settings = prepared.run.dims, prepared.args, prepared.run.settings
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    sequences = micro * dims.dp * accumulation
    length = settings["max_length"]
    kernel = _kernel(prepared, model)
    asked = f", {settings['attn_implementation']} was asked for" if settings["attn_implementation"] else ""
    adapter = f", {count_trained_parameters(model):,} of them trained, in the adapter" if settings["use_peft"] else ""
    return [
        f"packing   {prepared.data.report or 'as the stream is read; the counts come at the end of the run'}",
        *(f"mixture   {source}" for source in prepared.data.mixture),
        *([f"evaluate  {prepared.data.evaluation.report}"] if prepared.data.evaluation else []),
        *([f"resume    from {prepared.resume_from}"] if prepared.resume_from else []),
        f"batch     {sequences} sequences a step = per_device_train_batch_size {micro} × (world {dims.world_size} / "
        f"sp {dims.sp}) × gradient_accumulation_steps {accumulation}",
        f"tokens    up to {sequences * length:,} a step, {micro * length // dims.sp:,} a rank and micro-batch",
        f"model     {count_parameters(model):,} parameters{adapter}, attention kernel {kernel.name} "
        f"(packed-exact{asked})",
    ]


def first_step_batches(trainer: SequenceTrainer, dp_rank: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches that data-parallel rank `dp_rank` sees in the first optimizer step, uncut."""
    step = islice(trainer.micro_batches(dp_rank), trainer.args.gradient_accumulation_steps)
    return [trainer.data_collator(rows) for rows in step if rows]


def _first_step_report(trainer: SequenceTrainer, run: Run) -> str:
    """Compare the first logged step with the same step on one device, from the same weights."""
    batches = [batch for dp_rank in range(run.dims.dp) for batch in first_step_batches(trainer, dp_rank)]
    model = load_model(run.settings["model_name_or_path"], run.model_config)
    if run.settings["use_peft"]:
        model = add_adapter(model, run.settings)
    loss, grad_norm = single_device_step(model, batches, trainer.args.label_smoothing_factor)
    logged = trainer.state.log_history[1]  # after the packing report
    difference = max(abs(logged["loss"] / loss - 1), abs(logged["grad_norm"] / grad_norm - 1))
    precisions = ("in bf16 ", "in fp32 ") if trainer.args.bf16 else ("", "")
    return (
        f"step 1 {precisions[0]}matched one device {precisions[1]}to {difference:.0e} "
        f"(loss {logged['loss']:.6f} and {loss:.6f}, gradient norm {logged['grad_norm']:.6f} and {grad_norm:.6f})"
    )
