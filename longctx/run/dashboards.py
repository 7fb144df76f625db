"""--report_to: a resumed run goes on with the charts that it has begun."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment
from transformers import Trainer
from transformers.integrations import MLflowCallback, TensorBoardCallback, WandbCallback

from longctx.training.checkpoint.folder import EVENTS_FOLDER, RunRecord

RUN_TAG = "longctx.run"
"""The tag of a run in MLflow that has the id of run.json."""


def charts_go_on(trainer: Trainer, *, resumed_at: int | None) -> AbstractContextManager[None]:
    """Return a context in which services of --report_to take a resumed run for the one that has begun in its folder.

    They tell runs apart by the id of run.json. Called on all ranks, of which the first reports.

    Args:
        resumed_at: the step of the checkpoint; None for a run from its beginning.
    """
    args, env = trainer.args, os.environ
    if not args.report_to or not trainer.is_world_process_zero():
        return nullcontext()
    record = RunRecord.read(Path(args.output_dir))
    assert record is not None, "run.json is written before training"
    services = {type(callback) for callback in trainer.callback_handler.callbacks}
    args.run_name = args.run_name or f"{Path(args.output_dir).resolve().name}-{record.id[:6]}"  # trackio knows no id
    variables: dict[str, str] = {}
    if TensorBoardCallback in services:
        _one_folder_of_events(trainer, resumed_at)
    if WandbCallback in services and "WANDB_RUN_ID" not in env:
        variables |= {"WANDB_RUN_ID": record.id, "WANDB_RESUME": env.get("WANDB_RESUME", "allow")}
    if MLflowCallback in services and "MLFLOW_RUN_ID" not in env:
        variables["MLFLOW_TAGS"] = json.dumps({RUN_TAG: record.id} | json.loads(env.get("MLFLOW_TAGS") or "{}"))
        if resumed_at is not None and (run_id := _mlflow_run(record.id)):
            variables |= {"MLFLOW_RUN_ID": run_id, "MLFLOW_MAX_LOG_PARAMS": "0"}  # MLflow lets no parameter change
    return patch_environment(**variables)


def _one_folder_of_events(trainer: Trainer, resumed_at: int | None) -> None:
    """Let TensorBoard's events go to one folder, in which those after the checkpoint of a resumed run are void."""
    from torch.utils.tensorboard import SummaryWriter

    callback: Any = trainer.pop_callback(TensorBoardCallback)
    folder = callback.logging_dir or os.path.join(trainer.args.output_dir, EVENTS_FOLDER)
    is_own = callback.logging_dir is None or resumed_at is not None  # other runs may share a folder of the user's
    callback = TensorBoardCallback(SummaryWriter(folder, purge_step=(resumed_at or 0) + 1 if is_own else None))
    callback.logging_dir = folder
    trainer.add_callback(callback)


def _mlflow_run(run_id: str) -> str | None:
    """Return MLflow's id of the last run that has begun with this id of run.json."""
    import mlflow

    query = {"filter_string": f"tags.`{RUN_TAG}` = '{run_id}'", "search_all_experiments": True, "max_results": 1}
    return next((run.info.run_id for run in mlflow.search_runs(**query, output_format="list")), None)
