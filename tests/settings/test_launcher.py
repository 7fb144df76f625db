"""The processes of a launcher, and what its reading imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from longctx.launch.accelerate import default_config_file, who_starts
from longctx.settings.launcher import read_profile


def test_processes_of_a_launcher():
    assert not read_profile({}).launched
    by_deepspeed = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}
    launcher = read_profile(by_deepspeed)
    assert (launcher.world_size, launcher.local_world_size, launcher.by_accelerate) == (4, 2, False)
    assert by_deepspeed["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(ValueError, match="WORLD_SIZE is many, expected a whole number of at least 1"):
        read_profile({"RANK": "0", "WORLD_SIZE": "many"})
    alone = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
    assert read_profile(dict(alone)).only_one_started
    assert not read_profile(alone | {"RANK": "0", "WORLD_SIZE": "2"}).only_one_started


@pytest.mark.long
def test_translated_sections_train_as_the_flags_they_become(tmp_path):
    """DeepSpeed builds neither optimizer nor scheduler, and compiles nothing."""
    params = {"lr": "auto", "betas": [0.5, 0.6], "eps": "auto", "weight_decay": "auto"}
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "Adam", "params": params}}
    config |= {"scheduler": {"type": "WarmupLR", "params": warmup}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    deepspeed = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    profile = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": deepspeed}
    (tmp_path / "own.yaml").write_text(json.dumps(profile))
    (tmp_path / "data.jsonl").write_text("".join(f'{{"text": "{f"word{i} " * 30}"}}\n' for i in range(32)))
    same = [
        "-m",
        "longctx.train",
        "--model_name_or_path",
        "tiny",
        "--dataset_name",
        "data.jsonl",
        "--max_length",
        "256",
    ]
    same += ["--use_cpu", "--max_steps", "4", "--warmup_steps", "2", "--learning_rate", "1e-3", "--report_to", "none"]
    flags = ["--engine", "deepspeed", "--adam_beta1", "0.5", "--adam_beta2", "0.6"]
    flags += ["--lr_scheduler_type", "constant_with_warmup"]
    launch = ["accelerate.commands.launch", "--config_file", "own.yaml", "--main_process_port", "0", *same]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", *same, *flags]
    root = str(Path(__file__).parents[2])
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled"), "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    logs = []
    for name, command in {"profile": launch, "flags": torchrun}.items():
        command = [sys.executable, "-m", *command, "--output_dir", name]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        logs.append(
            [[step[key] for key in ("loss", "grad_norm", "learning_rate")] for step in history if "loss" in step]
        )
    assert len(logs[0]) == 4
    assert logs[0] == logs[1]
    assert not (tmp_path / "compiled").exists()


@pytest.mark.long
def test_default_config_is_accelerates(monkeypatch, tmp_path):
    """The path is worked out without accelerate, which takes a second to import."""
    for home in ({"HF_HOME": str(tmp_path)}, {"XDG_CACHE_HOME": str(tmp_path)}):
        env = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "XDG_CACHE_HOME")} | home
        code = "from accelerate.commands.config.config_args import default_config_file as p; print(p)"
        printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        path = Path(printed.stdout.strip())
        path.parent.mkdir(parents=True)
        path.touch()
        with monkeypatch.context() as patch:
            patch.delenv("HF_HOME", raising=False)
            for name, value in home.items():
                patch.setenv(name, value)
            assert default_config_file() == path


def test_nothing_heavy_is_imported():
    heavy = {"torch", "accelerate", "transformers", "deepspeed", "numpy", "yaml"}
    code = "import sys, longctx.settings.launcher as l; l.read_profile(); print(*sys.modules)"
    root = str(Path(__file__).parents[2])
    printed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not heavy & set(printed.stdout.split())


def test_who_starts_says_why():
    assert "accelerate starts one process" in who_starts(4, only_one_started=True)
    assert who_starts(4, only_one_started=False) == "longctx.train starts 4 processes, since no launcher did."
