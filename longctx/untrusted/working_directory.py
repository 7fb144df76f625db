"""Keep the working directory out of imports: a model's folder may hold a `trl.py`.

`python -m` puts the directory it is started in first on `sys.path`, and `accelerate launch -m` and `torchrun -m` start
their processes that way. This module is imported before any other, and imports only what Python has already loaded.
"""

import os
import sys


def leave_out_of_imports() -> None:
    """Take the working directory off `sys.path` in `python -m longctx…`, here and in the processes it starts.

    A checkout of longctx stays, as do all paths in other programs.
    """
    if not _is_started_as_module() or not sys.path:
        return
    first = os.path.realpath(sys.path[0] or os.curdir)
    if sys.flags.safe_path or first != os.path.realpath(os.curdir) or first == _root():
        return
    del sys.path[0]
    os.environ.update(without_working_directory())


def without_working_directory() -> dict[str, str]:
    """Return the environment in which processes that longctx starts leave the working directory out, too."""
    return {} if os.path.realpath(os.curdir) == _root() else {"PYTHONSAFEPATH": "1"}


def _root() -> str:
    """Return the folder that longctx was imported from."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def _is_started_as_module() -> bool:
    """Return whether Python is looking for the module of `-m`, and it is one of longctx."""
    if sys.argv[:1] != ["-m"]:
        return False
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    return module.partition(".")[0] in ("longctx", "benchmarks")
