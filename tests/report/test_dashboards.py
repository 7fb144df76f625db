"""--report_to: the services that are installed show a resumed run as one, with the values of trainer_state.json."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sqlite3
from pathlib import Path

import pytest

from longctx.train import main
from tests.training.test_training import make_documents, write_jsonl

SERVICES = [name for name in ("tensorboard", "mlflow", "wandb", "trackio") if importlib.util.find_spec(name)]
STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of four steps that was resumed from its second, and then had six."""
    folder = tmp_path_factory.mktemp("run")
    if not SERVICES:
        pytest.skip("no service of --report_to is installed")
    (folder / "run.yaml").write_text(json.dumps({"report_to": SERVICES}))
    flags = ["--config", str(folder / "run.yaml"), "--model_name_or_path", "tiny", "--max_length", "128"]
    flags += ["--dataset_name", write_jsonl(folder / "data.jsonl", make_documents([60, 50, 90] * 8)), "--use_cpu"]
    flags += ["--output_dir", str(folder / "out"), "--logging_steps", "1", "--disable_tqdm", "True"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("MLFLOW_TAGS", '{"team": "long"}')
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        before = variables()
        assert main([*flags, "--max_steps", "4", "--save_steps", "2"]) == 0
        assert variables() == before, "another run of this process is told nothing of this one"
        if "wandb" in SERVICES:  # it ends a run with the process
            importlib.import_module("wandb").finish()
        resumed = ["--resume_from_checkpoint", str(folder / "out" / "checkpoint-2"), "--learning_rate", "2e-5"]
        assert main([*flags, "--max_steps", str(STEPS), "--save_strategy", "no", *resumed]) == 0
        yield folder


def variables():
    """What the services are told of a run."""
    names = ("MLFLOW_RUN_ID", "MLFLOW_TAGS", "MLFLOW_MAX_LOG_PARAMS", "WANDB_RUN_ID", "WANDB_RESUME")
    return {name: os.environ.get(name) for name in names}


def losses(folder):
    """By step, as the resumed run has logged them."""
    log = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in log if "loss" in entry}


def name_of(folder):
    return f"out-{json.loads((folder / 'out' / 'run.json').read_text())['id'][:6]}"


def test_tensorboard_has_one_curve(run):
    """Of the first run, what came after the checkpoint is gone."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert len(list((run / "out" / "runs").iterdir())) == 2
    points = EventAccumulator(str(run / "out" / "runs")).Reload().Scalars("train/loss")
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    assert {point.step: point.value for point in points} == pytest.approx(losses(run), rel=1e-6)  # events are fp32


def test_mlflow_has_one_run(run):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run}/mlflow.db")
    [found] = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert (found.info.run_name, found.info.status, found.data.tags["team"]) == (name_of(run), "FINISHED", "long")
    assert found.data.params["max_steps"] == "4", "parameters of a run in MLflow do not change"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert {point.step: point.value for point in history} == losses(run)


def test_wandb_has_one_run(run):
    pytest.importorskip("wandb")
    folders = [path.name for path in (run / "wandb").glob("offline-run-*")]
    identity = json.loads((run / "out" / "run.json").read_text())["id"]
    assert [folder.rpartition("-")[2] for folder in folders] == [identity] * 2


def test_trackio_has_one_run(run):
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    # its folder is that of its first import in this process, so that other runs may be there
    with contextlib.closing(sqlite3.connect(storage.get_project_db_path("huggingface"))) as database:
        rows = database.execute("select run_name, metrics from metrics").fetchall()
    values = [json.loads(metrics) for name, metrics in rows if name == name_of(run)]
    shown = {value["train/global_step"]: value["train/loss"] for value in values if "train/loss" in value}
    assert shown == losses(run)


def test_a_new_run_in_the_folder_has_charts_of_its_own(tmp_path):
    """--overwrite_output_dir deletes TensorBoard's events, too."""
    pytest.importorskip("tensorboard")
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([90]))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", data, "--max_length", "128", "--use_cpu"]
    flags += ["--report_to", "tensorboard", "--output_dir", str(tmp_path / "out")]
    for _ in range(2):
        assert main([*flags, "--max_steps", "1", "--overwrite_output_dir", "True"]) == 0
        assert len(list(Path(tmp_path / "out" / "runs").iterdir())) == 1
