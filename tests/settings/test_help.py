"""--help, --help-all and mistyped flags: quick, and never at odds with the parser that imports TRL."""

from __future__ import annotations

import contextlib
import re
import sys

import pytest

from longctx.settings import flag_sources, help
from longctx.settings.flag_sources import DEFAULTS
from longctx.settings.flags import parse_flags
from longctx.train import main


def shown(capsys, *arguments):
    with contextlib.suppress(SystemExit):
        assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_flags_that_the_sources_have_are_those_of_the_parser():
    known = help.flags()
    values = parse_flags([]).values
    assert known.keys() == values.keys()
    for flag in known.values():
        if flag.is_switch and flag.default is True:
            assert parse_flags([f"--no_{flag.name}"]).values[flag.name] is False


def test_short_help_fits_a_screen_and_has_the_defaults_that_apply(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, "--help")
    lines = text.splitlines()
    assert len(lines) <= 56
    assert max(map(len, lines)) <= 80
    applied = parse_flags([]).values | DEFAULTS
    listed = dict(re.findall(r"^  --([\w-]+) ((?:.|\n {10})*)", text, re.MULTILINE))
    assert list(listed) == [name for group in help.SHORT_HELP.values() for name in group]
    assert listed.keys() - applied.keys() == {"config", "help-all"}
    for name in listed.keys() & applied.keys():
        default = getattr(applied[name], "value", applied[name])
        if default is not None and default is not False:
            assert listed[name].endswith(f"[{default}]"), name
        elif "[" in listed[name]:  # a default that is worked out later
            assert name in ("sp", "max_length", "output_dir")


def test_help_all_lists_every_flag_once_with_the_defaults_that_apply(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(capsys, "--help-all")
    listed = re.findall(r"^  (?:-h, )?--([\w-]+)", text, re.MULTILINE)
    assert sorted(listed) == sorted([*parse_flags([]).values, "config", "help", "help_all"])
    assert text.index("--dry_run") < text.index("--learning_rate")
    entries = dict(zip(listed, re.split(r"^  (?:-h, )?--[\w-]+", text, flags=re.MULTILINE)[1:], strict=True))
    for name, default in DEFAULTS.items():
        assert f"Default: {'the model' if default is None else default}" in " ".join(entries[name].split()), name
    assert "Default: 2e-05." in entries["learning_rate"]
    assert "docs/howto/length.md" in entries["memory"]


def test_only_the_first_rank_prints_the_help(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert shown(capsys, "--help") == ""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--max_step", "5"], ["--max_step is not a flag", "Did you mean --max_steps?", "--help-all"]),
        (["--sp", "2", "--Max-Steps=5"], ["--Max-Steps is not a flag", "Did you mean --max_steps?"]),
        (["--no_packing"], ["--no_packing", "Use --packing False."]),
        (["--num_generations=3"], ["--num_generations", "It belongs to GRPO and RLOO: longctx train does"]),
        (["--qqqqqqqq"], ["--qqqqqqqq is not a flag. All flags: longctx train --help-all"]),
        (["--config"], ["--config", "expected one argument", "Give the path of a YAML file"]),
    ],
)
def test_mistyped_flags(arguments, parts, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("longctx: error: ")
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error
    with pytest.raises(ValueError, match=r"--\w+"):
        parse_flags(arguments)  # refuses it as well


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-seq-length", "5", "--torch_dtype=bfloat16", "--no-gradient-checkpointing"],
        ["--run_name", "--my own run", "--learning_rate", "-1e-4"],
        ["--", "--max_step"],
        ["-h"],
        ["--help_all"],
    ],
)
def test_what_argparse_takes_is_not_refused(arguments):
    help.check_names(arguments)


def test_names_of_a_file_are_checked_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("max_step: 5\n")
    with pytest.raises(ValueError, match=r"sets max_step, which is not a flag. Did you mean --max_steps\?"):
        help.check_names(["--config", str(path)])
    path.write_text("env: {A: 1}\nmax-seq-length: 5\n")
    help.check_names([f"--config={path}"])


# ------------------------------------------------------------------------------------------------
# Sources that might mean something else
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Return the fields of class C in a package that holds this source."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    flag_sources._parse.cache_clear()

    def read(source, **modules):
        package = tmp_path / "unlike_trl"
        package.mkdir()
        for name, text in {"__init__": source, **modules}.items():
            (package / f"{name}.py").write_text(text)
        return flag_sources.read_dataclass("unlike_trl", "C")

    yield read
    flag_sources._parse.cache_clear()


BASE = "from dataclasses import dataclass, field\n@dataclass\nclass Base:\n    a: int = 1\n    b: str = 'x'\n"


def test_fields_of_a_class_and_its_bases(read):
    source = """
from typing import TYPE_CHECKING, ClassVar, Literal
if TYPE_CHECKING:
    from .config import C
"""
    config = """
from .base import Base as B
import dataclasses
class Mixin:
    z: int
@dataclasses.dataclass(kw_only=True)
class C(B, Mixin):
    b: Literal["x", "y"] = dataclasses.field(default="y", metadata={"help": "B " "is", "aliases": ["--bee"]})
    c: ClassVar[int] = 3
    d: bool | None = dataclasses.field(init=False, default=None)
    e: float = 2 * 3.0
    f = 5
    def method(self):
        g: int = 1
"""
    fields = read(source, config=config, base=BASE)
    assert list(fields) == ["a", "b", "e"]
    assert fields["a"].default == 1
    assert fields["b"][2:] == ("y", "B is", ("--bee",))
    assert fields["b"].choices == ("x", "y")
    assert fields["e"].default is None


@pytest.mark.parametrize(
    "change",
    [
        "C = BASE_CHANGED",
        "@dataclass\nclass C(UnknownBase): pass",
        "@dataclass\nclass C(module.Base): pass",
        "@more_fields\n@dataclass\nclass C(Base): pass",
        "@dataclass\nclass C(Base, metaclass=Adds): pass",
        "@dataclass\nclass C(Base):\n    c: InitVar[int] = 1",
        "@dataclass\nclass C(Base):\n    if NEW:\n        c: int = 1",
        "@dataclass\nclass C(Base): pass\n@dataclass\nclass C: pass",
        "from missing import C",
    ],
)
def test_what_is_uncertain_is_left_to_the_parser(change, read):
    assert read(f"{BASE}{change}\n") is None


def test_without_certainty_everything_passes(monkeypatch, capsys):
    monkeypatch.setattr(help, "flags", lambda method: None)
    help.check_names(["--max_step", "5"])
    assert "--ddp_timeout" in shown(capsys, "--help")  # the parser's own, of all flags
    assert main(["--max_step", "5"]) == 2
    assert "Did you mean --max_steps?" in capsys.readouterr().err
