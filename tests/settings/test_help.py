"""--help, --help-all and mistyped flags, from the table of flags."""

from __future__ import annotations

import re

import pytest

from longctx.dpo import main as dpo
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.read import parse_flags
from longctx.train import main

METHODS = pytest.mark.parametrize(("run", "method"), [(main, SFT), (dpo, DPO)], ids=["train", "dpo"])


def shown(capsys, *arguments, run=main):
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def listed(text, column):
    """{flag: what is said of it, in one line}; a name without text beside it has a line of its own."""
    entries = re.findall(rf"^  --([\w-]+)((?:.|\n {{{column}}})*)", text, re.MULTILINE)
    assert len({name for name, _ in entries}) == len(entries)
    return {name: " ".join(said.split()) for name, said in entries}


@METHODS
def test_short_help_fits_a_screen_and_has_the_defaults_that_apply(run, method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, "--help", run=run)
    lines = text.splitlines()
    assert len(lines) <= 66
    assert max(map(len, lines[1:])) <= 80
    said, values = listed(text, 33), parse_flags([], method)
    assert said.keys() == {flag.name for flag in method.flags.values() if flag.common} | {"config", "help-all"}
    for name in said.keys() & values.keys():
        value = " ".join(values[name]) if isinstance(values[name], list) else values[name]
        default = method.flags[name].default_is or value
        assert said[name].endswith(f"[{default}]") == (default not in (None, False, 0, "")), name
        assert said[name].startswith(method.flags[name].help.partition(". ")[0].removesuffix("."))


@METHODS
def test_help_all_lists_every_flag_once_with_values_and_defaults(run, method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(capsys, "--help-all", run=run)
    said, values = listed(text, 36), parse_flags([], method)
    assert said.keys() == {*values, "config", "help-all"}
    for flag in method.flags.values():
        assert said[flag.name], flag.name
        assert flag.idle in said[flag.name]
        assert flag.instead in said[flag.name]
        assert all(word in said[flag.name] for word in flag.choices)
    assert said["learning_rate"].endswith(f"Default: {values['learning_rate']}.")
    assert said["max_length"].endswith("Default: the model's context.")
    assert said["packing"].endswith("Default: True.")
    assert said["memory"].endswith("fastest, auto. Default: auto on GPUs, else balanced.")
    assert said["local_rank"] == "No effect since the launcher sets the rank."
    assert said["fsdp_config"].startswith("Refused: set FSDP's options in an FSDP profile")
    assert said["load_in_8bit"] == "Load the base model in 8 bits. Only False is accepted."
    assert said["neftune_noise_alpha"].endswith("to embeddings. Any value is refused.")
    assert said["debug"] == "Debugging aid of transformers. Any value is refused."
    assert text == shown(capsys, "--max_steps", "5", "--help_all", run=run)


def test_only_the_first_rank_prints_the_help(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert shown(capsys, "--help") == ""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--max_step", "5"], ["--max_step is not a flag", "Did you mean --max_steps?", "--help-all"]),
        (["--sp", "2", "--Max-Steps=5"], ["--Max-Steps is not a flag", "Did you mean --max_steps?"]),
        (["--max_seq_len", "5"], ["--max_seq_len is not a flag", "Did you mean --max_length?"]),
        (["--lr", "1"], ["--lr is not a flag. Did you mean --learning_rate?"]),
        (["--num_generations=3"], ["--num_generations", "one of another method: longctx train does"]),
        (["--qqqqqqqq"], ["--qqqqqqqq is not a flag. All flags: longctx train --help-all"]),
        (["5"], ["'5' belongs to no flag. All flags: longctx train --help-all"]),
        (["--sp"], ["--sp needs a value. All flags: longctx train --help-all"]),
        (["--config"], ["--config needs a value"]),
    ],
    ids=lambda value: value[0],
)
def test_mistyped_flags(arguments, parts, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("longctx: error: ")
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error
