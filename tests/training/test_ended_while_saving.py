"""Runs that end while they save, by a kill at every file they touch and by a disk that is full at every size: what was
whole before is found, and the run that goes on from it is the one that was never ended.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from longctx.training.checkpoint import saving
from longctx.training.checkpoint.files import check_files, read_manifest
from longctx.training.checkpoint.folder import checkpoint_of, checkpoints
from longctx.training.trainer import SequenceTrainer
from tests.training.test_training import COMMON, log_of, make_documents, write_jsonl

LENGTHS = [90, 7, 41, 130, 64, 2, 33, 17, 88, 120]
TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
"""Audit events (sys.addaudithook) that come right before something is done with a file; its first argument says which.
What is opened a second time, to be flushed to the disk, has been written."""


def train(arguments, output_dir, log, kill_at, file_bytes):
    """In a process of its own; ends by SIGKILL right before the `kill_at`-th time that it touches a file there. Files
    may grow to `file_bytes`."""
    from longctx.train import main

    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    touched = 0

    def watch(event, details):
        nonlocal touched
        if event in TOUCHES and str(details[0]).startswith(f"{output_dir}/"):
            touched += 1
            if touched == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if kill_at:
        sys.addaudithook(watch)
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    sys.exit(main(arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`train` in a process forked after the imports: (exit code, what was printed, which is on no disk that fills)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["longctx.run", "peft", "tests.training.test_ended_while_saving"])

    log = tmp_path_factory.mktemp("printed") / "log"

    def start(flags, output_dir, kill_at=0, file_bytes=0):
        log.unlink(missing_ok=True)
        arguments = [*flags, "--output_dir", str(output_dir)]
        process = context.Process(target=train, args=(arguments, str(output_dir), str(log), kill_at, file_bytes))
        process.start()
        process.join(300)
        return process.exitcode, log.read_text()

    return start


@pytest.fixture(scope="module")
def before(run, models, tmp_path_factory):
    """(flags, folder with checkpoint-2 alone, final weights) of a run with checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("before")
    data = write_jsonl(folder / "data.jsonl", make_documents(LENGTHS))
    flags = [*COMMON, "--model_name_or_path", models["GQA 4:2"], "--dataset_name", data, "--max_length", "160"]
    flags += ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "1"]
    flags += ["--resume_from_checkpoint", "auto", "--use_cpu"]
    assert run([*flags, "--save_total_limit", "3"], folder / "out")[0] == 0
    expected = load_file(folder / "out" / "model.safetensors")
    (folder / "one").mkdir()
    shutil.move(folder / "out" / "checkpoint-2", folder / "one" / "checkpoint-2")
    return flags, folder / "one", expected


def newest(output_dir):
    """What `auto` goes on from; whole."""
    folder = checkpoint_of("auto", output_dir)
    check_files(folder, read_manifest(folder))
    return folder.name


def test_training_goes_on_while_a_checkpoint_is_written(before, tmp_path, monkeypatch):
    """The write waits until a step after the one that it saves has been logged, and holds what was there before it."""
    flags, folder, expected = before
    logged, waited = {}, []
    gathered, log = saving.gathered_on_first, SequenceTrainer.log

    def gathered_later(write, channel):
        step = 2 * len(waited) + 2
        waited.append(step == 4 or logged.setdefault(step + 1, threading.Event()).wait(60))
        return gathered(write, channel)

    def log_and_tell(trainer, logs, start_time=None):
        log(trainer, logs, start_time)
        logged.setdefault(trainer.state.global_step, threading.Event()).set()

    monkeypatch.setattr(saving, "gathered_on_first", gathered_later)
    monkeypatch.setattr(SequenceTrainer, "log", log_and_tell)
    more = ["--save_total_limit", "3", "--save_async", "True"]
    log_of([*flags, *more, "--output_dir", str(tmp_path / "out")])
    assert waited == [True, True]
    check_weights(tmp_path / "out", expected)
    for name in ("model.safetensors", "states-00000-000.safetensors", "random-00000.json", "index.json"):
        assert (tmp_path / "out/checkpoint-2" / name).read_bytes() == (folder / "checkpoint-2" / name).read_bytes()


@pytest.mark.long
def test_training_ends_once_the_last_checkpoint_is_there(before, tmp_path, monkeypatch):
    """It may hold the best model, and the Trainer deletes the others at the end."""
    flags, _, _ = before
    place = saving.take_place

    def take_place(unfinished, target):
        time.sleep(1.5)
        place(unfinished, target)

    monkeypatch.setattr(saving, "take_place", take_place)
    flags = [*flags, "--save_async", "True", "--eval_strategy", "steps", "--eval_steps", "2", "--dataset_test_split"]
    flags += ["train", "--metric_for_best_model", "loss", "--load_best_model_at_end", "True"]
    log_of([*flags, "--output_dir", str(tmp_path / "out")])
    assert newest(tmp_path / "out") == "checkpoint-4"
    assert (tmp_path / "out" / "model.safetensors").exists()


def check_weights(output_dir, expected):
    found = load_file(output_dir / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("every", "later"),
    [
        pytest.param(30, [], id="some, at once"),
        *(pytest.param(1, later, marks=pytest.mark.long) for later in ([], ["--save_async", "True"])),
    ],
)
def test_a_kill_at_any_file_leaves_a_whole_checkpoint(every, later, run, before, tmp_path):
    """Up to the end of the run, with one checkpoint to be kept: the old one goes when the new one is there."""
    flags, folder, expected = before
    flags = [*flags, *later]
    found, output = [], tmp_path / "out"
    for kill_at in range(every, 1000, every):
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(folder, output)
        code, printed = run(flags, output, kill_at)
        found.append(newest(output))
        if code == 0:
            break
        assert code == -signal.SIGKILL, printed
        if every == 1:
            code, printed = run(flags, output)
            assert code == 0, printed
            assert f"from {output}/{found[-1]}" in printed or f"{output} has finished 4 steps of 4" in printed
            assert newest(output) == "checkpoint-4"
            assert not list(output.glob("*.partial"))
            check_weights(output, expected)
    assert code == 0
    assert later or sorted(found) == found, "the two threads touch files in any order"
    assert set(found) == {"checkpoint-2", "checkpoint-4"}
    check_weights(output, expected)


def check_said(printed, output_dir, last):
    (line,) = [text for text in printed.splitlines() if "could not be written" in text]
    assert f"{output_dir}/{last} is complete" in line
    assert "Traceback" not in printed
    assert not list(output_dir.glob("*.partial"))


@pytest.mark.parametrize("later", [[], ["--save_async", "True"]], ids=["at once", "later"])
def test_a_file_that_is_too_large_leaves_the_checkpoint_and_says_so(later, run, before, tmp_path):
    """As with a quota: the model fits, and the optimizer's states do not."""
    flags, folder, _ = before
    flags = [*flags, *later]
    shutil.copytree(folder, tmp_path / "out")
    largest = max(path.stat().st_size for path in folder.rglob("*.safetensors"))
    code, printed = run(flags, tmp_path / "out", file_bytes=largest - 1)
    assert code == 1
    assert f"{tmp_path}/out/checkpoint-4 could not be written" in printed
    check_said(printed, tmp_path / "out", newest(tmp_path / "out"))


@pytest.fixture
def disk(tmp_path):
    """size in bytes -> an empty folder on a file system of no more."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size):
        subprocess.run(["umount", str(folder)], capture_output=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file systems can be mounted by root alone")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.parametrize("parts", [2, pytest.param(24, marks=pytest.mark.long)])
def test_a_disk_full_at_any_size_leaves_the_checkpoint_and_says_so(parts, run, before, disk, tmp_path):
    """From no room at all to room for everything."""
    flags, folder, expected = before
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    codes = []
    for part in range(parts + 1):
        output = disk(int(size * (1.1 + 2.2 * part / parts))) / "out"
        shutil.copytree(folder, output)
        code, printed = run(flags, output)
        codes.append(code)
        last = newest(output)
        if code:
            check_said(printed, output, last)
        else:
            check_weights(output, expected)
    assert codes[0] == 1
    assert codes[-1] == 0
    assert checkpoints(output)
