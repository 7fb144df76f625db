"""Run a function on several gloo processes and collect what each returns."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def run_ranks(world_size: int, target: str, *arguments, timeout: float = 300):
    """Call `module:function(*arguments)` on every rank of a gloo group; returns the results by rank.

    Raises AssertionError with the output of all ranks if one fails or the time-out (seconds) passes.
    """
    module, function = target.split(":")
    path = Path(importlib.import_module(module).__file__)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "arguments.pkl").write_bytes(pickle.dumps(arguments))
        processes = []
        for rank in range(world_size):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, __file__, str(path), function, folder]
            with open(Path(folder, f"{rank}.log"), "w") as output:
                processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
        logs = "\n".join(f"--- rank {r}\n{Path(folder, f'{r}.log').read_text()}" for r in range(world_size))
        assert codes == [0] * world_size, f"exit codes {codes} (None: timed out)\n{logs}"
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _main(path: str, function: str, folder: str) -> None:
    import importlib.util

    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    dist.init_process_group("gloo")
    result = getattr(module, function)(*pickle.loads(Path(folder, "arguments.pkl").read_bytes()))
    Path(folder, f"{dist.get_rank()}.pkl").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
