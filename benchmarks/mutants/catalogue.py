"""The committed list of mutants: `*.toml` beside this module, where the name of each array is the mutants' class."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug."""

    kind: str
    """The class of bugs that it stands for."""
    wrong: str
    """What goes wrong, in one sentence; unique."""
    file: str
    """Path from the root of the repository."""
    old: str
    """Text that occurs in the file exactly once."""
    new: str
    """What takes its place."""
    tests: tuple[str, ...]
    """Default tests that could notice it: `file` or `file::test`, as pytest takes them."""
    survives: str = ""
    """Why no test can notice it; empty where one should."""

    def planted_in(self, text: str) -> str:
        """The file's text with the bug.

        Raises:
            ValueError: if the old text does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds the text of the mutant {self.wrong!r} {count} times, expected 1.")
        return text.replace(self.old, self.new)

    def key(self, root: Path = ROOT) -> str:
        """A digest of the bug, the file that it is planted in, and the files of its tests."""
        texts = [(root / name).read_text() for name in (self.file, *test_files(self.tests))]
        return digest([asdict(self), *texts])


def load(folder: Path = FOLDER) -> list[Mutant]:
    """All mutants, in the order of the files and of their texts."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for kind, entries in tomllib.loads(path.read_text()).items():
            mutants += [Mutant(kind=kind, **{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    return mutants


def test_files(tests: tuple[str, ...]) -> list[str]:
    """The files of these tests, each once."""
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


def digest(value: object) -> str:
    """A short name for plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
