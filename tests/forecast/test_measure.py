"""Speeds measured on this machine: all there, of the right order, and what real training steps take by them."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.shapes import shape_of
from longctx.forecast.cost import cost
from longctx.forecast.model_sizes import ModelSizes
from longctx.machine import measure
from longctx.machine.here import Machine
from longctx.machine.speeds import Speeds
from tests.small_model import save_with_tokenizer


@pytest.fixture(scope="module")
def speeds(tmp_path_factory) -> Speeds:
    """In CPU seconds of one thread, so that other work on the machine does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        return measure.measure_together(time.process_time)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("gpus", "asked", "message"), [(0, 0, "0 devices .* Ask for 1"), (2, 3, "3 devices .* 2 GPUs")]
)
def test_what_cannot_be_measured_is_said(monkeypatch, gpus, asked, message) -> None:
    monkeypatch.setattr(measure, "device_count", lambda: gpus)
    monkeypatch.setattr(measure, "spawn", lambda *args, **kwargs: pytest.fail("processes were started"))
    with pytest.raises(ValueError, match=message):
        measure.measure_speeds(asked)


@pytest.mark.long
def test_two_processes_measure_their_link() -> None:
    speeds = measure.measure_speeds(2)
    assert speeds.within == speeds.across != Speeds.of("CPU").within
    assert 1e6 < speeds.within.exchange < 1e12


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU seconds are compared")
def test_real_steps_take_what_measured_speeds_say(speeds, tmp_path) -> None:
    """Of a run that trains 17 million parameters on 2,048 tokens a step, in CPU seconds, within 25%."""
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=True)
    save_with_tokenizer(Qwen3ForCausalLM(config), tmp_path / "model")
    draw = random.Random(0)
    rows = [json.dumps({"input_ids": [draw.randrange(256) for _ in range(2048)]}) for _ in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    few, more = (_cpu_seconds(tmp_path, steps) for steps in (1, 4))
    real = (more - few) / 3
    machine = replace(Machine.of("CPU", 1), speeds=speeds)
    predicted = cost(shape_of(ModelSizes.of_config(config), bf16=False), machine, 2048)
    print(f"{real:.2f} s, predicted {predicted.step_seconds:.2f} s: {dict(predicted.seconds)}")
    assert predicted.step_seconds == pytest.approx(real, rel=0.25)


def _cpu_seconds(folder, steps: int) -> float:
    """Of a whole run."""
    command = [sys.executable, "-m", "longctx.train", "--model_name_or_path", str(folder / "model")]
    command += ["--dataset_name", str(folder / "rows.jsonl"), "--max_length", "2048", "--sp", "1"]
    command += ["--per_device_train_batch_size", "1", "--max_steps", str(steps), "--save_strategy", "no"]
    command += ["--output_dir", str(folder / f"out{steps}"), "--report_to", "none"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
