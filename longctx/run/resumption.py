"""Find and check the checkpoint that a run resumes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from trl import SFTConfig

from longctx.ranks.agreement import check_agreement, on_all_ranks, storage_of_ranks
from longctx.settings.run import Run
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

logger = logging.getLogger(__name__)


def checkpoint_to_resume(run: Run, args: SFTConfig, identity: Callable[[], Mapping[str, Any]]) -> Path | None:
    """Return the checkpoint that --resume_from_checkpoint names, after ranks have shared the work of checking it.

    Raises:
        CheckpointError: if there is none, or it is damaged or of other data.
    """
    asked = run.settings["resume_from_checkpoint"]
    if asked is None:
        return None
    for folder in candidates(str(asked), Path(args.output_dir)):
        owners = storage_of_ranks(folder)
        among = [rank for rank, owner in enumerate(owners) if owner == owners[args.process_index]]
        try:
            manifest = on_all_ranks(partial(read_manifest, folder))
            on_all_ranks(partial(check_files, folder, manifest, part=among.index(args.process_index), parts=len(among)))
            on_all_ranks(partial(check_side_files, folder, manifest, args.process_index))
            if dist.is_initialized():
                check_agreement({f"{folder.name}/{MANIFEST}": manifest.digest})
        except ValueError as error:
            if asked != "auto" or any(owners):  # nodes have parts of it, so no earlier one may replace it
                raise
            if args.process_index == 0:
                logger.warning("%s An earlier one is looked for.", error)
            continue
        on_all_ranks(partial(_check_same, run, args, manifest, folder, identity))
        return folder
    return None


def _check_same(
    run: Run, args: SFTConfig, manifest: Manifest, folder: Path, identity: Callable[[], Mapping[str, Any]]
) -> None:
    """Check on rank 0, which reads the data for all, that data and flags have not changed."""
    if args.process_index != 0:
        return
    sequences = args.per_device_train_batch_size * run.dims.dp * args.gradient_accumulation_steps
    flags = optimization_flags(args)
    check_same(manifest, folder, sequences_per_step=sequences, data=identity(), optimization=flags)
