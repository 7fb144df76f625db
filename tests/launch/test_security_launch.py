"""Other users of the machine, and the folder that a run is started in: see docs/security.md."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from torch.distributed import TCPStore

from longctx.launch.network import choose_interface
from longctx.launch.store import meeting_point, private_folder, store_file
from longctx.launch.terminal import tell
from longctx.untrusted.working_directory import leave_out_of_imports
from tests.launch.test_faults import OWN, RING, SAVING, check_killed, flags_of

ROOT = Path(__file__).parents[2]
SHADOWS = ["trl", "torch", "yaml", "psutil", "difflib", "accelerate", "tomllib"]


@pytest.fixture
def planted(tmp_path):
    return plant_modules(tmp_path)


def plant_modules(tmp_path):
    """A folder with Python files that are named like modules, and leave a marker where they are imported."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'a').write({name!r})\n")
    return folder


def listening(process: psutil.Process) -> set[str]:
    """Addresses that a process or one of its children listens on."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found |= {socket.laddr.ip for socket in each.net_connections("inet") if socket.status == "LISTEN"}
    return found


class Watched(NamedTuple):
    """A run that has ended."""

    code: int
    output: str
    seconds: float
    """From the death of a rank to its end."""
    addresses: set[str]
    """Where its processes listened."""
    modes: set[int]
    """Of its private folder."""
    left: list[Path]
    """What it has left in the folder of temporary files."""


def watched(command, cwd, tmp_path, *, checkpoint=None):
    """Run a command; rank 1 is killed once the checkpoint is there."""
    temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # sockets have short paths
    env = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    addresses, modes, killed = set(), set(), math.inf
    with (tmp_path / "log").open("w") as log:
        run = psutil.Popen(command, cwd=cwd, env=env, stdout=log, stderr=log)
        while run.poll() is None:
            addresses |= listening(run)
            for folder in temporary.glob("longctx-run-*"):
                with contextlib.suppress(FileNotFoundError):
                    modes.add(stat.S_IMODE(folder.stat().st_mode))
            if killed == math.inf and checkpoint is not None and checkpoint.exists():
                (rank,) = [process for process in run.children() if process.environ().get("RANK") == "1"]
                rank.kill()
                killed = time.monotonic()
            time.sleep(0.1)
    seconds, output = time.monotonic() - killed, (tmp_path / "log").read_text()
    left = list(temporary.glob("longctx-*"))
    shutil.rmtree(temporary)
    return Watched(run.returncode, output, seconds, addresses, modes, left)


@pytest.fixture(scope="module")
def killed(models, tmp_path_factory):
    """(a run whose rank 1 was killed, the marker of modules that it has imported from the folder it was started in).

    It has two ranks with a data loader worker each, and a thousand steps before it.
    """
    tmp_path = tmp_path_factory.mktemp("killed")
    command = [*OWN, "longctx.train", *flags_of(models, tmp_path), *RING, *SAVING, "--dataloader_num_workers", "1"]
    command += ["--max_steps", "1000"]
    run = watched(command, plant_modules(tmp_path), tmp_path, checkpoint=tmp_path / "out" / "checkpoint-2")
    return run, tmp_path / "marker"


def check_private(run, marker):
    assert run.addresses, "gloo listens"
    assert all(ipaddress.ip_address(address).is_loopback for address in run.addresses), run.addresses
    assert run.modes == {0o700}
    assert run.left == []
    assert not marker.exists(), marker.read_text()


@pytest.mark.long
def test_a_run_is_reached_from_nowhere_else_and_runs_nothing_of_its_folder(killed):
    check_private(*killed)


@pytest.mark.long
def test_a_killed_rank_ends_the_run_and_is_named(killed):
    run, _ = killed
    check_killed("ours", run.code, run.output, run.seconds, checkpoint=r"checkpoint-\d+")


@pytest.mark.long
def test_a_run_under_accelerate_is_reached_from_nowhere_else(planted, tmp_path):
    """`accelerate launch` without a config file starts one process, which starts the ranks."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a document of few words"}\n' * 20)
    flags = "--sp 2 --sp_backend ring --use_cpu True --max_steps 3 --max_length 64 --dataloader_num_workers 1"
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "-m", "longctx.train", *flags.split()]
    command += ["--output_dir", str(tmp_path / "out"), "--model_name_or_path", "tiny", "--dataset_name", str(data)]
    run = watched(command, planted, tmp_path)
    assert run.code == 0, run.output
    check_private(run, tmp_path / "marker")


def test_the_command_line_runs_nothing_of_its_folder(planted, tmp_path):
    done = subprocess.run([sys.executable, "-m", "longctx", "trian"], cwd=planted, capture_output=True, text=True)
    assert "Did you mean train?" in done.stderr  # by difflib
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(("module", "stays"), [("longctx.train", True), ("longctx", False)])
def test_the_working_directory_is_left_out_unless_it_is_a_checkout(module, stays, monkeypatch, tmp_path):
    """Of the search path, before anything else is imported, and of that of processes that it starts."""
    folder = ROOT if stays else tmp_path
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # so that it is taken away after the test
    monkeypatch.delenv("PYTHONSAFEPATH")
    monkeypatch.setattr(sys, "path", [str(folder), "/elsewhere"])
    monkeypatch.setattr(sys, "argv", ["-m", "--sp", "2"])
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", module, "--sp", "2"])
    leave_out_of_imports()
    assert sys.path == ([str(folder)] if stays else []) + ["/elsewhere"]
    assert os.environ.get("PYTHONSAFEPATH") == (None if stays else "1")


def test_the_interface_is_the_loopback_on_one_machine_unless_the_user_chose_one():
    alone = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    (name,) = [name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in {each.address for each in found}]
    loopback = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    ours = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}
    cases = [(alone, loopback), (alone | ours, ours), (alone | {"WORLD_SIZE": "8"} | ours, ours)]
    for env, expected in cases:
        env = dict(env)
        choose_interface(env)
        assert {name: value for name, value in env.items() if "IFNAME" in name} == expected


def _hold(pipe):
    with private_folder() as folder:
        pipe.send(str(folder))
        pipe.recv()  # it is killed here


def _be_rank(folder, pipe):
    atexit._clear()  # pytest's, which this process was forked from
    meeting_point(store_file(Path(folder)) | {"RANK": "0", "WORLD_SIZE": "1"})
    pipe.send(None)
    pipe.recv()
    atexit._run_exitfuncs()  # as Python does at the end of a process that multiprocessing has not made


@pytest.fixture
def held(tmp_path, monkeypatch):
    """A launcher that holds its folder, and the path of that."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    here, there = get_context("fork").Pipe()
    launcher = get_context("fork").Process(target=_hold, args=(there,))
    launcher.start()
    return launcher, here.recv()


def test_the_last_rank_of_a_killed_launcher_removes_the_folder(tmp_path, held):
    ranks, (launcher, folder) = [], held
    for _ in range(2):
        pipe, other = get_context("fork").Pipe()
        ranks.append((get_context("fork").Process(target=_be_rank, args=(folder, other)), pipe))
        ranks[-1][0].start()
        pipe.recv()
    launcher.kill()
    launcher.join()
    for number, (rank, pipe) in enumerate(ranks):
        pipe.send(None)
        rank.join()
        assert [str(path) for path in tmp_path.iterdir()] == [folder][number:]


def test_what_a_killed_launcher_leaves_goes_with_the_next_run(tmp_path, held):
    launcher, left = held[0], Path(held[1])
    with private_folder() as folder:
        assert sorted(tmp_path.iterdir()) == sorted([left, folder])  # a run that goes on keeps its folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    launcher.kill()
    launcher.join()
    assert list(tmp_path.iterdir()) == [left]
    with private_folder() as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_an_abandoned_folder_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "longctx-run-planted").symlink_to("kept")
    with private_folder() as folder:
        assert folder.name != "longctx-run-planted"
    assert (tmp_path / "kept" / "file").exists()


def test_ranks_that_torchrun_starts_again_meet_in_a_private_folder(tmp_path, monkeypatch):
    """Its agent keeps the keys of ranks that have ended, and its store listens on every interface."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    agents = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    restarted = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1", "WORLD_SIZE": "2"}
    restarted |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port)}
    points = [meeting_point({**restarted, "RANK": rank}) for rank in "01"]
    (folder,) = tmp_path.iterdir()
    assert points == [{"init_method": f"file://{folder}/store", "rank": rank, "world_size": 2} for rank in (0, 1)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_launcher_reads_whole_reports(tmp_path, monkeypatch):
    """torchrun's agent reads them at any moment, and ends in a JSONDecodeError of its own for half a report."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    tell("first", prints=False)
    with path.open() as opened:
        tell("second", prints=False)
        assert json.load(opened)["message"]["message"] == "first"
    assert json.loads(path.read_text())["message"]["message"] == "second"
    assert [file.name for file in tmp_path.iterdir()] == ["error.json"]
