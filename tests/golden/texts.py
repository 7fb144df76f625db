"""What commands print: errors of wrong command lines, files and environments, help, completion and the page of flags.

The texts of all refusals that tests meet are in data/refusals.json; see tests/refusals.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.golden.commands import WRONG, WRONG_ENVIRONMENTS, WRONG_FILES
from tests.golden.digests import digest

ROOT = Path(__file__).parents[2]
_LAUNCHERS = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_",
    "MASTER_",
    "SLURM_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "TORCHELASTIC_",
)


@contextlib.contextmanager
def _terminal() -> Iterator[Callable[..., list[Any]]]:
    """A function that runs `longctx` in this process, on a machine without GPUs, and returns code, stdout and stderr.

    No process is started and no weights are read. Adapter: all that this module knows of the inside of longctx.
    """
    from accelerate.state import AcceleratorState

    from longctx.__main__ import main

    def accept(*_: Any, **__: Any) -> None:
        raise SystemExit("accepted")

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        patch.setattr("longctx.settings.resolve.device_count", lambda: 0)
        patch.setattr("longctx.settings.arrange.QLORA_VERSIONS", {})
        patch.setattr("longctx.settings.launcher.default_config_file", lambda: None)
        for work in (
            "longctx.launch.spawn.spawn",
            "longctx.train._train",
            "longctx.verify.__main__._compare",
            "os.execv",
        ):
            patch.setattr(work, accept)

        def run(line: str, env: Mapping[str, str] = {}, width: int = 80) -> list[Any]:
            printed, error = io.StringIO(), io.StringIO()
            with (
                _environment({**env, "COLUMNS": str(width), "LONGCTX_HAS_STARTED": "1"}),
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(error),
            ):
                try:
                    code = main(shlex.split(line))
                except SystemExit as left:
                    code = left.code
            AcceleratorState._reset_state(True)
            texts = (text.getvalue().replace(folder, "WORK").replace(str(ROOT), "ROOT") for text in (printed, error))
            return [code, *texts]

        yield run


@contextlib.contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    """No launcher's variables but these, for as long as a command runs, whatever it sets itself."""
    before = dict(os.environ)
    try:
        for name in [name for name in before if name.startswith(_LAUNCHERS)]:
            del os.environ[name]
        os.environ.update(changed)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    every = 8 if quick else 1
    with _terminal() as run:
        for line in WRONG[::every]:
            yield line, _error(*run(line))
        for text in WRONG_FILES[::every]:
            Path("run.yaml").write_text(text + "\n", encoding="utf-8")
            yield f"a file with {text}", _error(*run("train --config run.yaml"))
        for env, line in WRONG_ENVIRONMENTS[::every]:
            yield shlex.join([f"{name}={value}" for name, value in env.items()] + [line]), _error(*run(line, env))
        for command in ("train", "dpo", "plan", "verify", "export", "bench", "completion"):
            yield f"{command} --help", run(f"{command} --help")[1].splitlines()
        for line in ("--help", "--version"):
            yield line, re.sub(r"\d+\.\d+\S*", "VERSION", run(line)[1]).splitlines()
        for command in ("dpo",) if quick else ("train", "dpo"):
            yield f"{command} --help-all", _by_flag(run(f"{command} --help-all", width=120)[1])
        for shell in ("bash",) if quick else ("bash", "zsh", "fish"):
            yield f"completion {shell}", _words(run(f"completion {shell}")[1])
    yield "page of flags", dict(_rows())


def _error(code: int, printed: str, error: str) -> list[Any]:
    """The exit code and the error, and what else was printed, if anything was."""
    return [code, error.splitlines()] + ([printed.splitlines()] if printed else [])


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
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    lines = pages.flags_page().splitlines()
    yield "text", [line for line in lines if line and not line.startswith("|")]
    for at, line in enumerate(line for line in lines if line.startswith("|")):
        yield f"row {at} {line.split('|')[1].strip()[:60]}", digest({"row": line})
