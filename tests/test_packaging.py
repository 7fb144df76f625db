"""What people install: the sdist and the wheel, without the repository around."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import longctx

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel), the wheel made from the sdist, of what git has; nothing is left in the working tree."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    archive = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True).stdout
    subprocess.run(
        ["tar", "-C", str(ROOT), "--null", "--files-from=-", "-cf", str(source / "all.tar")], input=archive, check=True
    )
    subprocess.run(["tar", "-C", str(source), "-xf", str(source / "all.tar")], check=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(output), str(source)], check=True, timeout=300)
    [sdist], [wheel] = output.glob("*.tar.gz"), output.glob("*.whl")
    return sdist, wheel


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[1]).namelist()
    assert {name.partition("/")[0] for name in names} == {"longctx", f"longctx_train-{longctx.__version__}.dist-info"}
    for top, link in (("longctx", "longctx"), ("benchmarks", "longctx/benchmarks"), ("configs", "longctx/configs")):
        kinds = {"longctx": "*.*", "benchmarks": "*.py", "configs": "*.yaml"}
        found = [path for path in (ROOT / top).rglob(kinds[top]) if path.is_file() and path.suffix != ".pyc"]
        sources = {path.relative_to(ROOT / top).as_posix() for path in found}
        packed = {name.removeprefix(f"{link}/") for name in names if name.startswith(f"{link}/")}
        assert sources - packed == set()
    assert "longctx/benchmarks/data/document_lengths.csv" in names
    assert not [name for name in names if "/results/" in name or name.endswith(".pyc")]
    assert f"longctx_train-{longctx.__version__}.dist-info/licenses/LICENSE" in names


def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "longctx/train.py", "longctx/configs/zero3.yaml"} <= names
    assert "longctx/machine/speeds.toml" in names
    assert not [name for name in names if name.startswith("tests/")]


def test_metadata(built):
    with zipfile.ZipFile(built[1]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith("METADATA")]
        text = wheel.read(name).decode()
    assert re.search(r"^License-Expression: Apache-2.0$", text, re.MULTILINE)
    assert re.search(r"^Requires-Python: >=3.11$", text, re.MULTILINE)
    assert set(re.findall(r"^Provides-Extra: (.+)$", text, re.MULTILINE)) >= {"peft", "plots", "docs", "test"}


def test_a_new_environment_trains_plans_verifies_and_sweeps(built, tmp_path):
    """All dependencies anew, no repository on the path: what the four commands need is in the wheel."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"{built[1]}[plots]"], check=True, timeout=580, cwd=tmp_path)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def longctx_command(*arguments):
        command = [str(tmp_path / "venv/bin/longctx"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert longctx_command("--version") == f"longctx {longctx.__version__}\n"
    short = ["--sp", "2", "--max_length", "256", "--per_device_train_batch_size", "1"]
    trained = longctx_command("train", *short, "--max_steps", "2", "--report_to", "none", "--save_strategy", "no")
    assert re.search(r"step 1 matched one device to [0-9]e-0?[6-9]", trained)
    assert "sp 2 (ring 2 × ulysses 1)" in longctx_command(
        "train", "--accelerate_config", "context_parallel_2gpu", "--max_length", "256", "--dry_run", "--explain"
    )
    recipe = ["--config", "qwen3-8b-full-8x80gb-128k", "--model_name_or_path", "tiny", "--dataset_name", "stdlib"]
    recipe += [*short, "--no_assistant_only_loss", "--overlong", "split"]
    assert "ring 2" in longctx_command("train", *recipe, "--dry_run", "--explain")
    assert "exact: sp 2 and one device agree" in longctx_command("verify", *short)
    assert "Recommended" in longctx_command("plan", "--model_name_or_path", "tiny", "--gpus", "2")
    found = ["--gpus", "1", "--backends", "ulysses", "--memory_budget_gib", "0.01", "--precision", "0.5"]
    longctx_command("bench", *found, "--lengths", "64", "--steps", "1", "--output", "sweep")
    assert (tmp_path / "sweep/table.md").is_file()
    public = "parallelize collate.SequenceCollator packing.pack packing.pack_dataset ring.plan_ring ring.ring_attention"
    names = [f"longctx.{name}" for name in [*public.split(), "ulysses.ulysses_attention"]]
    imports = "".join(f"import {name.rpartition('.')[0]}\n" for name in names)
    check = ["-c", imports + "\n".join(f"reveal_type({name})" for name in names)]
    # What torch and transformers say of their own types takes minutes to read.
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = skip\n[mypy-longctx.*]\nfollow_imports = normal\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(tmp_path / "venv/bin/python"), *check]
    types = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert types.returncode == 0, types.stdout
    revealed = re.findall(r'Revealed type is "(.*)"', types.stdout)
    assert len(revealed) == len(names), types.stdout
    assert all(kind.startswith("def (") for kind in revealed), types.stdout
