"""`python -m benchmarks.gpu`: what is measured next, what its page says, and all of it on a soft GPU."""

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
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import RESULTS, main
from benchmarks.gpu.catalogue import OURS, QUICK, SEARCHED, SLICES, Catalogue
from benchmarks.gpu.page import PAGE, write_page
from benchmarks.gpu.probes import overlap
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


def outcome(probe, status="ok", **found):
    return {"kind": probe.slice, "name": probe.name, "status": status, **found, **probe.about}


@pytest.mark.long
def test_what_is_measured_is_not_measured_again(catalogue):
    lines = [DEVICE]
    first = next(catalogue.left(lines, SLICES))
    assert first.key == ("speeds", "measured")
    lines.append(outcome(first))
    assert next(catalogue.left(lines, SLICES)).slice == "steps"
    left = [probe.slice for probe in catalogue.left(lines, SLICES)]
    assert list(dict.fromkeys(left)) == ["steps", "kernels", "loss", "memory_options", "longest", "ring"]
    assert len({probe.key for probe in catalogue.left(lines, SLICES)}) == len(left)


@pytest.mark.long
def test_the_search_ends_near_the_longest_sequence(catalogue):
    """Sequences of up to 300 tokens train; of TRL's, none."""
    lines = [DEVICE]
    while probe := next(catalogue.left(lines, ["longest"]), None):
        fits = probe.about["way"] in OURS and probe.argument.length <= 300
        lines.append(outcome(probe, "ok" if fits else "oom", allocated=1e6 * probe.argument.length))
    tried = {way: {line["length"]: line["status"] for line in lines if line.get("way") == way} for way in SEARCHED}
    for way in SEARCHED:
        if way in OURS:
            assert tried[way][256] == "ok"
            assert tried[way][320] == "oom"
        else:
            assert tried[way][64] == "oom"
    assert len(lines) <= 25


def test_copies_hide_where_a_kernel_computes_at_the_same_time():
    """Copies from 0 to 10, twice from 20 to 30, and from 40 to 50 µs; kernels from 5 to 22 and 26 to 41."""

    def event(kind, start, end, name="k"):
        return {"cat": kind, "ts": start, "dur": end - start, "name": name}

    events = [
        event("gpu_memcpy", 0, 10, "Memcpy HtoD (Pinned -> Device)"),
        event("gpu_memcpy", 20, 30, "Memcpy DtoH (Device -> Pinned)"),
        event("gpu_memcpy", 22, 28, "Memcpy HtoD (Pinned -> Device)"),
        event("gpu_memcpy", 40, 50, "Memcpy DtoH (Device -> Pinned)"),
        event("gpu_memcpy", 60, 90, "Memcpy DtoD (Device -> Device)"),
        event("kernel", 5, 12),
        event("kernel", 11, 22),
        event("kernel", 26, 41),
        event("cpu_op", 0, 100),
    ]
    assert overlap(events) == {"copied_seconds": pytest.approx(30e-6), "hidden": pytest.approx((5 + 2 + 4 + 1) / 30)}
    assert overlap(events[-2:]) == {"copied_seconds": 0, "hidden": None}


def test_the_page_puts_predicted_beside_measured(catalogue, tmp_path):
    step = {"kind": "steps", "model": "tiny", "length": 64, "status": "ok", "seconds": [9.0, 9.0, 1.0, 2.0, 3.0]}
    ours = step | {"name": "ours", "way": "balanced", "allocated": 3 * 2**30, "predicted_bytes": 3.3 * 2**30}
    trl = step | {"name": "trl", "way": "TRL", "allocated": 2**30, "seconds": [9.0, 9.0, 5.0]}
    liger = trl | {"name": "liger", "way": "TRL, Liger", "seconds": [9.0, 9.0, 3.0]}
    checked = {"kind": "checks", "name": "c", "status": "ok", "passed": 7, "failed": 1, "failures": ["tests/a.py::b"]}
    broken = {"kind": "ring", "name": "2 ranks", "status": "fail", "error": "ValueError: no"}
    loss = {"kind": "loss", "name": "l", "status": "ok", "way": "kernel", "vocabulary": 151_936, "tokens": 1792}
    loss |= {"seconds": 1.5e-3, "logits_per_second": 181.5e9}
    write_page(tmp_path, catalogue, [DEVICE, SPEEDS_LINE, KERNEL_LINE, checked, loss, ours, trl, liger, broken])
    page = (tmp_path / PAGE).read_text()
    known = {name: constant.value for name, constant in TABLE.constants["H100"].items()}  # a refit changes them
    link, parts = known["host_link"], (known["flash-attn 2 forward"], known["flash-attn 2 backward"])
    assert f"| copies to and from the host, GB/s | {link / 1e9:.3g} | 25 | {25e9 / link:.2f} |" in page
    predicted = " / ".join(f"{part * 989:.0f}" for part in parts)
    assert f"| aten varlen flash | one document | 4,096 | 494 / 396 | 50% / 40% | {predicted} |" in page
    assert "| 151,936 | 1,792 | kernel | 1.5 | 182 |" in page
    row = next(line for line in page.splitlines() if line.startswith("| tiny | 64 | balanced | 2 |"))
    assert row.endswith("| 3.00 | 3.30 | +10% | 2.50 | 1.50 |")
    assert "every model type: 7 passed, 1 failed.\n\n- failed: `tests/a.py::b`" in page
    assert "- ring: 2 ranks: fail, ValueError: no" in page
    was = TABLE.constants["H100"]["matmul_part"]
    assert f"| H100 matmul_part | {number(was.value)} | 0.5 | {was.source} |" in page
    assert f"| H100 flash-attn 2 forward | {number(parts[0])} | 0.5 |" in page
    assert "closed form: median 0.909" in page


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
def test_plan_forecasts_with_what_the_flag_has_written(tmp_path):
    """In a copy of the package, whose table the flag rewrites; the old table gives the old plan again."""
    root = Path(__file__).parents[2]
    for name in ("longctx", "benchmarks"):
        left_out = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=left_out)
    table = tmp_path / "longctx" / "machine" / FILE.name

    def run(*arguments):
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300).stdout

    def plan():
        flags = ("--memory", "balanced", "--lengths", "32768", "--json")
        return json.loads(run("longctx.plan", "--model_name_or_path", "tiny", "--gpus", "2", *flags))

    before, old = plan(), table.read_bytes()
    told = run("benchmarks.gpu", "--refit", "--output", results(tmp_path / "gpu", MEASURED))
    assert f"{len(REFITTED)} constants of {table} have changed" in told
    after = plan()
    assert after != before
    table.write_bytes(old)
    assert plan() == before


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
