"""`python -m benchmarks.gpu`: its page, the constants that it refits, and all of it on a soft GPU."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest

from benchmarks.gpu.__main__ import RESULTS, main
from benchmarks.gpu.catalogue import QUICK, SLICES, Catalogue
from benchmarks.gpu.page import PAGE, write_page
from benchmarks.gpu.refit import changes, constants_of, number, refit, write
from longctx.forecast.cost import cost
from longctx.machine.here import Machine
from longctx.machine.speeds import FILE, PEAK_FLOPS, TABLE, Speeds, SpeedTable
from tests.softcuda.ranks import soft_environment

DEVICE = {
    "kind": "device",
    "name": "facts",
    "status": "ok",
    "device": "NVIDIA H100 80GB HBM3",
    "device_bytes": 80 * 2**30,
    "capability": "9.0",
    "cuda": "12.8",
    "kernel": "aten varlen flash",
    "date": "2026-11-23",
    "python": "3.12.0",
    "commit": "abc",
    "versions": {"torch": "2.11.0"},
}
LINK = {"exchange": 1e11, "pass_on": 1e11}
SPEEDS_LINE = {
    **{"kind": "speeds", "name": "measured", "status": "ok", "matmul_flops": 494.5e12},
    **{"attention_forward_flops": 400e12, "attention_backward_flops": 300e12},
    **{"host_link": 25e9, "host_memory": 190e9},
    "device": {"memory_speed": 3e12, "attention_flops": 3e14, "within": LINK, "across": LINK, "launch_seconds": 4e-6},
}
KERNEL_LINE = {
    **{"kind": "kernels", "name": "k", "status": "ok", "kernel": "aten varlen flash", "documents": "one document"},
    **{"length": 4096, "forward_flops": 0.5 * 989e12, "backward_flops": 0.4 * 989e12},
}
SHORTER = KERNEL_LINE | {"name": "s", "length": 512, "forward_flops": 1e12, "backward_flops": 1e12}
PACKED = KERNEL_LINE | {"name": "p", "length": 8192, "documents": "packed", "forward_flops": 2e12}
MEASURED = [DEVICE, SPEEDS_LINE, SHORTER, KERNEL_LINE, PACKED]
REFITTED = {
    **{"matmul_part": 0.5, "memory_speed": 3e12, "launch_seconds": 4e-6},
    **{"host_link": 25e9, "host_memory": 190e9, "flash-attn 2 forward": 0.5, "flash-attn 2 backward": 0.4},
}
"""What these figures give of an H100, whose peak is 989e12."""


@pytest.fixture
def catalogue(tmp_path):
    return Catalogue(QUICK, tmp_path / "work")


def forecast(catalogue, path, device="H100"):
    """(the speeds of a step, its seconds), with the table of speeds at this path."""
    shape = replace(catalogue.combination("tiny", "balanced", 64).shape, engine="fsdp2", world_size=8)
    speeds = Speeds.of(device, "flash-attn 2", SpeedTable.read(path))
    return speeds, cost(shape, replace(Machine.of("GPU", 8), speeds=speeds), 1 << 15).step_seconds


def test_a_refit_changes_the_forecast_and_restoring_the_table_gives_the_old_one(catalogue, tmp_path):
    path = tmp_path / "speeds.toml"
    shutil.copy(FILE, path)
    before, others = forecast(catalogue, path), [forecast(catalogue, path, of) for of in ("A100", "H200")]
    found = refit(MEASURED, path)
    after = SpeedTable.read(path)
    assert {change.name: change.after.value for change in found} == REFITTED
    assert {change.name: change.before for change in found} == {n: TABLE.constants["H100"][n] for n in REFITTED}
    assert after.constants["H100"]["host_link"] == (
        25e9,
        "python -m benchmarks.gpu, NVIDIA H100 80GB HBM3, 2026-11-23, commit abc",
    )
    speeds, seconds = forecast(catalogue, path)
    assert seconds != before[1]
    assert speeds.matmul == pytest.approx(494.5e12)
    assert (speeds.attention_forward, speeds.attention_backward) == (0.5 * 989e12, 0.4 * 989e12)
    assert (speeds.memory, speeds.launch_seconds) == (3e12, 4e-6)
    assert (speeds.host_link, speeds.host_memory) == (25e9, 190e9)
    assert speeds.within == before[0].within  # one GPU has no links
    assert [forecast(catalogue, path, of) for of in ("A100", "H200")] == others
    assert refit(MEASURED, path) == []  # what is confirmed is no change
    shutil.copy(FILE, path)
    assert forecast(catalogue, path) == before


def test_the_forecasts_own_table_is_as_the_writer_would_write_it(tmp_path):
    write(TABLE, tmp_path / "speeds.toml")
    assert (tmp_path / "speeds.toml").read_text() == FILE.read_text()


def results(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(folder)


def test_the_flag_writes_what_recorded_results_give_and_tells_what_was_there(tmp_path, capsys):
    """On a machine without a GPU, into a file of its own; without the flag there, the page is written."""
    before, path = FILE.read_bytes(), tmp_path / "speeds.toml"
    folder = results(tmp_path / "gpu", MEASURED)
    assert (main(["--output", str(tmp_path / "new")]), "no CUDA device" in capsys.readouterr().err) == (2, True)
    assert main(["--output", folder]) == 0
    assert "| matrices, TFLOP/s |" in (tmp_path / "gpu" / PAGE).read_text()
    assert main(["--refit", str(path), "--output", folder]) == 0
    source = "python -m benchmarks.gpu, NVIDIA H100 80GB HBM3, 2026-11-23, commit abc"
    was = TABLE.constants["H100"]["matmul_part"]
    told = capsys.readouterr().out
    assert f"H100 matmul_part: {number(was.value)} ({was.source}) -> 0.5 ({source})" in told
    assert f"longctx: {len(REFITTED)} constants of {path} have changed" in told
    assert {n: SpeedTable.read(path).value("H100", n) for n in REFITTED} == REFITTED
    assert FILE.read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "There are no results of a GPU"),
        ([DEVICE, KERNEL_LINE], "The speeds of this GPU are not among the results"),
        ([DEVICE | {"device": "NVIDIA L4"}, SPEEDS_LINE], "has no row for 'NVIDIA L4'"),
        ([DEVICE | {"device": "NVIDIA H100 PCIe"}, SPEEDS_LINE], "has no row for 'NVIDIA H100 PCIe'"),
        ([DEVICE, SPEEDS_LINE | {"matmul_flops": 1e15}], "would have matmul_part = 1.011, which cannot be"),
        ([DEVICE, SPEEDS_LINE | {"host_link": math.inf}], "would have host_link = inf, which cannot be"),
        ([DEVICE | {"quick": True}, SPEEDS_LINE], "These results are of --quick"),
    ],
)
def test_results_that_give_no_constants_change_nothing(lines, error, tmp_path, capsys):
    before = FILE.read_bytes()
    assert main(["--refit", "--output", results(tmp_path / "gpu", lines)]) == 2
    assert error in capsys.readouterr().err
    assert FILE.read_bytes() == before


def test_the_page_predicts_with_the_constants_from_before_the_refit(catalogue, tmp_path):
    """A second call after a refit would else find its own figures predicted."""
    device = DEVICE | constants_of(DEVICE["device"], TABLE)
    device["constants"] = {**device["constants"], "host_link": (100e9, "a page of old")}
    write_page(tmp_path, catalogue, [device, SPEEDS_LINE, KERNEL_LINE])
    assert "| copies to and from the host, GB/s | 100 | 25 | 0.25 |" in (tmp_path / PAGE).read_text()


def test_steps_of_an_h200_are_predicted_within_15_percent(tmp_path):
    """The page is what the command writes from its results without a GPU: what changes the forecast, writes it anew."""
    page = shutil.copytree(RESULTS / "gpu_H200", tmp_path / "gpu_H200") / PAGE
    committed = page.read_text()
    assert main(["--output", str(page.parent)]) == 0
    assert page.read_text() == committed
    errors = [abs(int(error)) for error in re.findall(r"\| [\d.]+ \| [\d.]+ \| ([-+]\d+)% \| [\d.]+ \|", committed)]
    assert len(errors) == 33
    assert max(errors) <= 15
    assert statistics.median(errors) <= 4


def test_a_kernel_that_the_table_lacks_on_this_gpu_is_added():
    found = changes([*MEASURED, KERNEL_LINE | {"name": "4", "kernel": "flash-attn 4"}], TABLE)
    [added] = [change for change in found if change.name == "flash-attn 4 forward"]
    assert added.before is None
    assert str(added).startswith("H100 flash-attn 4 forward: nothing -> 0.5 (")
    assert PEAK_FLOPS["H100"] == 989e12


@pytest.mark.long
def test_all_of_it_runs_on_a_soft_gpu(soft_gpus, tmp_path):
    """But for what needs Triton's compiler: TRL's loss and Liger's kernels. The second call finds nothing left."""
    before, table = FILE.read_bytes(), tmp_path / "speeds.toml"
    work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp"))  # a short path, for the sockets of data loaders
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--refit", str(table), "--output", str(tmp_path)]
    command += ["--work", work]
    for _ in range(2):
        done = subprocess.run(command, env=soft_environment() | {"SOFTCUDA_DEVICES": "1"}, check=True, timeout=900)
        assert done.returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len({(line["kind"], line["name"]) for line in lines}) == len(lines)
    assert {line["kind"] for line in lines} == set(SLICES) - {"checks"}  # which are this suite
    failed = [line["name"] for line in lines if line["status"] not in ("ok", "refused")]
    assert all("TRL" in name or "Liger" in name for name in failed), failed
    assert (tmp_path / PAGE).read_text().count("| tiny | 256 | balanced |") == 1
    found = next(line for line in lines if line["kind"] == "speeds")
    assert SpeedTable.read(table).value("H100", "memory_speed") == pytest.approx(found["memory"], rel=1e-3)
    assert FILE.read_bytes() == before
