"""The `longctx` command does what its modules do, and loads nothing but the one that is asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import longctx
from longctx.__main__ import COMMANDS, main
from longctx.settings.read import OTHER_METHODS, POINTER

ROOT = Path(__file__).parents[1]


def test_the_command_line_that_names_no_command(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"longctx {longctx.__version__}\n"
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert re.findall(r"^  (\w+) ", listed, re.MULTILINE) == list(COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().err == listed
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == f"longctx: error: trian is not a command. Did you mean train?\n{listed}"
    for method in OTHER_METHODS:
        assert main([method, "--beta", "0.1"]) == 2
        assert capsys.readouterr().err == f"longctx: error: {method} is not a command: {POINTER}.\n"


@pytest.mark.parametrize(
    "arguments",
    [["-h"], *([name, "-h"] for name in COMMANDS), ["train", "--max_step", "5"], ["verify", "--jsn"]],
    ids=" ".join,
)
def test_help_and_mistyped_flags_load_no_library(arguments):
    script = f"""import atexit, sys; from longctx.__main__ import main
atexit.register(lambda: print({{'torch', 'numpy', 'transformers', 'trl'}} & set(sys.modules))); main({arguments})"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.endswith("set()\n")
    assert "usage" in done.stdout or "Did you mean" in done.stderr


def outcome(run, arguments, capsys):
    """(exit code, stdout, stderr) of a main function."""
    try:
        code = run(arguments)
    except SystemExit as left:
        code = left.code
    return (code, *capsys.readouterr())


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "--no_such_flag"])
def test_a_command_is_its_module(name, flag, capsys):
    of_the_module = outcome(import_module(COMMANDS[name].module).main, [flag], capsys)
    assert outcome(main, [name, flag], capsys) == of_the_module
    assert of_the_module[0] == (0 if flag == "--help" else 2)
    said = of_the_module[2]
    assert flag == "--help" or "no_such_flag" in said or "arguments are required" in said


def run_command(arguments, folder, *, program=(sys.executable, "-m", "longctx")):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*program, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=580)


@pytest.mark.long
def test_training_started_by_the_command_starts_its_own_processes(tmp_path):
    flags = ["--sp", "2", "--max_length", "256", "--max_steps", "2", "--per_device_train_batch_size", "1"]
    done = run_command(["train", *flags, "--report_to", "none", "--save_strategy", "no"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"step 1 matched one device to [0-9]e-0?[6-9]", done.stdout), done.stdout


@pytest.mark.long
def test_a_profile_by_name_starts_accelerate(tmp_path):
    flags = ["--accelerate_config", "context_parallel_2gpu", "--max_length", "256", "--dry_run", "--explain"]
    done = run_command(["train", *flags], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sp 2 (ring 2 × ulysses 1)" in done.stdout


PLAN = ["--model_name_or_path", "tiny", "--gpus", "1", "--lengths", "4096"]


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [["longctx", "--version"], ["longctx", "completion", "bash"], ["longctx", "plan", *PLAN], ["longctx.plan", *PLAN]],
    ids=lambda command: " ".join(command[:2]),
)
def test_output_that_nobody_reads_ends_a_command_quietly(command):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", *command], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + 13, b"")
