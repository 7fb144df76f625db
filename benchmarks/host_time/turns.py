"""Contestants that take steps in turns, each in processes of its own, so that a slow phase of the machine slows all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RANK = Path(__file__).with_name("rank.py")
Turn = list[dict[str, Any]]
"""What a turn took, by rank."""


class Contestant:
    """Processes that train; each waits where a step begins."""

    def __init__(self, name: str, task: Mapping[str, Any], ranks: int, folder: Path):
        """Start the processes.

        Args:
            task: what `benchmarks.host_time.rank` is told; `longctx` is that of its `tree`.
            folder: for the output, empty.
        """
        self.name, self.ranks, self.log = name, ranks, folder / "log"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / "turns"))
        self._socket.listen()
        self._socket.settimeout(1)
        command = [sys.executable, "-P"]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += [str(RANK), str(folder / "turns"), json.dumps(task)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": task["tree"]}
        environment |= {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        self._connections: list[Connection] = []

    def wait_until_started(self) -> None:
        """Wait until every process has come to its first step."""
        found: dict[int, Connection] = {}
        while len(found) < self.ranks:
            try:
                connection = Connection(self._socket.accept()[0].detach())
            except TimeoutError:
                self._check_running()
            else:
                found[connection.recv()] = connection
        self._connections = [found[rank] for rank in range(self.ranks)]
        self._told()

    def step(self, how: str = "step") -> Turn:
        """Take a step on all ranks. `how` is step, count (calls) or profile."""
        for connection in self._connections:
            connection.send(how)
        return self._told()

    def stop(self) -> None:
        """End the processes, also in the middle of a step."""
        for connection in self._connections:
            with suppress(OSError):
                connection.send("stop")
        self.process.terminate()
        self.process.wait()
        self._socket.close()

    def _told(self) -> Turn:
        try:
            return [connection.recv() for connection in self._connections]
        except EOFError:
            self.process.wait()
            self._check_running()
            raise

    def _check_running(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended:\n{self.log.read_text()[-4000:]}")
