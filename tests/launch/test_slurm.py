"""SLURM's own programs, installed from the distribution's packages and started here, with `srun` as the launcher."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from longctx.launch.accelerate import relaunch
from longctx.launch.slurm import first_host, join_step, read_step
from longctx.settings.read import parse_flags
from tests.hosts import wait_until
from tests.launch.test_hosts import ENVIRONMENT, LENGTHS
from tests.reference import train_reference
from tests.slurm import cluster, why_no_slurm
from tests.training.test_training import COMMON, LEARNING_RATE, STEPS, check, make_documents, write_jsonl

needs_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))
ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize(("flags", "processes"), [([], "64"), (["--num_processes", "8"], "8")], ids=["", "given"])
def test_a_profile_on_more_nodes_has_as_many_processes_on_each(flags, processes):
    """multi_node has 16 on two machines. accelerate would divide them by the nodes of the job."""
    eight = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}
    with patch.dict(os.environ, TASK | eight), patch.object(os, "execv") as execv:
        settings = parse_flags(["--accelerate_config", "multi_node", *flags])
        relaunch(settings, settings.arguments, is_launched=False)
    launcher = execv.call_args.args[1]
    given = dict(itertools.pairwise(launcher))
    assert (given["--num_machines"], given["--num_processes"]) == ("8", processes)


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
        places[int(read_step(TASK | told)["RANK"])] = node
    assert places == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}


def test_steps_have_ports_of_their_own():
    ports = {
        read_step(TASK | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"]
        for job in range(70_000, 70_190)
        for step in range(100)
    }
    assert len(ports) == 190 * 100
    assert read_step(TASK | {"SLURM_STEP_RESV_PORTS": "12001-12002"})["MASTER_PORT"] == "12001"


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
    "4 tasks on 2 nodes": (["--nodes", "2", "--ntasks-per-node", "2"], ["--sp", "4", "--sp_backend", "ulysses"]),
    "4 tasks dealt out in turn": (
        ["--nodes", "2", "--ntasks", "4", "--distribution", "cyclic"],
        ["--sp", "4", "--sp_backend", "hybrid", "--ring_size", "2"],
    ),
    "3 and 1 tasks": (["--nodes", "2", "--ntasks", "4"], ["--sp", "4", "--sp_backend", "ring"]),
}


@pytest.mark.long
@needs_slurm
@pytest.mark.parametrize("step", STEPS_OF_SRUN)
def test_tasks_of_srun_equal_one_process(step, slurm, training, tmp_path, parity_table):
    placed, layout = STEPS_OF_SRUN[step]
    flags, reference = training
    done = slurm.run(["srun", *placed, *LONGCTX, "train", *flags, *layout], cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    check(losses(tmp_path), reference, f"{layout[3]} sp {layout[1]}, packed", f"srun, {step}", parity_table)


@needs_slurm
@pytest.mark.long
def test_torchrun_in_tasks_of_srun_equals_one_process(slurm, training, tmp_path, parity_table):
    flags, reference = training
    step = ["srun", "--nodes", "2", "--ntasks-per-node", "1", sys.executable, "-m", "torch.distributed.run"]
    step += ["--nnodes", "2", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_id", "7"]
    step += ["--rdzv_endpoint", "hosta:29500", "-m", "longctx.train", *flags, "--sp", "4", "--sp_backend", "ring"]
    done = slurm.run(step, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    check(losses(tmp_path), reference, "ring sp 4, packed", "torchrun in srun", parity_table)


@needs_slurm
@pytest.mark.long
def test_a_killed_task_ends_the_others_and_is_named(slurm, training, tmp_path):
    """On the other node, with a checkpoint to go on from; within the 30 s of docs/howto/checkpoints.md."""
    flags, _ = training
    step = ["srun", "--nodes", "2", "--ntasks-per-node", "1", sys.executable, "-m", "tests.faulty_train", *flags]
    step += ["--sp", "2", "--sp_backend", "ring", "--save_strategy", "steps", "--save_steps", "2"]
    done = slurm.run(step, cwd=tmp_path, env=ENVIRONMENT | {"FAULT": "kill 1 3"})
    ended = time.time()
    assert done.returncode not in (0, 75), done.stdout
    assert ended - float(re.search(r"FAULT at ([\d.]+)", done.stdout)[1]) < 30
    (error,) = [line for line in done.stdout.splitlines() if "longctx: error: " in line]
    assert re.search(r"rank 1 .*has died.*auto goes on from .*checkpoint-2", error), done.stdout


# Jobs of sbatch


@pytest.fixture
def submit(slurm, tmp_path):
    """Put a script of examples/slurm/ into the queue as it stands: (options of sbatch, flags) -> the job's number.
    `longctx` is the code here."""
    command = tmp_path / "bin" / "longctx"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m longctx "$@"\n')
    command.chmod(0o755)
    environment = ENVIRONMENT | {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    jobs = []

    def put(script, options, flags):
        words = ["sbatch", "--parsable", *options, str(ROOT / "examples/slurm" / script), *flags]
        done = slurm.run(words, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout
        jobs.append(done.stdout.strip())
        return jobs[-1]

    yield put
    for job in jobs:
        slurm.run(["scancel", job], cwd=tmp_path)


def told(slurm, job):
    """What scontrol says of a job, by name."""
    done = slurm.run(["scontrol", "--oneliner", "show", "job", job], cwd=slurm.folder)
    return dict(re.findall(r"(\w+)=(\S*)", done.stdout))


def wait_for_queue(slurm, job, restarts, seconds=200):
    """Wait until the job is in the queue again, `restarts` times in all, and have it begin before SLURM's two minutes.

    SLURM revokes the credential of a job that begins in the second in which it was requeued, so it begins 2 s later.
    """
    expected = {"JobState": "PENDING", "Restarts": str(restarts)}
    wait_until(lambda: expected.items() <= told(slurm, job).items(), f"restart {restarts} of {job}", seconds)
    slurm.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2"], cwd=slurm.folder)


def newest_checkpoint(folder):
    return max((int(path.name.removeprefix("checkpoint-")) for path in folder.glob("out/checkpoint-*[0-9]")), default=0)


@needs_slurm
@pytest.mark.long
def test_a_job_goes_on_after_a_signal_and_after_it_was_put_back(slurm, submit, models, tmp_path, parity_table):
    """one_node.sbatch: a signal has it save, leave with 75 and queue again; `scontrol requeue` from outside does, too.
    Its losses are those of a process that was never stopped."""
    documents, steps, rate = make_documents(LENGTHS), 60, 1e-4
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    flags = [*COMMON, "--sp", "2", "--sp_backend", "ring", "--max_steps", str(steps), "--learning_rate", str(rate)]
    flags += ["--dataset_name", data, "--model_name_or_path", str(models["GQA 4:2"]), "--output_dir", "out"]
    flags += ["--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2"]
    job = submit("one_node.sbatch", ["--ntasks-per-node", "2", "--cpus-per-task", "1"], flags)
    log = tmp_path / f"slurm-{job}.out"

    wait_until(lambda: newest_checkpoint(tmp_path) >= 2, "checkpoint-2", 300)
    slurm.run(["scancel", "--signal=TERM", job], cwd=tmp_path)
    wait_for_queue(slurm, job, 1)
    first = newest_checkpoint(tmp_path)
    assert f"stopped by SIGTERM after step {first}, whose checkpoint is in out" in log.read_text()

    wait_until(lambda: newest_checkpoint(tmp_path) >= first + 2, f"checkpoint-{first + 2}", 300)
    slurm.run(["scontrol", "requeue", job], cwd=tmp_path)
    wait_for_queue(slurm, job, 2)
    second = newest_checkpoint(tmp_path)
    assert first < second < steps

    wait_until(lambda: told(slurm, job)["JobState"] not in ("PENDING", "RUNNING"), "the job's end", 300)
    printed = log.read_text()
    assert told(slurm, job)["JobState"] == "COMPLETED", printed
    assert re.findall(r"resume    from out/checkpoint-(\d+)", printed) == [str(first), str(second)]
    reference = train_reference(models["GQA 4:2"], documents, steps=steps, learning_rate=rate)
    check(losses(tmp_path), reference, "ring sp 2, packed, stopped twice", "one_node.sbatch", parity_table)


@needs_slurm
@pytest.mark.long
def test_a_job_that_is_warned_of_its_time_limit_saves_and_goes_on(slurm, submit, models, tmp_path):
    """several_nodes.sbatch with another signal, three minutes after its start, or up to one before."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    flags = [*COMMON, "--sp", "2", "--sp_backend", "ring", "--max_steps", "1000000", "--dataset_name", data]
    flags += ["--model_name_or_path", str(models["GQA 4:2"]), "--output_dir", "out"]
    options = ["--ntasks-per-node", "1", "--cpus-per-task", "1", "--time", "10", "--signal", "USR1@420"]
    job = submit("several_nodes.sbatch", options, flags)
    wait_for_queue(slurm, job, 1, seconds=400)
    step, log = newest_checkpoint(tmp_path), tmp_path / f"slurm-{job}.out"
    assert f"stopped by SIGUSR1 after step {step}, whose checkpoint is in out" in log.read_text()
    wait_until(lambda: f"resume    from out/checkpoint-{step}" in log.read_text(), "the run that goes on", 300)


@needs_slurm
@pytest.mark.long
def test_a_profile_on_nodes_of_a_job_equals_one_process(slurm, submit, training, tmp_path, parity_table):
    """accelerate_profile.sbatch, with `accelerate launch` in a task of each node."""
    flags, reference = training
    profile = (ROOT / "configs/multi_node.yaml").read_text().replace("num_processes: 16", "num_processes: 4")
    (tmp_path / "profile.yaml").write_text(profile)
    flags = ["profile.yaml", *flags, "--sp", "4", "--sp_backend", "hybrid", "--ring_size", "2"]
    job = submit("accelerate_profile.sbatch", ["--cpus-per-task", "2"], flags)
    wait_until(lambda: told(slurm, job)["JobState"] not in ("PENDING", "RUNNING"), "the job's end", 300)
    assert told(slurm, job)["JobState"] == "COMPLETED", (tmp_path / f"slurm-{job}.out").read_text()
    check(losses(tmp_path), reference, "hybrid sp 4, packed", "accelerate_profile.sbatch", parity_table)
