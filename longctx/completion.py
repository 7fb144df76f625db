"""`longctx completion bash`: print a script with which a shell completes the flags of longctx and their values.

The script holds all names, so that the shell starts no Python to complete one.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

import shtab

from longctx.__main__ import COMMANDS
from longctx.settings.flag_sources import Flag
from longctx.settings.help import SHORT_HELP, flags
from longctx.settings.methods import DPO, SFT, Method

SHELLS = ("bash", "zsh", "fish")
FILES = ("accelerate_config", "chat_template_path", "config", "dataset_name")
FOLDERS = ("model_name_or_path", "output_dir", "resume_from_checkpoint")


def main(arguments: list[str] | None = None) -> int:
    """Print the script for a shell, and return the exit code."""
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    print(shtab.complete(_command_line(), options.shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longctx completion",
        description="Print a script with which a shell completes the flags of longctx. Put "
        '`eval "$(longctx completion bash)"` into ~/.bashrc, the same with zsh into ~/.zshrc, or '
        "`longctx completion fish | source` into ~/.config/fish/config.fish.",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def _command_line() -> argparse.ArgumentParser:
    """Return a parser of all commands. It imports neither torch nor TRL."""
    parser = argparse.ArgumentParser(prog="longctx")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        method = DPO if name == "dpo" else SFT
        parts = [_flags_of(method)] if name in ("train", "dpo", "verify") else []
        if name not in ("train", "dpo"):
            parts.append(import_module(command.module)._parser())
        commands.add_parser(name, help=command.purpose, parents=parts, add_help=False)
    return parser


def _flags_of(method: Method) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    summaries = {name: text for group in SHORT_HELP.values() for name, text in group.items()}
    summaries |= method.help
    known = flags(method) or {}
    for name in {**known, **summaries}:
        flag = known.get(name)
        summary = summaries.get(name) or (flag.help.partition(". ")[0] if flag else "")
        action = parser.add_argument(f"--{name}", help=summary.replace("%", "%%"), choices=_choices(flag))
        if name in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif name in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return parser


def _choices(flag: Flag | None) -> tuple[str, ...] | None:
    """Return the values that a flag takes, or None for others than a few words."""
    if flag is None:
        return None
    return ("True", "False") if flag.is_switch else flag.choices or None
