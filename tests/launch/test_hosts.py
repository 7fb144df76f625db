"""Training over two hosts: namespaces of this machine, each with an address and a name, joined by a cable."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from longctx.training.checkpoint.files import check_files, read_manifest
from tests.hosts import serve_ssh, two_hosts, wait_until, why_no_hosts, why_no_ssh
from tests.reference import train_reference
from tests.training.test_training import COMMON, LEARNING_RATE, STEPS, check, make_documents, write_jsonl

LENGTHS = [90, 7, 41, 1, 130, 64, 2, 33, 17, 88]
SAVING = ["--save_strategy", "steps", "--save_steps", "2", "--save_on_each_node", "True"]
LAYOUTS = {
    "ring": ["--sp_backend", "ring", *SAVING],
    "hybrid": ["--sp_backend", "hybrid", "--ring_size", "2"],
    "ulysses": ["--sp_backend", "ulysses"],
}
"""Of sp 4: two ranks on each host. Hybrid's ring is between the hosts, its Ulysses groups are within them. What runs on
DeepSpeed stands last: FSDP2 cannot follow in the same process."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))


@contextmanager
def started(hosts, commands, folder, **environment):
    """Popen of each host's command, all at once; what still runs at the end is killed."""
    environment = ENVIRONMENT | environment
    logs = [(folder / f"{host.name}.log").open("w+") for host in hosts]
    running = [
        host.start(command, cwd=folder, env=environment, stdout=log, stderr=log)
        for host, command, log in zip(hosts, commands, logs, strict=True)
    ]
    try:
        yield running
    finally:
        for process, log in zip(running, logs, strict=True):
            process.kill()
            process.wait()
            log.close()


def run(hosts, commands, folder, timeout=500, **environment):
    """Exit codes and outputs, by host."""
    with started(hosts, commands, folder, **environment) as running:
        codes = [process.wait(timeout) for process in running]
    return codes, [(folder / f"{host.name}.log").read_text() for host in hosts]


def torchrun(hosts, *arguments, per_host=2, **options):
    """The same command on every host."""
    flags = {"nnodes": len(hosts), "nproc_per_node": per_host, "rdzv_backend": "c10d", "rdzv_id": "test"}
    flags |= {"rdzv_endpoint": f"{hosts[0].name}:29500"} | options
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    return [[*command, *arguments]] * len(hosts)


def make_cases(models, tmp_path, layouts=LAYOUTS, heads="GQA 4:2", sp=4):
    """A JSON file of cases, and what one process makes of them."""
    documents = make_documents(LENGTHS)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*COMMON, "--sp", str(sp), "--dataset_name", data, "--model_name_or_path", str(models[heads])]
    cases = {name: [*common, *flags, "--output_dir", str(tmp_path / name)] for name, flags in layouts.items()}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    return train_reference(models[heads], documents, steps=STEPS, learning_rate=LEARNING_RATE)


def check_cases(folder, reference, start, parity_table, layouts=LAYOUTS, sp=4):
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == set(layouts)
    for case, result in results.items():
        check(result, reference, f"{case} sp {sp}, packed, on two hosts", start, parity_table)


MEETING = """
import os
import torch
import torch.distributed as dist
from longctx.launch.network import choose_interface

choose_interface(os.environ)
dist.init_process_group("gloo")
ranks = torch.tensor(dist.get_rank())
dist.all_reduce(ranks)
print("sum of ranks", int(ranks))
dist.barrier()
dist.destroy_process_group()  # threads of gloo that still run would abort the process at its end
"""


@pytest.mark.long
def test_ranks_of_two_hosts_meet_where_their_names_are_of_the_loopback(tmp_path):
    (tmp_path / "meeting.py").write_text(MEETING)
    with two_hosts(tmp_path, own_name="127.0.1.1") as hosts:
        codes, outputs = run(hosts, torchrun(hosts, "meeting.py", per_host=1), tmp_path, timeout=60)
    assert codes == [0, 0], outputs
    assert all("sum of ranks 1" in output for output in outputs), outputs


@pytest.mark.long
@pytest.mark.parametrize(
    ("own_name", "layouts", "per_host"),
    [
        pytest.param("", LAYOUTS, 2, id="every layout"),
        pytest.param("127.0.1.1", {"hybrid": [*LAYOUTS["hybrid"], *SAVING]}, 2, id="127.0.1.1"),
        pytest.param("127.0.1.1", {"ring": LAYOUTS["ring"]}, 1, id="127.0.1.1, a rank on each"),
    ],
)
def test_two_hosts_equal_one_process(own_name, layouts, per_host, models, tmp_path, parity_table):
    reference = make_cases(models, tmp_path, layouts, sp=2 * per_host)
    train = ("-m", "tests.train_cases", "cases.json", "results.json")
    with two_hosts(tmp_path, own_name=own_name) as hosts:
        codes, outputs = run(hosts, torchrun(hosts, *train, per_host=per_host), tmp_path)
    assert codes == [0, 0], outputs
    check_cases(tmp_path, reference, "torchrun", parity_table, layouts, sp=2 * per_host)
    (saved,) = tmp_path.glob("*/checkpoint-4")  # in a folder that both see, and so one has written
    check_files(saved, read_manifest(saved))
    assert not list(tmp_path.glob("*/*.partial"))


LOSING = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from longctx.launch.failures import failures_told
from longctx.launch.network import choose_interface
from longctx.ranks.agreement import on_all_ranks
from longctx.ranks.hang import limit_waiting

choose_interface(os.environ)
dist.init_process_group("gloo")
with failures_told(lambda: "Resume.", 1800, Path("out")):
    on_all_ranks(lambda: None)
    limit_waiting(1800, Path("out"))
    dist.barrier()
    print("ready", flush=True)
    if sys.argv[1] == "in a meeting":
        on_all_ranks(lambda: time.sleep(3600 * dist.get_rank()))
    while True:
        dist.all_reduce(torch.ones(1))
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["in a collective", "in a meeting"])
def test_a_host_that_is_gone_is_named_within_30_s(where, tmp_path):
    """Its cable is cut, so that nothing closes a connection. No launcher looks after the ranks, as in plain srun."""
    (tmp_path / "losing.py").write_text(LOSING)
    command = ["MASTER_ADDR=hosta", "MASTER_PORT=29500", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=1", "LOCAL_RANK=0"]
    command += [sys.executable, "losing.py", where]
    with (
        two_hosts(tmp_path) as hosts,
        started(hosts, [["env", f"RANK={r}", *command] for r in (0, 1)], tmp_path) as ran,
    ):
        logs = [tmp_path / f"{host.name}.log" for host in hosts]
        wait_until(lambda: all("ready" in log.read_text() for log in logs), "the start", 100)
        assert hosts[1].run(["ip", "link", "set", "eth0", "down"], cwd=tmp_path).returncode == 0
        for rank, process in enumerate(ran):
            if rank == 0 or where == "in a collective":  # else rank 1 works
                assert process.wait(30) == 1
                (error,) = [line for line in logs[rank].read_text().splitlines() if "longctx: error: " in line]
                assert re.search(rf"rank {1 - rank} \(pid \d+ on {hosts[1 - rank].name}\) has died", error)


# Other launchers

CONFIGS = Path(__file__).parents[2] / "configs"
CASES_BY_RANKS = ["tests.train_cases", "cases.json", "results.json"]


def accelerate(hosts, profile, *flags):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / profile), *flags]
    command += ["--num_machines", "2", "--num_processes", "4", "--main_process_ip", hosts[0].name]
    command += ["--main_process_port", "29500"]
    return [[*command, "--machine_rank", str(rank), "-m", *CASES_BY_RANKS] for rank in range(len(hosts))]


def deepspeed(hosts):
    Path("hosts").write_text("".join(f"{host.name} slots=2\n" for host in hosts))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--no_ssh", "--master_addr", hosts[0].name]
    command += ["--hostfile", "hosts", "--node_rank"]
    return [[*command, str(rank), "--module", *CASES_BY_RANKS] for rank in range(len(hosts))]


LAUNCHERS = {
    "accelerate, multi_node.yaml": ("hybrid", lambda hosts: accelerate(hosts, "multi_node.yaml")),
    "accelerate, zero3.yaml": (
        "ulysses",
        lambda hosts: accelerate(hosts, "zero3.yaml", "--deepspeed_multinode_launcher", "standard"),
    ),
    "deepspeed --no_ssh": ("ulysses", deepspeed),
}


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_launchers_on_two_hosts_equal_one_process(launcher, models, tmp_path, monkeypatch, parity_table):
    layout, commands = LAUNCHERS[launcher]
    layouts = {layout: LAYOUTS[layout]}
    reference = make_cases(models, tmp_path, layouts)
    monkeypatch.chdir(tmp_path)
    with two_hosts(tmp_path) as hosts:
        codes, outputs = run(hosts, commands(hosts), tmp_path)
    assert codes == [0, 0], outputs
    check_cases(tmp_path, reference, launcher, parity_table, layouts)


@pytest.mark.long
def test_verify_on_two_hosts_finds_the_run_exact(tmp_path):
    flags = ["--sp", "4", *LAYOUTS["hybrid"], "--json"]
    with two_hosts(tmp_path) as hosts:
        codes, outputs = run(hosts, torchrun(hosts, "-m", "longctx.verify", *flags), tmp_path)
    assert codes == [0, 0], outputs
    found, _ = json.JSONDecoder().raw_decode(outputs[0][outputs[0].index("{") :])
    assert found["ok"], found
    assert found["run"]["mesh"] == "world 4 = dp_replicate 1 × dp_shard 1 × sp 4 (ring 2 × ulysses 2)"


@pytest.mark.long
def test_links_between_hosts_are_measured_and_the_run_equals_one_process(models, tmp_path, parity_table):
    layouts = {
        "links known": [*LAYOUTS["ring"], "--explain", "True"],
        "links measured": [*LAYOUTS["ring"], "--measure_links", "True", "--explain", "True"],
    }
    reference = make_cases(models, tmp_path, layouts)
    with two_hosts(tmp_path) as hosts:
        codes, outputs = run(hosts, torchrun(hosts, "-m", *CASES_BY_RANKS), tmp_path)
    assert codes == [0, 0], outputs
    known, measured = re.findall(r"backend .* modelled ms per layer: (.*);", outputs[0])
    assert known != measured
    check_cases(tmp_path, reference, "torchrun", parity_table, layouts)


# Nodes that differ

DIFFERENCES = {
    "flag": (["--learning_rate", "0.001"], "--learning_rate 0.001 here, 0.005 on rank 0"),
    "data": (["--dataset_name", "other.jsonl"], "; rows of data 1 here, 2 on rank 0"),
    "tokens": (["--dataset_name", "same_lengths.jsonl"], r"rank 0 does: data \w+ here, \w+ on rank 0\. "),
}


@pytest.mark.long
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_nodes_that_differ_are_refused(difference, models, tmp_path):
    """With what differs, once, and on both of them before a step; they end within the promised 30 s of each other."""
    given, said = DIFFERENCES[difference]
    for name, lengths, seed in (("data", LENGTHS, 0), ("other", LENGTHS[:4], 0), ("same_lengths", LENGTHS, 1)):
        write_jsonl(tmp_path / f"{name}.jsonl", make_documents(lengths, seed=seed))
    flags = [*COMMON, "--max_length", "300", "--sp", "4", *LAYOUTS["hybrid"], "--output_dir", "out"]
    flags += ["--dataset_name", "data.jsonl", "--model_name_or_path", str(models["GQA 4:2"])]
    with two_hosts(tmp_path) as hosts:
        first, second = torchrun(hosts, "-m", "longctx.train", *flags)
        with started(hosts, [first, second + given], tmp_path) as running:
            wait_until(lambda: any(p.poll() is not None for p in running), "the end on one of the hosts", 500)
            codes = [process.wait(30) for process in running]
    lines = "".join((tmp_path / f"{host.name}.log").read_text() for host in hosts).splitlines()
    assert 0 not in codes
    (error,) = [line for line in lines if "longctx: error: rank" in line]
    assert re.search(r"rank [23] on hostb would not run as rank 0 does: ", error), error
    assert re.search(said, error), error
    assert not [line for line in lines if re.match(r" *1/\d+ ", line)]


# Disks of their own

PAGE = Path(__file__).parents[2] / "docs/howto/checkpoints.md"
MERGE = re.findall(r"^scp .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def names(host, folder):
    return sorted(host.run(["ls", folder], cwd=Path("/")).stdout.split())


def state_of(host, folder):
    """Losses of each step, and a digest of the model."""
    text = host.run(["cat", f"{folder}/trainer_state.json"], cwd=Path("/")).stdout
    log = [(e["step"], e["loss"], e["grad_norm"]) for e in json.loads(text)["log_history"] if "loss" in e]
    return log, host.run(["sha256sum", f"{folder}/model.safetensors"], cwd=Path("/")).stdout.split()[0]


@pytest.mark.long
@pytest.mark.skipif(why_no_ssh() is not None, reason=str(why_no_ssh()))
@pytest.mark.parametrize("layout", ["hybrid", "ulysses"])
def test_nodes_without_a_common_folder_go_on_from_a_checkpoint_that_was_copied_together(layout, models, tmp_path):
    """By the commands of docs/howto/checkpoints.md, to the same bits; and not before that, nor from a damaged copy."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))
    flags = [*COMMON, "--sp", "4", *LAYOUTS[layout], "--dataset_name", data]
    flags += ["--model_name_or_path", str(models["GQA 4:2"]), *SAVING, "--resume_from_checkpoint", "auto"]
    with two_hosts(tmp_path, names=("node1", "node2")) as hosts:
        serve_ssh(hosts, tmp_path)
        for host in hosts:
            assert host.run(["mount", "-t", "tmpfs", "disk", "/mnt"], cwd=tmp_path).returncode == 0

        def train(output_dir="/mnt/my-model", *more, **fault):
            command = torchrun(hosts, "-m", "tests.faulty_train", *flags, "--output_dir", output_dir, *more)
            codes, outputs = run(hosts, command, tmp_path, **fault)
            return codes, "".join(outputs)

        def refused(*parts):
            codes, output = train()
            (error,) = [line for line in output.splitlines() if "longctx: error: " in line]
            assert 0 not in codes, output
            assert all(part in error for part in parts), error

        codes, output = train("/mnt/other", "--save_on_each_node", "False")
        assert "is not the folder that rank 0 has by that name" in output
        assert 0 not in codes

        codes, output = train("/mnt/whole")
        assert codes == [0, 0], output
        codes, output = train(FAULT="kill 3 3")
        assert 0 not in codes, output
        first, second = (names(host, "/mnt/my-model/checkpoint-2") for host in hosts)
        others = [f"{kind}-0000{rank}" for kind in ("random", "states") for rank in (2, 3)]
        assert {"model.safetensors", "trainer_state.json", "random-00000.json"} <= set(first)
        assert [name.partition(".")[0].removesuffix("-000") for name in second] == ["longctx", *others]

        refused("checkpoint-2/", "is missing on node", "--save_on_each_node", "copy the states-* and random-*")
        for command in MERGE:
            done = hosts[0].run(["sh", "-c", command.replace("checkpoint-100", "checkpoint-2")], cwd=tmp_path)
            assert done.returncode == 0, done.stdout
        copied = "/mnt/my-model/checkpoint-2/states-00000-000.safetensors"
        hosts[1].run(["cp", copied, "/mnt/kept"], cwd=tmp_path)
        damage = f"printf X | dd of={copied} bs=1 seek=5000 conv=notrunc"
        hosts[1].run(["sh", "-c", damage], cwd=tmp_path)
        refused("states-00000-000.safetensors is damaged")
        hosts[1].run(["cp", "/mnt/kept", copied], cwd=tmp_path)
        codes, output = train()
        assert codes == [0, 0], output
        assert "resume    from /mnt/my-model/checkpoint-2" in output
        assert state_of(hosts[0], "/mnt/my-model") == state_of(hosts[0], "/mnt/whole")
