"""SLURM's own programs, installed from the distribution's packages and started here, with `srun` as the launcher."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from longctx.launch.slurm import first_host, join_step, read_step
from tests.reference import train_reference
from tests.slurm import cluster, why_no_slurm
from tests.test_hosts import ENVIRONMENT, LENGTHS
from tests.test_training import COMMON, LEARNING_RATE, STEPS, check, make_documents, write_jsonl

needs_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))
ROOT = Path(__file__).parents[1]
LONGCTX = [sys.executable, "-m", "longctx"]
TASK = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "localhost,n[1-2]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "3",
}
"""What srun tells one of five tasks on three nodes."""


# What a task is told


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("hosta,hostb", "hosta"),
        ("node[1-3]", "node1"),
        ("rack[2,4-5]n[007-012]-ib,login", "rack2n007-ib"),
        ("gpu-a100-[08,10]", "gpu-a100-08"),
        ("10.0.0.7", "10.0.0.7"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_a_task_is_a_rank():
    env = dict(TASK)
    join_step(env)
    named = {name: value for name, value in env.items() if not name.startswith("SLURM_")}
    assert 12_000 <= int(named.pop("MASTER_PORT")) < 32_000
    assert named == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
    }


def test_ranks_of_a_node_are_neighbours_when_tasks_are_dealt_out_in_turn():
    dealt = [(node, local) for local in (0, 1) for node in range(3) if (node, local) != (2, 1)]  # --distribution cyclic
    places = {}
    for task, (node, local) in enumerate(dealt):
        told = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_PROCID": str(task)}
        places[read_step(TASK | told).rank] = node
    assert places == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}


def test_steps_have_ports_of_their_own():
    ports = {
        read_step(TASK | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(70_000, 70_190)
        for step in range(100)
    }
    assert len(ports) == 190 * 100
    assert read_step(TASK | {"SLURM_STEP_RESV_PORTS": "12001-12002"}).port == 12001


def test_what_the_user_and_the_launcher_in_a_task_say_stands():
    env = TASK | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    join_step(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["RANK"]) == ("127.0.0.1", "1234", "3")
    by_torchrun = TASK | {"RANK": "7", "WORLD_SIZE": "8"}
    assert join_step(by_torchrun) is None
    assert by_torchrun == TASK | {"RANK": "7", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    "told",
    [
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # the shell of salloc
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # sbatch's
        TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},  # alone in its step
    ],
    ids=["salloc", "sbatch", "alone"],
)
def test_what_is_no_task_is_no_rank(told):
    env = dict(told)
    join_step(env)
    assert env == told


# With SLURM


@pytest.fixture(scope="module")
def slurm():
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, cluster(Path(folder)) as started:
        yield started


@pytest.fixture
def training(models, tmp_path):
    """Flags of a run, and what one process makes of it."""
    documents = make_documents(LENGTHS)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    flags = [*COMMON, "--dataset_name", data, "--model_name_or_path", str(models["GQA 4:2"])]
    reference = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    return [*flags, "--output_dir", str(tmp_path / "out")], reference


def losses(folder):
    log = json.loads((folder / "out/trainer_state.json").read_text())["log_history"]
    return [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]


STEPS_OF_SRUN = {
    "2 tasks": (["--ntasks", "2"], ["--sp", "2", "--sp_backend", "ring"]),
    "4 tasks on 2 nodes": (
        ["--nodes", "2", "--ntasks-per-node", "2"],
        ["--sp", "4", "--sp_backend", "ulysses"],
    ),
    "4 tasks dealt out in turn": (
        ["--nodes", "2", "--ntasks", "4", "--distribution", "cyclic"],
        ["--sp", "4", "--sp_backend", "hybrid", "--ring_size", "2"],
    ),
    "3 and 1 tasks": (["--nodes", "2", "--ntasks", "4"], ["--sp", "4", "--sp_backend", "ring"]),
}


@needs_slurm
@pytest.mark.parametrize(
    "step",
    [pytest.param(name, marks=pytest.mark.long if number > 1 else ()) for number, name in enumerate(STEPS_OF_SRUN)],
)
def test_tasks_of_srun_equal_one_process(step, slurm, training, tmp_path, parity_table):
    placed, layout = STEPS_OF_SRUN[step]
    flags, reference = training
    done = slurm.run(["srun", *placed, *LONGCTX, "train", *flags, *layout], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    check(losses(tmp_path), reference, f"{layout[3]} sp {layout[1]}, packed", f"srun, {step}", parity_table)
