"""How a rank of a run starts."""

from __future__ import annotations

import os
import resource

from longctx.run.processes import start_processes
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.workers import run_ranks


def limits():
    """The limits of open files before and after the start of a run."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, most))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--use_cpu", "True", "--max_length", "64"]
    start_processes(resolve(parse_flags(flags), read_profile(), os.environ))
    return most, resource.getrlimit(resource.RLIMIT_NOFILE)


def test_as_many_files_may_be_open_as_the_system_allows():
    """Gloo opens a file for each rank and 11 more, where many systems allow 1,024 unless they are asked for more."""
    [(most, found)] = run_ranks(1, f"{__name__}:limits")
    assert found == (most, most)
    assert most > 200
