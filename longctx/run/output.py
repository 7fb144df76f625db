"""Checks of where a run writes: a folder that nodes share, or one on each node, and the hub."""

from __future__ import annotations

import socket
from pathlib import Path

from huggingface_hub import auth_check, create_repo
from trl import SFTConfig

from longctx.ranks.agreement import on_all_ranks, storage_of_ranks


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


def settle_output(args: SFTConfig) -> None:
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
