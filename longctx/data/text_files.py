"""Text and source files, one document each; among them the standard library of the running Python."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import Features, Value

from longctx.data.errors import RECORD_BYTES, DataError, too_long, unreadable

STDLIB = "stdlib"
"""Value of `--dataset_name` that selects the running Python's own standard-library sources."""

_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


class TextFiles:
    """Text files as records, one per file, in the order given."""

    def __init__(self, files: Sequence[Path], text_field: str) -> None:
        self.files = list(files)
        self.text_field = text_field
        self.features = Features({text_field: Value("string")})

    def places(self) -> Iterator[str]:
        """The file of each record."""
        return map(str, self.files)

    def __call__(self) -> Iterator[dict[str, str]]:
        for path in self.files:
            yield {self.text_field: _read_text(path)}


def _read_text(path: Path) -> str:
    """Return the text of a file with its line ends, without a UTF-8 byte order mark."""
    try:
        with path.open("rb") as file:
            data = file.read(RECORD_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > RECORD_BYTES:
        raise too_long(str(path), "a text", RECORD_BYTES, "Divide it into several files, one document each.")
    remedy = "Give a glob that leaves it out (such as 'folder/**/*.py'), or convert it to UTF-8 text."
    if b"\x00" in data:
        raise DataError(f"{path}: NUL byte at offset {data.index(0)}; this is a binary file, expected text. {remedy}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}). {remedy}"
        ) from None


def stdlib_files() -> list[Path]:
    """Python sources of the running interpreter's standard library, sorted by path.

    Without installed packages (site-packages, dist-packages) and the test, tests and idlelib trees.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts)]
    if not files:
        raise DataError(
            f"'{STDLIB}': no .py files under {root}, where this Python keeps its standard library. "
            "Name another data set with --dataset_name."
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
