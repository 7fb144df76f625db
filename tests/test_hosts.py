"""Training over two hosts: namespaces of this machine, each with an address and a name, joined by a cable."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts import two_hosts, why_no_hosts
from tests.reference import train_reference
from tests.test_training import COMMON, LEARNING_RATE, STEPS, check, make_documents, write_jsonl

LENGTHS = [90, 7, 41, 1, 130, 64, 2, 33, 17, 88]
LAYOUTS = {
    "ring": ["--sp_backend", "ring"],
    "hybrid": ["--sp_backend", "hybrid", "--ring_size", "2"],
    "ulysses": ["--sp_backend", "ulysses"],
}
"""Of sp 4: two ranks on each host. Hybrid's ring is between the hosts, its Ulysses groups are within them. What runs on
DeepSpeed stands last: FSDP2 cannot follow in the same process."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}

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


def make_cases(models, tmp_path, layouts=LAYOUTS, heads="GQA 4:2"):
    """A JSON file of cases, and what one process makes of them."""
    documents = make_documents(LENGTHS)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*COMMON, "--sp", "4", "--dataset_name", data, "--model_name_or_path", str(models[heads])]
    cases = {name: [*common, *flags, "--output_dir", str(tmp_path / name)] for name, flags in layouts.items()}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    return train_reference(models[heads], documents, steps=STEPS, learning_rate=LEARNING_RATE)


def check_cases(folder, reference, start, parity_table):
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == set(LAYOUTS)
    for case, result in results.items():
        check(result, reference, f"{case} sp 4, packed, on two hosts", start, parity_table)


@pytest.mark.parametrize("own_name", [pytest.param("", marks=pytest.mark.long), "127.0.1.1"])
def test_two_hosts_equal_one_process(own_name, models, tmp_path, parity_table):
    reference = make_cases(models, tmp_path)
    with two_hosts(tmp_path, own_name=own_name) as hosts:
        codes, outputs = run(hosts, torchrun(hosts, "-m", "tests.train_cases", "cases.json", "results.json"), tmp_path)
    assert codes == [0, 0], outputs
    check_cases(tmp_path, reference, "torchrun", parity_table)
