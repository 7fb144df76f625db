"""Which of the long tests `.ci/run` takes: those of what has changed, and each day a seventh of all.

    pytest -m long --touched HEAD~1                  # of what has changed since a commit
    pytest -m long --touched HEAD~1 --at_most 40     # 40 of them, drawn anew for each commit that is tested
    pytest -m long --seventh 3                       # a seventh of all, another one for each number

With both selections, a test has to be in each of them.
"""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]


def add_options(parser) -> None:
    """Add the three options to pytest's."""
    parser.addoption("--touched", metavar="COMMIT", help="only tests of what has changed since this commit")
    parser.addoption("--at_most", metavar="N", type=int, help="only this many of what the other options select")
    parser.addoption("--seventh", metavar="DAY", type=int, help="only tests whose turn it is on this day, counted up")


def select(config, items) -> None:
    """Leave out of `items` what the options do not select."""
    commit, day = config.getoption("--touched"), config.getoption("--seventh")
    if commit is None and day is None:
        return
    places = None if commit is None else {*map(place_of_tests, changed_since(commit))}
    chosen, others = [], []
    for item in items:
        has_turn = day is None or zlib.crc32(item.nodeid.encode()) % 7 == day % 7
        is_touched = places is None or any(is_in(item.nodeid, place) for place in places)
        (chosen if has_turn and is_touched else others).append(item)
    if (limit := config.getoption("--at_most")) is not None:
        head = git("rev-parse", "HEAD")
        drawn = sorted(chosen, key=lambda item: zlib.crc32(f"{head} {item.nodeid}".encode()))
        others += drawn[limit:]
        chosen = [item for item in chosen if item in drawn[:limit]]
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def changed_since(commit: str) -> list[str]:
    """Return the Python files that have changed since a commit, as paths relative to the repository."""
    return git("diff", "--name-only", commit, "--", "*.py").splitlines()


def git(*arguments: str) -> str:
    """Return what a git command prints about this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def place_of_tests(file: str) -> str:
    """Return the folder or the file of the tests of a file, which mirror the folders of the code."""
    path = PurePosixPath(file)
    if path.parts[0] == "tests":
        return file if path.name.startswith("test_") else str(path.parent)
    inside = path.parts[1:] if path.parts[0] == "longctx" else path.parts
    folder = "/".join(("tests", *inside[:1]))
    return folder if len(inside) > 1 else f"tests/test_{path.name}"


def is_in(nodeid: str, place: str) -> bool:
    """Whether a test lies in a folder or a file. Helpers right in tests/ belong to no test in particular."""
    return place != "tests" and nodeid.startswith((f"{place}/", f"{place}::"))
