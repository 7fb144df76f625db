"""The `longctx` command: `longctx train --sp 4`, and plan, verify and bench, each the same as its module."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from typing import NamedTuple

import longctx
from longctx.launch.terminal import USAGE_ERROR

BROKEN_PIPE = 128 + 13
"""The exit code of a process that SIGPIPE ends."""


class Command(NamedTuple):
    module: str
    """A module with `main(arguments) -> exit code`, imported when the command is called."""
    purpose: str


COMMANDS = {
    "train": Command("longctx.train", "fine-tune a model on long sequences"),
    "dpo": Command("longctx.dpo", "train a model on pairs of chosen and rejected answers"),
    "plan": Command("longctx.plan", "predict what fits, how fast it trains, and how to launch it"),
    "verify": Command("longctx.verify.__main__", "compare one step at --sp N with one device"),
    "export": Command("longctx.export", "turn a checkpoint or an adapter into one model folder, as for vLLM"),
    "bench": Command("longctx.benchmarks.max_length.__main__", "measure the longest sequence that each backend trains"),
    "completion": Command("longctx.completion", "print a completion script for bash, zsh or fish"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return its exit code, or 2 if there is no such command.

    Output that nobody reads any more, as behind `| head`, ends a command without a traceback.
    """
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python flushes it again, and complains
        return BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    if name in COMMANDS:
        return import_module(COMMANDS[name].module).main(rest)
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"longctx {longctx.__version__}")
        return 0
    from longctx.settings.read import OTHER_METHODS, POINTER  # which reads all flags

    if name in OTHER_METHODS:
        print(f"longctx: error: {name} is not a command: {POINTER}.", file=sys.stderr)
        return USAGE_ERROR
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    said = f"longctx: error: {name} is not a command.{f' Did you mean {close[0]}?' if close else ''}\n" if name else ""
    print(said + usage(), file=sys.stderr)
    return USAGE_ERROR


def usage() -> str:
    """Return what `longctx --help` prints."""
    lines = [f"  {name:12}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: longctx [-h] [--version] COMMAND ...",
            "",
            "Fine-tune language models on sequences longer than one device can hold.",
            "",
            *lines,
            "",
            "longctx COMMAND --help lists the flags of a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
