"""The states of an output folder: where a run may start, goes on, or is refused with the flags that it can take."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.train import main
from longctx.training.checkpoint.folder import RunRecord, begin, checkpoints, default_folder, launch_of
from longctx.training.exactness import Exactness
from tests.training.test_checkpoint import LENGTHS, flags
from tests.training.test_training import make_documents, write_jsonl

BOTH_REMEDIES = "--resume_from_checkpoint auto, delete it with --overwrite_output_dir True, or name another folder"
AUTO = ("--resume_from_checkpoint", "auto")
OVERWRITE = ("--overwrite_output_dir", "True")


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory):
    """(flags without --output_dir, output_dir) of a run of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_jsonl(folder / "data.jsonl", make_documents(LENGTHS))
    *given, _, output = flags(models, data, folder / "out")
    given += ["--max_steps", "2", "--save_steps", "1"]
    assert main([*given, "--output_dir", output]) == 0
    return given, Path(output)


@pytest.fixture
def trained_here(trained, tmp_path):
    """The same with a copy of its folder, to be changed: (flags, output_dir, the copy)."""
    return *trained, Path(shutil.copytree(trained[1], tmp_path / "out"))


def _only(*names):
    def leave(folder):
        for path in folder.iterdir():
            if path.name not in names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return leave


def _partial(folder):
    _only("checkpoint-2")(folder)
    (folder / "checkpoint-2").rename(folder / "checkpoint-2.partial")


def _weights_only(folder):
    for path in (folder / "checkpoint-2").iterdir():
        if path.name.startswith(("states-", "random-", "longctx", "index")):
            path.unlink()


def _alive(**values):
    def change(folder):
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(record | {"pid": os.getppid(), "host": "elsewhere"} | values))

    return change


def _stamped_long_ago(folder):
    _alive()(folder)
    os.utime(folder / "run.json", (0, 0))


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (_only(), (), ""),
        (_only("run.json", "exactness.json"), (), ""),
        (_partial, (), f"holds an earlier run (checkpoint-2.partial). Go on from it with {BOTH_REMEDIES}"),
        (_partial, AUTO, ""),
        (_only("checkpoint-1"), (), "holds an earlier run (checkpoint-1)"),
        (_only("checkpoint-1", "run.json"), AUTO, ""),
        (_only("run.json", "run_report.html", "exactness.json"), (), ""),
        (_only("trainer_state.json"), (), "holds an earlier run (trainer_state.json)"),
        (_only("model.safetensors"), AUTO, "holds a model (model.safetensors) and no checkpoint to go on from"),
        (_weights_only, (), "holds an earlier run"),
        (_weights_only, AUTO, "--model_name_or_path {out}/checkpoint-2 and another --output_dir"),
        (_alive(), (), "another run writes there"),
        (_alive(), AUTO, "another run writes there"),
        (_alive(), OVERWRITE, "another run writes there"),
        (_stamped_long_ago, AUTO, ""),
        (_alive(host=socket.gethostname(), pid=2**22 + 1), AUTO, ""),
        (_only("checkpoint-1"), (*AUTO, *OVERWRITE), "Leave one of them out"),
        (_only("checkpoint-1"), OVERWRITE, ""),
        (lambda folder: (folder / "run.json").write_text("[1"), (), "run.json is damaged"),
    ],
)
def test_a_run_starts_goes_on_or_is_refused(change, more, message, trained_here, capsys):
    given, _, output = trained_here
    change(output)
    before = sorted(output.rglob("*"))
    code = main([*given, "--output_dir", str(output), *more, "--dry_run", "True"])
    assert code == (2 if message else 0)
    assert message.format(out=output) in capsys.readouterr().err
    assert sorted(output.rglob("*")) == before


@pytest.mark.parametrize(
    ("output", "message"),
    [("model", "is what"), (".", "contains what"), ("model/out", "lies in what"), ("link", "is what")],
)
def test_what_a_run_reads_is_not_written_over(output, message, trained, models, tmp_path, capsys):
    given, _ = trained
    shutil.copytree(models["GQA 4:2"], tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    given = [*given, "--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / output)]
    assert main([*given, *OVERWRITE]) == 2
    assert f"{message} --model_name_or_path" in capsys.readouterr().err


def test_overwriting_deletes_the_run_alone_and_leaves_no_file_of_its_model(trained_here, capsys):
    given, whole, output = trained_here
    (output / "notes.md").write_text("mine")
    (output / "adapter_config.json").write_text("{}")
    Exactness.of_step((1.0, 1.0), (1.0, 1.0), bf16=False).write(output)
    assert main([*given, "--output_dir", str(output), *OVERWRITE, "--max_steps", "1"]) == 0
    printed = capsys.readouterr().out
    [deleted] = re.findall("--overwrite_output_dir: deleted (README.md, adapter_config.json, .*) in", printed)
    assert "exactness.json" in deleted
    assert [path.name for path in checkpoints(output)] == ["checkpoint-1"]
    assert Exactness.read(output).compared is False
    assert (output / "notes.md").read_text() == "mine"
    assert RunRecord.read(output).id != RunRecord.read(whole).id
    (output / "adapter_config.json").write_text("{}")  # of somebody else, while the run trains
    assert main([*given, "--output_dir", str(output), *AUTO]) == 0
    assert not (output / "adapter_config.json").exists()


def test_the_newest_checkpoint_is_the_one_written_last(trained_here):
    """A run that was begun again at an earlier step writes checkpoints that are newer than those of later steps."""
    given, _, output = trained_here
    again = ["--resume_from_checkpoint", str(output / "checkpoint-1"), "--save_steps", "3", "--max_steps", "3"]
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2", "checkpoint-1"]
    assert main([*given, "--output_dir", str(output), *again]) == 0
    shutil.move(output / "checkpoint-2", output / "checkpoint-7")
    assert [path.name for path in checkpoints(output)] == ["checkpoint-3", "checkpoint-7", "checkpoint-1"]


def test_a_finished_run_without_a_checkpoint_is_not_made_longer(trained, tmp_path, capsys):
    given, whole = trained
    output = Path(shutil.copytree(whole, tmp_path / "out", ignore=shutil.ignore_patterns("checkpoint-*")))
    assert main([*given, "--output_dir", str(output), *AUTO]) == 0
    assert main([*given, "--output_dir", str(output), *AUTO, "--max_steps", "3"]) == 2
    assert "2 steps and no checkpoint from which the 3 asked for could be reached" in capsys.readouterr().err


def test_a_run_without_a_folder_takes_the_next_free_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_folder(resuming=False) == default_folder(resuming=True) == Path("longctx-output")
    begin(Path("longctx-output"), overwrite=False, timeout=1800, env={})
    Path("longctx-output-2").mkdir()
    assert default_folder(resuming=False) == Path("longctx-output-2")
    assert default_folder(resuming=True) == Path("longctx-output")


@pytest.mark.long
def test_a_killed_run_is_not_alive_before_its_parent_asks(tmp_path):
    program = "import sys; from pathlib import Path; from longctx.training.checkpoint.folder import begin\n"
    program += "begin(Path(sys.argv[1]), overwrite=False, timeout=1800, env={}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdin=-1, stdout=-1) as run:
        run.stdout.readline()
        assert RunRecord.read(tmp_path).is_alive(tmp_path, 1800)
        run.kill()
        os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
        assert not RunRecord.read(tmp_path).is_alive(tmp_path, 1800)


def test_of_two_runs_that_start_at_once_the_second_is_refused(tmp_path):
    begin(tmp_path, overwrite=False, timeout=1800, env={})
    _alive()(tmp_path)
    with pytest.raises(ValueError, match="another run writes there"):
        begin(tmp_path, overwrite=True, timeout=1800, env={})


def test_a_restarted_attempt_goes_on_and_deletes_nothing(trained_here, monkeypatch, capsys):
    """It has the command line of the first attempt, of which nothing says that it goes on."""
    given, _, output = trained_here
    record = json.loads((output / "run.json").read_text())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    _alive(launch=launch_of(os.environ))(output)  # on a node that torchrun has left behind
    given = [*given, "--output_dir", str(output)]
    assert main(given) == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main([*given, *OVERWRITE, "--max_steps", "3"]) == 0
    assert f"resume    from {output}/checkpoint-2" in capsys.readouterr().out
    (output / "run.json").write_text(json.dumps(record | {"launch": "another"}))
    assert main(given) == 2


def test_flags_win_over_a_checkpoint_and_its_best_model_is_of_its_run(trained_here):
    given, _, output = trained_here
    more = ["--resume_from_checkpoint", str(output / "checkpoint-1"), "--save_steps", "5", "--max_steps", "5"]
    assert main([*given, "--output_dir", str(output), *more]) == 0
    assert [path.name for path in checkpoints(output)] == ["checkpoint-5", "checkpoint-2", "checkpoint-1"]
    assert json.loads((output / "trainer_state.json").read_text())["save_steps"] == 5


@pytest.mark.long
def test_a_folder_that_a_live_run_writes_to_is_refused(trained, tmp_path, capsys):
    given, _ = trained
    given = [*given, "--output_dir", str(tmp_path / "out"), "--max_steps", "100000", "--save_steps", "100000"]
    command = [sys.executable, "-m", "longctx.train", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        next(line for line in run.stdout if line.startswith("     1/"))
        assert main(given) == 2
        run.kill()
    assert f"another run writes there (process {run.pid} on {socket.gethostname()}" in capsys.readouterr().err
    assert main([*given, *AUTO, "--max_steps", "1"]) == 0
