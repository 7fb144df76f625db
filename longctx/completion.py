"""`longctx completion bash`: print a script with which a shell completes the flags of longctx and their values.

The script holds all names, so that the shell starts no Python to complete one.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

import shtab

from longctx.__main__ import COMMANDS
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.schema import BOOL, FOLDER, PATH, Method
from longctx.verify.__main__ import VERIFY

SHELLS = ("bash", "zsh", "fish")
COMPLETE = {PATH: shtab.FILE, FOLDER: shtab.DIRECTORY}
"""What a shell completes, by the kind of a flag."""


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
    methods = {"train": SFT, "dpo": DPO, "verify": VERIFY, "plan": DPO}
    for name, command in COMMANDS.items():
        parents = [_flags_of(methods[name])] if name in methods else []
        if name not in ("train", "dpo", "verify"):
            parents.append(import_module(command.module)._parser())
        found = commands.add_parser(
            name, help=command.purpose, parents=parents, add_help=False, conflict_handler="resolve"
        )
        if name in ("train", "dpo", "verify"):
            found.add_argument("--help-all", action="store_true", help="List every flag")
    return parser


def _flags_of(method: Method) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    config = parser.add_argument("--config", help="Read flags from a YAML file or a recipe")
    config.complete = shtab.FILE  # type: ignore[attr-defined]
    for flag in method.flags.values():
        choices = ("True", "False") if flag.kind is BOOL else flag.choices or None
        action = parser.add_argument(f"--{flag.name}", help=flag.summary.replace("%", "%%"), choices=choices)
        if flag.kind in COMPLETE:
            action.complete = COMPLETE[flag.kind]  # type: ignore[attr-defined]
    return parser
