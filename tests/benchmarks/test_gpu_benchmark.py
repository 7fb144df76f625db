"""`python -m benchmarks.gpu`: what is measured next, what its page says, and all of it on a soft GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu.catalogue import OURS, QUICK, SLICES, TRLS, Catalogue
from benchmarks.gpu.page import PAGE, write_page
from benchmarks.gpu.probes import overlap
from longctx.forecast.step_time import KERNELS
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


@pytest.fixture
def catalogue(tmp_path):
    return Catalogue(QUICK, tmp_path / "work")


def outcome(probe, status="ok", **found):
    return {"kind": probe.slice, "name": probe.name, "status": status, **found, **probe.about}


def test_what_is_measured_is_not_measured_again(catalogue):
    lines = [DEVICE]
    first = next(catalogue.left(lines, SLICES))
    assert first.key == ("speeds", "measured")
    lines.append(outcome(first))
    assert next(catalogue.left(lines, SLICES)).slice == "kernels"
    left = [probe.slice for probe in catalogue.left(lines, SLICES)]
    assert list(dict.fromkeys(left)) == ["kernels", "ring", "steps", "levers", "longest"]
    assert len({probe.key for probe in catalogue.left(lines, SLICES)}) == len(left)


def test_the_search_ends_near_the_longest_sequence(catalogue):
    """Sequences of up to 300 tokens train; of TRL's, none."""
    lines = [DEVICE]
    while probe := next(catalogue.left(lines, ["longest"]), None):
        fits = probe.about["way"] in OURS and probe.argument.length <= 300
        lines.append(outcome(probe, "ok" if fits else "oom", allocated=1e6 * probe.argument.length))
    tried = {
        way: {line["length"]: line["status"] for line in lines if line.get("way") == way} for way in (*OURS, *TRLS)
    }
    for way in OURS:
        assert tried[way][256] == "ok"
        assert tried[way][320] == "oom"
    for way in TRLS:
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
    speeds = {
        **{"kind": "speeds", "name": "measured", "status": "ok", "matmul_flops": 494.5e12},
        **{"attention_forward_flops": 400e12, "attention_backward_flops": 300e12},
        **{"host_link": 25e9, "host_memory": 95e9},
        "device": {"memory_speed": 3e12, "attention_flops": 3e14, "within": LINK, "across": LINK},
    }
    kernel = {
        **{"kind": "kernels", "name": "k", "status": "ok", "kernel": "aten varlen flash", "documents": "one document"},
        **{"length": 4096, "forward_flops": 0.5 * 989e12, "backward_flops": 0.4 * 989e12},
    }
    step = {"kind": "steps", "model": "tiny", "length": 64, "status": "ok", "seconds": [9.0, 9.0, 1.0, 2.0, 3.0]}
    ours = step | {"name": "ours", "way": "balanced", "allocated": 3 * 2**30, "predicted_bytes": 3.3 * 2**30}
    trl = step | {"name": "trl", "way": "TRL", "allocated": 2**30, "seconds": [9.0, 9.0, 5.0]}
    broken = {"kind": "ring", "name": "2 ranks", "status": "fail", "error": "ValueError: no"}
    write_page(tmp_path, catalogue, [DEVICE, speeds, kernel, ours, trl, broken], refit=True)
    page = (tmp_path / PAGE).read_text()
    assert "| copies to and from the host, GB/s | 50 | 25 | 0.50 |" in page
    assert "| aten varlen flash | one document | 4,096 | 494 / 396 | 50% / 40% | 381 / 292 |" in page
    row = next(line for line in page.splitlines() if line.startswith("| tiny | 64 | balanced | 2 |"))
    assert row.endswith("| 3.00 | 3.30 | +10% | 2.50 |")
    assert "- ring: 2 ranks: fail, ValueError: no" in page
    assert "| MATMUL_EFFICIENCY | 0.6 | 0.500 |" in page
    now = KERNELS["flash-attn 2"]["H100"]
    assert f'| KERNELS["flash-attn 2"]["H100"] | {now} | (0.5, 0.4) |' in page
    assert "closed form: median 0.909" in page


@pytest.mark.long
def test_all_of_it_runs_on_a_soft_gpu(soft_gpus, tmp_path):
    """But for what needs Triton's compiler: TRL's loss and Liger's kernels. The second call finds nothing left."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--refit", "--output", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(command, env=soft_environment() | {"SOFTCUDA_DEVICES": "1"}, check=True, timeout=900)
        assert done.returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len({(line["kind"], line["name"]) for line in lines}) == len(lines)
    assert {line["kind"] for line in lines} == set(SLICES)
    failed = [line["name"] for line in lines if line["status"] not in ("ok", "refused")]
    assert all("TRL" in name or "Liger" in name for name in failed), failed
    assert (tmp_path / PAGE).read_text().count("| tiny | 256 | balanced |") == 1
