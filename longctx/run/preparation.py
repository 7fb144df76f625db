"""Start the processes and prepare the data of a run, before weights are loaded.

This checks the checkpoint that a run resumes from, and where it writes: a folder that nodes share or one on each node,
and the hub.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import auth_check, create_repo
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from trl import SFTConfig

from longctx.attention.choice import Documents
from longctx.forecast.model_sizes import ModelSizes
from longctx.launch.console import say
from longctx.layers.liger import check_liger
from longctx.machine.measure import with_measured_links
from longctx.model.load import check_eos_token, load_tokenizer, take_chat_template
from longctx.ranks.agreement import broadcast_object, check_agreement, on_all_ranks, storage_of_ranks
from longctx.run.processes import agree, degrees, start_processes
from longctx.sequence.mesh import select_device
from longctx.settings.machine_checks import check_kernel_package
from longctx.settings.run import Run, spread
from longctx.training.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    Manifest,
    check_files,
    check_same,
    read_manifest,
)
from longctx.training.checkpoint.folder import RunRecord, begin, checkpoint_of, is_path, older_named
from longctx.training.checkpoint.saving import optimization_flags
from longctx.training.checkpoint.states import check_side_files
from longctx.training.dataset import StreamedData, TrainingData, prepare_data_set
from longctx.training.engines import configure_deepspeed
from longctx.training.fingerprint import compare_files, data_identity, is_preference, reference_identity
from longctx.training.schedule import check_learning_rates, check_training_steps, steps_of_run
from longctx.untrusted.files import is_template_file
from longctx.upstream.transformers_internals import use_one_device

TRL_ROWS = 64
"""trl.clone_chat_template gives a model a multiple of so many embeddings."""

SAMPLED_ROWS = 8
"""Micro-batches that are sampled to choose a backend."""


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose processes have started and whose data is ready; no weights are loaded."""

    run: Run
    args: SFTConfig
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData | StreamedData
    data_identity: Callable[[], Mapping[str, Any]]
    """Returns what identifies data and model, by name. The first call reads all rows."""
    reference_identity: Mapping[str, Any]
    """What identifies the model before training, by name, for the log-probabilities of a reference model."""
    resume_from: Path | None
    """The checkpoint to resume from."""
    is_finished: bool = False
    """Whether the run in output_dir has all the steps that are asked for, so that nothing is left to do."""


def prepare(run: Run) -> PreparedRun:
    """Start the process group, then load, tokenise and pack the data.

    Raises:
        ValueError: for data that cannot be trained on as asked.
    """
    settings = run.settings
    start_processes(run)
    args = SFTConfig(**run.training_arguments() | degrees(run))
    if dist.is_initialized():
        agree(run, args)
        agree_on_output(args)
    if args.max_steps > 0:
        on_all_ranks(lambda: check_learning_rates(args, args.max_steps))
    on_all_ranks(lambda: check_hub(args))
    if not run.use_cpu:
        on_all_ranks(lambda: check_kernel_package(settings["attn_implementation"]))
    use_one_device(args)
    run = _with_exact_liger(run, args)
    if run.engine == "deepspeed":
        configure_deepspeed(
            args.deepspeed_plugin.deepspeed_config,
            run.memory_options,
            ModelSizes.of_config(run.model_config),
            num_ranks=run.dims.world_size,
            use_cpu=run.use_cpu,
        )
    tokenizer = on_all_ranks(lambda: read_tokenizer(settings, run.model_config))
    began, finished, has_checkpoint = _earlier(run, args)
    data = prepare_data_set({**settings, "began": began}, tokenizer, run.model_config)
    on_all_ranks(lambda: check_training_steps(args, data.rows, run.dims.dp))
    files = compare_files(run.settings, run.model_config, data, args)
    run = _with_data(run.decide(*template_notes(settings, tokenizer, run.model_config)), args, data)
    identity = cache(partial(data_identity, data, run.settings, run.model_config, files))
    reference = reference_identity(run.settings, run.model_config, files)
    resume_from = checkpoint_to_resume(run, args, identity)
    num_steps = steps_of_run(args, data.rows, run.sequences_per_step)
    is_finished = finished is not None and num_steps <= finished
    if is_finished and args.process_index == 0:
        done = f"has finished {finished} steps of {num_steps} asked for: nothing is left to do"
        say(f"the run in {args.output_dir} {done}")

    def take_folder() -> None:
        """Write run.json, after all that may refuse the run; delete what --overwrite_output_dir allows."""
        folder, overwrite = Path(args.output_dir), settings["overwrite_output_dir"]
        if finished is not None and not has_checkpoint:
            raise CheckpointError(
                f"--output_dir {folder} holds a finished run of {finished} steps and no checkpoint from which the "
                f"{num_steps} asked for could be reached. Train on from its weights with --model_name_or_path {folder} "
                "and another --output_dir."
            )
        if args.should_save:
            timeout, env = args.ddp_timeout, os.environ
            deleted = begin(folder, overwrite=overwrite, timeout=timeout, env=env, began=began, choice=run.choice)
            if deleted:
                say(f"--overwrite_output_dir: deleted {', '.join(deleted)} in {folder}")

    if not is_finished:
        on_all_ranks(take_folder)
    return PreparedRun(
        run=run,
        args=args,
        tokenizer=tokenizer,
        data=data,
        data_identity=identity,
        reference_identity=reference,
        resume_from=resume_from,
        is_finished=is_finished,
    )


def _with_exact_liger(run: Run, args: SFTConfig) -> Run:
    """Return the run with Liger's kernels if they agree with torch's operators on the devices of all ranks.

    Raises:
        ValueError: if they do not, and were asked for.
    """
    parts, named = run.liger_parts, run.settings["dtype"]
    if parts is None:
        return run
    loaded = run.model_config.dtype or torch.float32 if named == "auto" else getattr(torch, named)
    dtype = torch.bfloat16 if args.bf16 else loaded
    try:
        on_all_ranks(lambda: check_liger(run.model_config, parts, select_device(args.device), dtype))
    except ValueError as error:
        if run.flags.is_set("use_liger_kernel") or run.flags.is_set("liger_kernel_config"):
            raise
        note = f"Liger's kernels are off, and steps take longer: {error}"
        return run.decide(note, use_liger_kernel=False, liger_kernel_config=None)
    return run


def _earlier(run: Run, args: SFTConfig) -> tuple[datetime, int | None, bool]:
    """Return what --resume_from_checkpoint finds. Rank 0 looks.

    Returns:
        When the run began, by its checkpoint or run.json if it goes on, else now; the steps of the run in output_dir if
        that has finished and a path was not given; and whether there is a checkpoint to go on from.

    Raises:
        CheckpointError: if there is no checkpoint where a path names one, or it is damaged.
    """
    asked, folder = run.settings["resume_from_checkpoint"], Path(args.output_dir)

    def look() -> tuple[str, int | None, bool] | None:
        if asked is None or args.process_index != 0:
            return None
        checkpoint = checkpoint_of(str(asked), folder)
        record = None if is_path(str(asked)) else RunRecord.read(folder)
        began = record.began if record else datetime.now().isoformat()
        if checkpoint is not None:
            began = read_manifest(checkpoint).began or began  # an own trainer writes none
        return began, record.finished if record else None, checkpoint is not None

    found = on_all_ranks(look) or (datetime.now().isoformat(), None, False)
    began, finished, has_checkpoint = broadcast_object(found)
    return datetime.fromisoformat(began), finished, has_checkpoint


def _with_data(run: Run, args: SFTConfig, data: TrainingData | StreamedData) -> Run:
    """Return the run with its backend modelled, and chosen if `auto`, and its forecast for sampled packs.

    Rank 0 decides. A stream's packs are unknown, so the run stays as it is.
    """
    if isinstance(data, StreamedData) or not len(data.rows):
        return run
    sampled = _sampled(data, args)
    if run.dims.sp > 1:
        setup = run.setup
        if run.settings["measure_links"]:
            setup = replace(setup, machine=with_measured_links(run.machine, args.device))
        decided = spread(run.flags, setup, sampled, before=run.backend) if args.process_index == 0 else None
        decided = broadcast_object(decided)  # `auto` changes to a much better backend
        assert decided is not None, "rank 0 decides"
        run = run.with_backend(decided)
    typical = data.rows[len(data.rows) // 2]["seq_lengths"]
    return replace(run, forecast=run.cost([int(length) for length in typical]))


def _sampled(data: TrainingData, args: SFTConfig) -> Documents:
    """Return the documents of a few micro-batches, from packs all over the data set."""
    num_rows = min(SAMPLED_ROWS, len(data.rows))
    packs = np.linspace(0, len(data.rows) - 1, num_rows * args.per_device_train_batch_size).round().astype(int)
    lengths = [data.rows[int(pack)]["seq_lengths"] for pack in packs]
    rows = [np.concatenate(lengths[i::num_rows]) for i in range(num_rows)]
    mean = np.concatenate(rows).mean()
    return Documents(rows=rows, source=f"{num_rows} sampled sequences, documents of {mean:,.0f} tokens on average")


def prepare_data(run: Run) -> TrainingData:
    """Load, tokenise and pack in this process alone, for later runs to find on disk; no weights are read.

    Raises:
        ValueError: for data that cannot be trained on as asked.
    """
    data = prepare_data_set(run.settings, read_tokenizer(run.settings, run.model_config), run.model_config)
    assert isinstance(data, TrainingData), "--prepare_only is refused for a stream"
    return data


def read_tokenizer(settings: Mapping[str, Any], model_config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the tokens and the chat template that the flags name.

    Raises:
        ValueError: for a token that it does not have.
    """
    tokenizer = load_tokenizer(
        settings["model_name_or_path"],
        revision=settings["model_revision"],
        trust_remote_code=settings["trust_remote_code"],
    )
    path = settings["chat_template_path"]
    if path and not is_template_file(path):
        take_chat_template(tokenizer, path)
    for kind in ("eos_token", "pad_token"):  # they come before those of the template
        if settings[kind] is not None:
            if settings[kind] not in tokenizer.get_vocab():
                raise ValueError(f"--{kind} {settings[kind]!r} is not in the tokenizer's vocabulary. Use one that is.")
            setattr(tokenizer, kind, settings[kind])
    vocab_size = model_config.get_text_config().vocab_size
    check_eos_token(tokenizer)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocab_size:
        raise ValueError(
            f"The tokenizer's pad token {tokenizer.pad_token!r} has number {tokenizer.pad_token_id}, and the model has "
            f"embeddings for 0 to {vocab_size - 1}. Name a token that both have with --pad_token."
        )
    return tokenizer


def template_notes(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> list[str]:
    """Return how a run with the chat template of another tokenizer differs from TRL's, if it does."""
    path, rows = settings["chat_template_path"], model_config.get_text_config().vocab_size
    resized = -(-len(tokenizer.get_vocab()) // TRL_ROWS) * TRL_ROWS
    if not path or is_template_file(path) or resized == rows or is_preference(settings):  # TRL's DPO takes no template
        return []
    return [
        f"--chat_template_path {path}: TRL would also resize the model's {rows:,} embeddings to {resized:,}, the "
        f"tokenizer's size rounded up to a multiple of {TRL_ROWS}, which changes the loss; longctx keeps them. To have "
        "TRL's loss, save what trl.clone_chat_template returns, and name its folder with --model_name_or_path alone"
    ]


def check_hub(args: SFTConfig) -> None:
    """Check write access to the hub before preparing data or loading weights. Rank 0 checks for all ranks."""
    if not args.push_to_hub or args.process_index != 0:
        return
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    try:
        repository = create_repo(name, token=args.hub_token, private=args.hub_private_repo, exist_ok=True)
        auth_check(repository.repo_id, token=args.hub_token, write=True)
    except Exception as error:  # errors of several libraries
        raise ValueError(
            f"--push_to_hub True: {name} cannot be written on the hub ({type(error).__name__}: "
            f"{' '.join(str(error).split())}). Give a token that may write it (hf auth login, or --hub_token), or "
            "leave --push_to_hub out."
        ) from error


def agree_on_output(args: SFTConfig) -> None:
    """If nodes share --output_dir, leave its files to rank 0, even with --save_on_each_node.

    Raises:
        ValueError: if they do not share it, although the run needs them to.
    """
    owners = [0] if args.save_only_model else storage_of_ranks(Path(args.output_dir))
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
            raise ValueError(f"{where}, and another node has it, too. Name one that all nodes share, or leave it out.")
        if args.load_best_model_at_end:
            raise ValueError(
                f"{where}, and --load_best_model_at_end reads the files of all ranks. Name one on a file system that "
                "all nodes share, or leave it out."
            )

    on_all_ranks(check)


def checkpoint_to_resume(run: Run, args: SFTConfig, identity: Callable[[], Mapping[str, Any]]) -> Path | None:
    """Return the checkpoint that --resume_from_checkpoint names, after ranks have shared the work of checking it.

    Raises:
        CheckpointError: if there is none, or it is damaged or of other data.
    """
    asked = run.settings["resume_from_checkpoint"]
    folder = None if asked is None else checkpoint_of(str(asked), Path(args.output_dir))
    if folder is None:
        return None
    owners = storage_of_ranks(folder)
    among = [rank for rank, owner in enumerate(owners) if owner == owners[args.process_index]]

    def check() -> Manifest:
        with older_named(folder):
            manifest = read_manifest(folder)
            check_files(folder, manifest, part=among.index(args.process_index), parts=len(among))
            check_side_files(folder, manifest, args.process_index)
        return manifest

    manifest = on_all_ranks(check)
    if dist.is_initialized():
        check_agreement({f"{folder.name}/{MANIFEST}": manifest.digest})

    def compare() -> None:
        """Check that data and flags have not changed. Rank 0 reads the data for all."""
        if args.process_index == 0:
            now = {"data": identity(), "optimization": optimization_flags(args)}
            check_same(manifest, folder, sequences_per_step=run.sequences_per_step, **now)

    on_all_ranks(compare)
    return folder
