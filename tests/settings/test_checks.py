"""The table of checks: every function that refuses a value of a setting is in it, with settings that there are."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

from longctx.settings.checks import table
from longctx.settings.flags import parse_flags
from longctx.settings.methods import DPO

FOLDER = Path(__file__).parents[2] / "longctx" / "settings"

READERS = {"flags", "help", "profile", "checks"}
"""Modules that refuse what cannot be read at all."""

PROFILE_KEYS = {
    "distributed_type",
    "fsdp_version",
    "mixed_precision",
    "parallelism_config_cp_size",
    "parallelism_config_dp_shard_size",
    "parallelism_config_sp_size",
    "parallelism_config_tp_size",
    "zero_stage",
}


def _refusing() -> set[str]:
    """`module.function` of every function that raises a ValueError itself."""
    found = set()
    for path in FOLDER.glob("*.py"):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef) or path.stem in READERS:
                continue
            raised = (node.exc for node in ast.walk(function) if isinstance(node, ast.Raise))
            if any(isinstance(error, ast.Call) and ast.unparse(error.func) == "ValueError" for error in raised):
                found.add(f"{path.stem}.{function.name}")
    return found


def test_every_function_that_refuses_a_setting_is_in_the_table():
    places = [row.place for row in table()]
    assert _refusing() - set(places) == set()
    assert len(places) == len(set(places))


def test_rows_name_settings_that_there_are_and_say_what_is_checked():
    known = parse_flags([]).values.keys() | parse_flags([], DPO).values.keys() | PROFILE_KEYS
    for row in table():
        assert set(row.settings) <= known, f"{row.place} is about {sorted(set(row.settings) - known)}"
        assert row.what[:6] + row.what[-1] == "Check .", f"{row.place} says {row.what!r}"


def test_the_table_is_printed(capsys):
    runpy.run_module("longctx.settings", run_name="__main__")
    printed = capsys.readouterr().out
    for row in table():
        assert f"{row.place}: {row.what}\n    {' '.join(row.settings)}\n" in printed
