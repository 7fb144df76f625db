"""`python -m tests.golden`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import golden
from tests.golden import GROUPS
from tests.golden.compare import differences, record, recorded, values_of

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Returns the exit code: 1 if something differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=golden.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"all, or some of {', '.join(GROUPS)}")
    parser.add_argument("--record", action="store_true", help="commit what this tree computes")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, run beside this tree")
    parser.add_argument("--quick", action="store_true", help="only the part that `.ci/run` compares")
    parser.add_argument(
        "--dump", type=Path, metavar="FOLDER", help="write all values, measured ones too, and compare nothing"
    )
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the tests; accelerate sets it by the number of cores
    if unknown := set(asked.groups) - set(GROUPS):
        parser.error(f"no group is called {', '.join(sorted(unknown))}. Groups are {', '.join(GROUPS)}.")
    groups = [group for group in GROUPS if group in asked.groups or not asked.groups]
    if asked.dump:
        return _dump(groups, asked.dump, quick=asked.quick)
    found = _against(asked.against, groups, asked.quick) if asked.against else _recorded(groups, asked)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} differences in {', '.join(groups)}")
    return int(bool(found) and not asked.record)


def _recorded(groups: list[str], asked: argparse.Namespace) -> list[str]:
    found = []
    for group in groups:
        start = time.monotonic()
        now = values_of(group, quick=asked.quick and not asked.record)
        before = recorded(group)
        if before or not asked.record:  # else each value would be printed as new
            found += differences(group, before, now, partial=asked.quick and not asked.record)
        if asked.record:
            record(group, now)
        print(f"{group}: {len(now)} values in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return found


def _dump(groups: list[str], folder: Path, *, quick: bool) -> int:
    import longctx

    assert Path(longctx.__file__ or "").is_relative_to(ROOT), (
        f"longctx is imported from {longctx.__file__}, not from {ROOT}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for group in groups:
        start = time.monotonic()
        (folder / f"{group}.json").write_text(json.dumps(values_of(group, quick=quick, measured=True)))
        print(f"{group}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


def _against(commit: str, groups: list[str], quick: bool) -> list[str]:
    """Run both trees at the same time, each with its own goldens, and compare what they computed."""
    with tempfile.TemporaryDirectory() as work:
        old = Path(work, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", old, commit], cwd=ROOT, check=True)
        try:
            if not (old / "tests" / "golden" / "__main__.py").exists():
                raise SystemExit(f"{commit} has no goldens. Name a commit whose tests/golden computes them.")
            folders = {old: Path(work, "old"), ROOT: Path(work, "new")}
            command = [sys.executable, "-m", "tests.golden", *groups, *(["--quick"] if quick else []), "--dump"]
            running = [
                subprocess.Popen([*command, folder], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)})
                for tree, folder in folders.items()
            ]
            ended = [process.wait() for process in running]
            if any(ended):
                raise SystemExit("one of the trees could not compute its goldens; its error is above")
            loaded = [
                [json.loads((folder / f"{group}.json").read_text()) for group in groups] for folder in folders.values()
            ]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)
    return [line for group, *pair in zip(groups, *loaded, strict=True) for line in differences(group, *pair)]


if __name__ == "__main__":
    raise SystemExit(main())
