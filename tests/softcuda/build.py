"""Compile the soft device once for each version of torch and of these sources, and keep it in a cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path

TORCH = "2.13."
"""The release whose internals the sources are written for."""

_SOURCES = Path(__file__).with_name("cpp")
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")


def unavailable() -> str | None:
    """Return why there can be no soft device here, or None. Neither torch is imported nor anything compiled."""
    found = version("torch")
    if not found.startswith(TORCH):
        return f"the soft device is written for torch {TORCH}x, and this is {found}"
    if "+cpu" not in found:
        return f"the soft device stands in for CUDA in a CPU build of torch, and this is {found}"
    if shutil.which("g++") is None:
        return "the soft device needs g++"
    return None


def build() -> tuple[Path, Path]:
    """Return the device's library and the Python module of its NCCL, compiled if they are not in the cache.

    Compiling takes about two minutes of one core; ranks that start together wait for one of them.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch = _torch_folder()
        device = _compile(folder, "softcuda.cpp", "libsoftcuda.so", [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"])
        libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        own = [f"-L{folder}", "-lsoftcuda", f"-Wl,-rpath,{folder}"]
        nccl = _compile(folder, "softnccl.cpp", "softnccl.so", libraries + own)
    return device, nccl


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    python = sysconfig.get_config_var("SOABI")
    return cache / "longctx-tests" / f"softcuda-{version('torch')}-{python}-{digest.hexdigest()[:12]}"


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None, "torch is a namespace package"
    return Path(found.origin).parent


def _compile(folder: Path, source: str, target: str, libraries: list[str]) -> Path:
    path = folder / target
    if path.exists():
        return path
    torch = _torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = ["g++", *_FLAGS, str(_SOURCES / source), *(f"-I{include}" for include in includes)]
    unfinished = path.with_suffix(".unfinished")
    command += [*libraries, f"-Wl,-rpath,{torch}/lib", "-o", str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    unfinished.replace(path)
    return path
