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
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-w")


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

    Compiling takes about two minutes of one core; ranks that start together wait for one of them. Each environment has
    libraries of its own, linked from the same objects: with another environment's, a process would have two torches.
    """
    folder, torch = _folder(), _torch_folder()
    linked = folder / hashlib.sha256(str(torch).encode()).hexdigest()[:12]
    linked.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
        device = _link(_compile(folder, "softcuda.cpp"), linked / "libsoftcuda.so", libraries)
        libraries += ["-ltorch", "-ltorch_python", f"-L{linked}", f"-Wl,-rpath,{linked}", "-lsoftcuda"]
        nccl = _link(_compile(folder, "softnccl.cpp"), linked / "softnccl.so", libraries)
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


def _compile(folder: Path, source: str) -> Path:
    torch = _torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*_FLAGS, "-c", str(_SOURCES / source), *(f"-I{include}" for include in includes)]
    return _made((folder / source).with_suffix(".o"), flags)


def _link(object_file: Path, path: Path, libraries: list[str]) -> Path:
    return _made(path, ["-shared", str(object_file), *libraries])


def _made(path: Path, flags: list[str]) -> Path:
    """Return `path`, which g++ has made with these flags, now or before."""
    if path.exists():
        return path
    unfinished = path.with_suffix(".unfinished")
    done = subprocess.run(["g++", *flags, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ {' '.join(flags)} failed:\n{done.stderr}")
    unfinished.replace(path)
    return path
