"""Real runs of `longctx.train`, in which every rank measures its own memory, files and messages, phase by phase."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from longctx.launch.store import STORE_FILE, private_folder

from ..ranks import run_group, start_server
from .formulas import NODE

PATIENCE = 1500.0
"""Seconds of a run."""
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)
IMPORTS = ("longctx.train", "longctx.run", "longctx.settings.resolve", "longctx.report.memory_advice")


class Phase(NamedTuple):
    """What one rank did between two moments of a run. Sizes are in bytes."""

    seconds: float
    rise: int
    """Of the peak of host memory (VmHWM), above what was resident (VmRSS) at its beginning."""
    read: int
    """By system calls (rchar), which does not count mapped files."""
    asked: int
    """Of checkpoint states and stored weights, whether mapped or not."""
    written: dict[str, int]
    """Safetensors file -> its size."""
    opened: Counter[str]
    """Path in a folder of the run -> how often it was opened."""
    calls: Counter[str]
    """Calls of the process group's store by the main thread, by method."""
    received: int
    """Values that the store has returned."""
    gathered: int
    """Tensors that are in one piece on this rank for a moment."""
    writing: list[tuple[float, float]]
    """When each file of weights was begun and done, in seconds of a clock that all ranks share."""


class Run(NamedTuple):
    """One start of a run."""

    output: Path
    flags: Sequence[str]
    folders: Sequence[Path]
    """Those whose files are counted."""
    file_bytes: int | None = None
    """Most bytes of a file of weights and of a file of states, in place of longctx's own limits."""


def measured(num_ranks: int, run: Run) -> list[dict[str, Phase]]:
    """Start a run on gloo, and return what each rank measured: `loading`, `checking`, `resuming`, `saving`, `start`.

    All ranks run on this machine, and take themselves for those of nodes with 8 ranks.

    Ranks are forked from a process that has imported longctx, so that neither memory nor time is of its imports:
    `write_model` has started that process.

    Raises:
        RuntimeError: if the run fails, with the output of the rank that failed first.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    folder = run.output.with_name(f"{run.output.name}-ranks")
    argument = (run._replace(flags=[*run.flags, "--output_dir", str(run.output)]), port, time.time())
    environment = {"OMP_NUM_THREADS": "1"}
    ending = run_group(num_ranks, _train, argument, environment=environment, folder=folder, timeout=PATIENCE)
    if ending.status != "ok":
        raise RuntimeError(f"{ending.status}: {ending.error}\n{ending.log}")
    shutil.rmtree(folder)
    return list(ending.reports)


def _train(argument: tuple[Run, int, float]) -> dict[str, Phase]:
    """On every rank."""
    run, port, launched = argument
    rank = int(os.environ["RANK"])
    os.environ.pop(STORE_FILE, None)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": str(rank // NODE)}
    os.environ["THP_MEM_ALLOC_ENABLE"] = "0"
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # so that tensors take memory as long as they live, and no more
    os.environ |= {"LOCAL_RANK": str(rank % NODE), "LOCAL_WORLD_SIZE": str(min(NODE, int(os.environ["WORLD_SIZE"])))}
    meter = _Meter(run, launched)
    from longctx.train import main

    if code := main(list(run.flags)):
        raise RuntimeError(f"longctx.train ended with exit code {code}")
    return meter.phases


def _host_memory(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux has it"
    return int(found[1]) * 1024


def _read_by_calls() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


class _Meter:
    """Measures each phase of a run in this process, by wrapping the functions with which the phases begin and end."""

    def __init__(self, run: Run, launched: float):
        import torch.distributed as dist
        from safetensors import safe_open
        from safetensors.torch import save_file
        from torch.distributed.tensor import DTensor
        from transformers import Trainer

        import longctx.run
        from longctx.model.rows import StoredWeight
        from longctx.run import preparation
        from longctx.training.checkpoint import storage, weights
        from longctx.training.checkpoint.trainer import ResumableMixin
        from longctx.training.trainer import SequenceTrainer

        self.phases: dict[str, Phase] = {}
        self.folders = tuple(str(folder) for folder in run.folders)
        self.launched = launched
        self._begin()
        if run.file_bytes is not None:
            weights.FILE_BYTES = run.file_bytes
            storage.write_states.__kwdefaults__ = {"leave_out": (), "file_bytes": run.file_bytes}
        _around(longctx.run, "load", before=self._begin)
        _around(Trainer, "_prepare_for_training", after=lambda _: self._end("loading"))
        _around(preparation, "checkpoint_to_resume", before=self._begin, after=lambda _: self._end("checking"))
        _around(ResumableMixin, "_restore", before=self._begin, after=lambda _: self._end("resuming"))
        _around(ResumableMixin, "_save_checkpoint", before=self._begin, after=lambda _: self._end("saving"))
        _around(SequenceTrainer, "training_step", after=lambda _: self._started())
        _around(DTensor, "full_tensor", after=self._gather)
        self._count_rows(StoredWeight)
        sys.addaudithook(lambda event, of: self._open(of[0]) if event == "open" else None)

        def open_safely(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._open(path)
            return safe_open(path, *args, **kwargs)

        def save(held: Any, path: Any, *args: Any) -> None:
            began = time.monotonic()
            save_file(held, path, *args)
            if Path(path).name.startswith("model"):
                self.writing.append((began, time.monotonic()))
            self.written[Path(path).name] = Path(path).stat().st_size

        _everywhere(safe_open, open_safely)
        _everywhere(save_file, save)
        for name in ("set", "get", "add", "check", "compare_set", "delete_key"):
            _around(dist.Store, name, after=partial(self._call, name))

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.opened: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.written: dict[str, int] = {}
        self.asked = self.received = self.gathered = 0
        self.writing: list[tuple[float, float]] = []
        self.began, self.before, self.read = time.monotonic(), _host_memory("VmRSS"), _read_by_calls()

    def _end(self, name: str) -> None:
        seconds, rise = time.monotonic() - self.began, _host_memory("VmHWM") - self.before
        read = _read_by_calls() - self.read
        self.phases[name] = Phase(
            *(seconds, rise, read, self.asked, self.written, self.opened, self.calls),
            *(self.received, self.gathered, self.writing),
        )
        self._begin()

    def _started(self) -> None:
        """Remember the first step, from the launch on."""
        if "start" not in self.phases:
            self._end("start")
            self.phases["start"] = self.phases["start"]._replace(seconds=time.time() - self.launched)

    def _open(self, path: Any) -> None:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folders):
            self.opened[os.fspath(path)] += 1

    def _gather(self, whole: Any) -> None:
        self.gathered += whole.nbytes

    def _count_rows(self, stored: Any) -> None:
        read = stored.read

        def count(weight: Any, first: int, into: Any, *buffer_and_file: Any) -> None:
            read(weight, first, into, *buffer_and_file)
            self.asked += into.numel() * weight.stored.itemsize

        stored.read = count

    def _call(self, name: str, result: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # not what watches other ranks
            self.calls[name] += 1
            self.received += len(result) if isinstance(result, bytes) else 0


def _around(
    owner: Any, name: str, *, before: Callable[[], None] | None = None, after: Callable[[Any], None] | None = None
) -> None:
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = function(*args, **kwargs)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, call)


def _everywhere(function: Any, replacement: Any) -> None:
    """Replace a function in every module that has imported it."""
    for module in list(sys.modules.values()):
        for name in [name for name, value in list(vars(module).items()) if value is function]:
            setattr(module, name, replacement)


def model_config(*, hidden: int, layers: int, vocabulary: int) -> Any:
    """Return the configuration of a Llama."""
    from transformers import LlamaConfig

    heads = max(4, hidden // 64)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def converted_config() -> Any:
    """Return the configuration of a DeepSeek-V3 of 98M parameters, whose files hold each expert by itself."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **{"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "first_k_dense_replace": 1},
        **{"moe_intermediate_size": 512, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4},
        **{"topk_group": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256},
        **{"kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        vocab_size=32_000,
        dtype="bfloat16",
    )


def write_model(folder: Path, config: Any) -> None:
    """Save a model of random weights in bf16, and tiny's tokenizer, in another process, whose memory goes with it."""
    start_server(*IMPORTS)
    with private_folder() as private:
        ending = run_group(
            1, _write, (str(folder), config), environment={}, folder=Path(private, "ranks"), timeout=PATIENCE
        )
    assert ending.status == "ok", ending.log


def _write(argument: tuple[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    from longctx.model.tiny import tiny_tokenizer

    folder, config = argument
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # in the config's dtype
    tiny_tokenizer().save_pretrained(folder)


def flags(folder: Path, num_ranks: int, *, length: int, steps: int, resume: Path | None = None) -> list[str]:
    """Return the flags of a run of one sequence group on FSDP2, whose data is written to the folder.

    Args:
        resume: the checkpoint to go on from. Without, the run saves one after each step.
    """
    data = folder / "data.jsonl"
    if not data.exists():
        ids = [[3 + (document + token) % 250 for token in range(length - 2)] for document in range(4)]
        data.write_text("".join(json.dumps({"input_ids": each, "labels": each}) + "\n" for each in ids))
    given = f"--max_steps {steps} --max_length {length} --per_device_train_batch_size 1 --engine fsdp2 --use_cpu True"
    given += f" --report_to none --disable_tqdm True --bf16 False --sp {num_ranks} --sp_backend ring"
    if resume is None:
        given += " --save_strategy steps --save_steps 1"
    else:
        given += f" --save_strategy no --resume_from_checkpoint {resume}"
    return [*given.split(), "--model_name_or_path", str(folder / "model"), "--dataset_name", str(data)]
