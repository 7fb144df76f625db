"""Run functions on soft GPUs from a test, whose own process has torch without them.

pytest ── this module as a program, with SOFTCUDA=1
            └── fork server, which has imported torch with the soft device, transformers, DeepSpeed
                  ├── rank 0
                  └── rank 1 …
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.softcuda.build import build

_ROOT = Path(__file__).parents[2]


_AT_START = dict(os.environ)
"""Tests that train in pytest's own process leave DeepSpeed and Accelerate told to stay on the CPU."""


def soft_environment() -> dict[str, str]:
    """Return the environment of a program that is to have soft GPUs, once `build` has been called."""
    return _AT_START | {
        "SOFTCUDA": "1",
        "SOFTCUDA_STRICT": "1",
        "SOFTCUDA_WATCH": "1",
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).with_name("site")), str(_ROOT))),
        # A process that asked the CUDA runtime cannot fork processes that use CUDA; the driver's library may be.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


class SoftGPUs:
    """A context in which `run` runs functions. What they need is imported once."""

    def __enter__(self) -> SoftGPUs:
        build()
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=soft_environment()
            | {"SOFTCUDA_DEVICES": "4", "SOFTCUDA_WATCH": "0"},  # ranks are watched by themselves
            cwd=_ROOT,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        # It would wait for the end of its input without end: processes that other tests forked hold the pipe open, too.
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def run(
        self, num_gpus: int, target: str, *arguments: Any, timeout: float = 300, backend: str | None = "nccl"
    ) -> list[Any]:
        """Call `module:function(*arguments)` on every rank, which are those of `tests.workers.run_ranks`.

        Raises:
            AssertionError: with the output of all ranks, if one fails, meets a hazard or is not done in `timeout` s.
        """
        assert self._server.stdin is not None, "stdin is a pipe"
        assert self._server.stdout is not None, "stdout is a pipe"
        pickle.dump((num_gpus, target, arguments, timeout, backend), self._server.stdin)
        self._server.stdin.flush()
        results, error = pickle.load(self._server.stdout)
        if error is not None:
            raise AssertionError(error)
        return results


def _serve() -> None:
    from tests.workers import run_ranks

    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    while True:
        try:
            num_gpus, target, arguments, timeout, backend = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = run_ranks(num_gpus, target, *arguments, timeout=timeout, backend=backend), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
