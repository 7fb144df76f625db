"""What commands print: errors of wrong command lines, help, completion and the page of flags.

The texts of all refusals that tests meet are in data/refusals.json; see tests/refusals.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.golden.digests import digest
from tests.modules import load

ROOT = Path(__file__).parents[2]
COMMANDS = ("train", "dpo", "plan", "verify", "export", "bench", "completion")
WRONG = (
    "trian",
    "grpo --beta 0.1",
    "train --max_step 5",
    "train --config none.yaml",
    "train --sp 0",
    "train --resume_from_checkpoint nothing",
    "dpo --max_step 5",
    "verify --jsn",
    "verify --sp 2 --engine fsdp3",
    "plan --model_name_or_path tiny --gpus 0",
    "export",
    "bench --no_such_flag",
    "completion tcsh",
)
"""A mistake of each kind for every command."""
_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "MASTER_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCH")


def _run(line: str, width: int = 80) -> list[Any]:
    """Run `longctx` in this process, on a machine without GPUs or launcher, and return code, stdout and stderr."""
    from longctx.__main__ import main

    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    environment |= {"COLUMNS": str(width), "LONGCTX_HAS_STARTED": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch("longctx.settings.resolve.device_count", return_value=0),
        mock.patch("longctx.settings.launcher.default_config_file", return_value=None),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as error,
    ):
        try:
            code = main(line.split())
        except SystemExit as left:
            code = left.code
    texts = (text.getvalue().replace(folder, "WORK").replace(str(ROOT), "ROOT") for text in (printed, error))
    return [code, *texts]


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    for line in WRONG:
        code, printed, error = _run(line)
        yield line, [code, error.splitlines()] + ([printed.splitlines()] if printed else [])
    for command in COMMANDS:
        yield f"{command} --help", _run(f"{command} --help")[1].splitlines()
    for line in ("--help", "--version"):
        yield line, re.sub(r"\d+\.\d+\S*", "VERSION", _run(line)[1]).splitlines()
    for command in ("train", "dpo"):
        yield f"{command} --help-all", _by_flag(_run(f"{command} --help-all", width=120)[1])
    for shell in ("bash", "zsh", "fish"):
        yield f"completion {shell}", _words(_run(f"completion {shell}")[1])
    yield "page of flags", dict(_rows())


def _by_flag(text: str) -> dict[str, str]:
    """A digest of the entry of each flag, and of what stands above the first one."""
    head, *parts = re.split(r"^  (?:-h, )?--([\w-]+)", text, flags=re.MULTILINE)
    return {"": digest({"text": head})} | {
        name: digest({"text": " ".join(entry.split())}) for name, entry in zip(parts[::2], parts[1::2], strict=True)
    }


def _words(script: str) -> dict[str, Any]:
    """How many flags and words a completion script has, and digests of them."""
    found = {"flags": set(re.findall(r"--[a-z]\w+", script)), "words": set(re.findall(r"[\w.-]+", script))}
    return {kind: [len(words), digest({"words": sorted(words)})] for kind, words in found.items()}


def _rows() -> Iterator[tuple[str, Any]]:
    """What docs/pages.py generates of flags: a digest of each row, by its first cell, and other lines."""
    lines = load(ROOT / "docs" / "pages.py").flags_page().splitlines()
    yield "text", [line for line in lines if line and not line.startswith("|")]
    for at, line in enumerate(line for line in lines if line.startswith("|")):
        yield f"row {at} {line.split('|')[1].strip()[:60]}", digest({"row": line})
