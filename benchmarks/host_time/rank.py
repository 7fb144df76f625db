"""One process of a contestant: it trains in turns with the others, and tells what each of its turns took.

It is started as a file with a tree on PYTHONPATH, so that `longctx` is that tree's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing import RawArray
from multiprocessing.connection import Client, Connection
from types import FrameType
from typing import Any

from torch.utils.data._utils.fetch import _MapDatasetFetcher
from transformers import Trainer, TrainerCallback

WORKER = ("python", "c", "seconds", "fetched", "counted", "is_counting")
"""What a loader's worker and the main process tell each other. Calls are those of counted micro-batches alone."""
_calls = [0, 0]
"""Python functions and C functions."""


class Turns(TrainerCallback):
    """Begins a step when it is this contestant's turn; a turn ends where the next step would begin."""

    def __init__(self, connection: Connection, worker: Any):
        self.connection, self.worker = connection, worker
        self.losses: list[float] = []
        """Losses of the micro-batches of the turn on this rank."""
        self._began = [0.0] * 3

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)
        seconds = map(float.__sub__, _clocks(), self._began)
        turn = dict(zip(("wall", "thread", "process", "python", "c"), (*seconds, *_calls), strict=True))
        worker = dict(zip(WORKER, self.worker, strict=True))
        self.connection.send(turn | {"losses": self.losses, "worker": worker})
        how = self.connection.recv()
        if how == "stop":
            os._exit(0)
        self.losses, _calls[:] = [], [0, 0]
        self.worker[-1] = how == "count"
        self._began = _clocks()
        sys.setprofile(_count if how == "count" else None)


def _clocks() -> list[float]:
    return [time.perf_counter(), time.thread_time(), time.process_time()]


def _count(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _calls[0] += 1
    elif event == "c_call":
        _calls[1] += 1


def _take_part(turns: Turns) -> None:
    """Make every Trainer of this process train in turns, and its loader's worker count."""
    train, step, fetch = Trainer.train, Trainer.training_step, _MapDatasetFetcher.fetch
    main_process = os.getpid()

    def training(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        self.add_callback(turns)
        return train(self, *arguments, **keywords)

    def training_step(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        loss = step(self, *arguments, **keywords)
        turns.losses.append(loss.item())
        return loss

    def fetching(self: Any, rows: Any) -> Any:
        if os.getpid() == main_process:
            return fetch(self, rows)
        began, worker = time.thread_time(), turns.worker
        _calls[:] = 0, 0
        sys.setprofile(_count if worker[-1] else None)
        try:
            return fetch(self, rows)
        finally:
            sys.setprofile(None)
            took = (*_calls, time.thread_time() - began, 1, worker[-1])
            worker[:-1] = [before + now for before, now in zip(worker[:-1], took, strict=True)]

    Trainer.train, Trainer.training_step, _MapDatasetFetcher.fetch = training, training_step, fetching  # type: ignore


def train_stock(stock: dict[str, Any]) -> None:
    import torch
    from accelerate import ParallelismConfig
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    options = stock["options"]
    if degrees := stock["degrees"]:
        from benchmarks.elsewhere.steps import start_stock

        ulysses = "sp_size" in degrees
        start_stock("deepspeed" if ulysses else "fsdp2", 3 if ulysses else None)
        options |= {"parallelism_config": ParallelismConfig(**degrees)}
        options |= {"accelerator_config": {"use_configured_state": True}}
    args = SFTConfig(**options, model_init_kwargs={"dtype": torch.float32, "attn_implementation": "sdpa"})
    data = load_dataset("json", data_files=stock["data"], split="train")
    SFTTrainer(stock["model"], args, train_dataset=data).train()


def main(address: str, task: dict[str, Any]) -> None:
    """Train, until whoever listens at this address says that it is enough."""
    import longctx
    from longctx.train import main as train

    [folder] = longctx.__path__
    assert folder == f"{task['tree']}/longctx", f"{folder} is not of {task['tree']}"
    connection = Client(address)
    connection.send(int(os.environ.get("RANK", "0")))
    _take_part(Turns(connection, RawArray("d", len(WORKER))))
    if "stock" in task:
        train_stock(task["stock"])
    else:
        train(task["flags"])


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
