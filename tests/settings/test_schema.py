"""The table of flags: each row against the installed TRL, what follows from a row, and who sets a value."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from trl import DatasetMixtureConfig, DPOConfig, ModelConfig, ScriptArguments, SFTConfig

from longctx.completion import _flags_of
from longctx.launch.terminal import end_refused
from longctx.settings import schema
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.help import help_text
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.rules import fill
from longctx.settings.schema import BOOL, FLOAT, INT, TEXT, Flag, check
from tests.test_pages import load


def fields_of(*configs):
    return {field.name: field for config in configs for field in fields(config) if field.init}


OF_TRL = {
    "train": fields_of(SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig),
    "dpo": fields_of(DPOConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig),
}
METHODS = {"train": SFT, "dpo": DPO}
FIELDS = [(method, name) for method, found in OF_TRL.items() for name in found]
ROWS = [(name, flag) for name, method in METHODS.items() for flag in method.flags.values()]
OWN_ROWS = [(name, flag) for name, flag in ROWS if name == "train" or SFT.flags.get(flag.name) != flag]
"""Rows of each method, once."""

every_row = pytest.mark.parametrize(("method", "flag"), OWN_ROWS, ids=lambda value: getattr(value, "name", value))


# ------------------------------------------------------------------------------------------------
# Rows and the installed TRL
# ------------------------------------------------------------------------------------------------

KINDS = {
    "bool": {"BOOL"},
    "int": {"INT", "DEGREE", "MULTIPLE"},
    "float": {"FLOAT"},
    "list": {"TEXTS", "FLOATS", "ENTRIES", "NAMES"},
    "dict": {"JSON", "JSON_OR_TEXT"},
    "str": {"TEXT", "PATH", "FOLDER", "NAMES", "JSON_OR_TEXT", "NAME_OR_FALSE"},
}
"""Kinds that fit a type that a field's annotation has."""


@pytest.mark.parametrize(("method", "name"), FIELDS)
def test_each_field_of_trl_has_a_row_of_its_kind_and_default(method, name):
    """A field of a newer TRL has none, and is refused until it is known whether it acts as on one device."""
    field, flag = OF_TRL[method][name], METHODS[method].find(name)
    assert flag is not None, (
        f"TRL has --{name}. Find out whether it acts exactly as on one device, and give it a row in settings/flags.py"
    )
    assert not flag.own
    if flag.group in ("Without effect", "Refused"):
        assert flag.kind is BOOL or field.default is not True  # TRL's parser has --no_NAME for it
        return
    words = set(re.findall(r"\w+", str(field.type)))
    fitting = {getattr(schema, kind) for word in words & KINDS.keys() for kind in KINDS[word]}
    assert flag.kind in {*fitting, schema.ANY}, f"{flag.kind.name} is no {field.type}"
    if flag.name == name:  # an older release has another default for another name
        default = field.default if field.default_factory is MISSING else field.default_factory()
        default = default.value if isinstance(default, enum.Enum) else default
        assert flag.default == (tuple(default) if isinstance(default, list) else default)
        assert type(flag.default) is type(default) or isinstance(default, list | float)


# ------------------------------------------------------------------------------------------------
# Each row by itself
# ------------------------------------------------------------------------------------------------


@every_row
def test_a_row_holds_together(method, flag):
    unset = list(flag.unset) if isinstance(flag.unset, tuple) else flag.unset
    assert check(flag, unset) == unset or check(flag, unset) in flag.values
    for value in flag.values:
        assert check(flag, value) in ([value], value, *flag.values)
    switch, *values = flag.needs or (None,)
    for value in values:
        assert check(METHODS[method].flags[switch], value) in (value, [value])
        assert value != METHODS[method].flags[switch].unset or (switch, value) == ("use_liger_kernel", None)  # decided
    is_grouped = flag.group in ("With one value", "Without effect", "Refused")
    assert flag.help or is_grouped
    assert re.fullmatch(r"[^\n]{0,109}[.)]?", flag.help)
    assert flag.help.endswith(".") or not flag.help
    assert flag.group
    assert flag.resume in ("same", "free")
    assert not (flag.idle and flag.instead)


def outside(flag):
    """Yield values that a flag does not take: one beyond each limit, and another word."""
    for limit, step in ((flag.least, -1), (flag.above, 0), (flag.most, 1), (flag.below, 0)):
        if limit is not None:
            yield limit + step if flag.kind is not FLOAT else float(limit + step)
    if flag.values or flag.instead:
        other = {BOOL: flag.unset is not True, INT: 7, FLOAT: 0.125}.get(flag.kind, "no_such_value")
        yield [*flag.values[:1], other] if flag.kind.nargs == "+" and None not in flag.values else other


REFUSING = [(f"{method} {flag.name} {value}", flag, value) for method, flag in OWN_ROWS for value in outside(flag)]


@pytest.mark.parametrize(("flag", "value"), [row[1:] for row in REFUSING], ids=[row[0] for row in REFUSING])
def test_a_value_outside_is_refused_with_the_flag_the_value_and_a_remedy(flag, value):
    words = [str(word) for word in value] if isinstance(value, list) else str(value)
    shown = words[-1] if isinstance(value, list) else words  # the one that is wrong
    for given in (value, words):
        with pytest.raises(ValueError, match=r"Use |Leave it out|choose the engine|set ") as error:
            check(flag, given)
        assert str(error.value).startswith(f"--{flag.name} {shown} ")
        assert flag.reason in str(error.value)
        assert str(error.value).endswith(".")


# ------------------------------------------------------------------------------------------------
# One row more
# ------------------------------------------------------------------------------------------------

NEW = Flag("brand_new", TEXT, "slow", "How it is done. Some say more.", own=True, group="Training", common=True)
NEW = replace(NEW, values=("slow", "fast"), aliases=("brandnew_older",))


def test_a_flag_is_added_by_one_row(tmp_path, monkeypatch):
    method = replace(SFT, flags={**SFT.flags, "brand_new": NEW})
    assert parse_flags([], method)["brand_new"] == "slow"
    (path := tmp_path / "run.yaml").write_text("brandnew-older: fast\n")
    for arguments in (["--brand-new=fast"], ["--brandnew_older", "fast"], ["--config", str(path)]):
        settings = parse_flags(arguments, method)
        assert (settings["brand_new"], settings["brandnew_older"], settings.explicit) == ("fast", "fast", {"brand_new"})
    with pytest.raises(ValueError, match=r"^--brand_new quick is unknown\. Use slow or fast\.$"):
        parse_flags(["--brand_new", "quick"], method)
    with pytest.raises(ValueError, match=r"--brandnw is not a flag\. Did you mean --brand_new\?"):
        parse_flags(["--brandnw", "fast"], method)
    with pytest.raises(ValueError, match="--brand_new is not a flag"):
        parse_flags(["--brand_new", "fast"])
    assert re.search(r"--brand_new +How it is done \[slow\]\n", help_text(method, common=True))
    whole = " ".join(help_text(method, common=False).split())
    assert "--brand_new How it is done. Some say more. Values: slow, fast. Default: slow." in whole
    [action] = [a for a in _flags_of(method)._actions if a.option_strings == ["--brand_new"]]
    assert (action.choices, action.help) == (("slow", "fast"), "How it is done")
    monkeypatch.setattr("longctx.settings.flags.SFT", method)
    page = load(Path(__file__).parents[2] / "docs" / "pages.py").flags_page()
    said = "How it is done. Some say more. Other names: `--brandnew_older`."
    assert f"| `--brand_new` ✦ | `slow` `fast` | `slow` | {said} |" in page


# ------------------------------------------------------------------------------------------------
# Who sets a value
# ------------------------------------------------------------------------------------------------

CLIPS = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_GRADIENT_CLIPPING": "0.5"}
OWN = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib"]


@pytest.mark.parametrize(
    ("flags", "file", "profile", "name", "value", "origin"),
    [
        (OWN, "", {}, "max_steps", -1, None),
        ([], "", {}, "max_steps", 20, "demo"),
        ([], "", {}, "packing", True, "demo"),
        ([], "max_steps: 3", {}, "max_steps", 3, "file"),
        ([], "max_steps: null", {}, "max_steps", 20, "demo"),
        (["--max_steps", "4"], "max_steps: 3", {}, "max_steps", 4, "flag"),
        (OWN, "max_steps: -1", {}, "max_steps", -1, "file"),
        ([*OWN, "--max_steps", "-1"], "", {}, "max_steps", -1, "flag"),
        ([], "", CLIPS, "max_grad_norm", 0.5, "profile"),
        ([], "max_grad_norm: 0.5", CLIPS, "max_grad_norm", 0.5, "file"),
        (["--max_grad_norm", "0.5"], "", CLIPS, "max_grad_norm", 0.5, "flag"),
        (["--cp", "2"], "", {}, "sp_backend", "ring", "flag"),
        ([*OWN, "--eval_strategy", "steps"], "", {}, "eval_steps", 10, "longctx"),
    ],
)
def test_the_user_is_over_the_profile_and_that_over_the_demo(flags, file, profile, name, value, origin, tmp_path):
    (path := tmp_path / "run.yaml").write_text(file or "{}")
    settings = fill(parse_flags([*flags, "--config", str(path)]), read_profile(dict(profile)))
    assert (settings[name], settings.origins.get(name)) == (value, origin)
    assert settings.is_set(name) == (origin not in (None, "demo", "longctx"))
    assert (name in settings.explicit) == (origin in ("file", "flag"))


OLDER = {  # by today's name: another, and a value
    "max_length": ("max_seq_length", 99),
    "dtype": ("torch_dtype", "bfloat16"),
    "eval_strategy": ("evaluation_strategy", "epoch"),
    "use_cpu": ("no_cuda", True),
    "hub_token": ("push_to_hub_token", "secret"),
    "hub_model_id": ("push_to_hub_model_id", "me/model"),
    "model_revision": ("revision", "v2"),
    "use_liger_kernel": ("use_liger", True),
    "per_device_train_batch_size": ("per_gpu_train_batch_size", 2),
    "per_device_eval_batch_size": ("per_gpu_eval_batch_size", 2),
    "gradient_checkpointing": ("activation_checkpointing", False),
    "gradient_checkpointing_kwargs": ("activation_checkpointing_kwargs", {"every_n_layers": 2}),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_names_act_and_two_names_of_a_flag_are_refused(name, tmp_path):
    older, value = OLDER[name]
    text = str(value).replace("'", '"')
    dashed = older.replace("_", "-")
    path = tmp_path / "run.yaml"
    for spelled in (older, dashed):
        path.write_text(f"{spelled}: {text}\n")
        for arguments in ([f"--{spelled}", text], [f"--{spelled}={text}"], ["--config", str(path)]):
            settings = parse_flags(arguments)
            assert (settings[name], settings[older], settings.explicit) == (value, value, {name})
    assert parse_flags([f"--{older}", text, f"--{dashed}", text])[name] == value
    with pytest.raises(ValueError, match=rf"^--{older} and --{name} .*\. Keep --{name}\.$|^--{name} and --{older} .*"):
        parse_flags([f"--{name}", text, f"--{older}", text])
    path.write_text(f"{name}: {text}\n{older}: {text}\n")
    with pytest.raises(ValueError, match=rf"sets {older} and another name of it\. Keep {name}\.$"):
        parse_flags(["--config", str(path)])


def test_of_a_flag_that_is_given_twice_the_last_counts():
    assert parse_flags(["--sp", "2", "--no_packing", "--sp=4", "--packing"])["sp"] == 4
    assert parse_flags(["--packing", "--no-packing"])["packing"] is False


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_the_word_none_unsets_flags_that_can_be_without_a_value(word):
    settings = parse_flags(["--max_length", word, "--bf16", word, "--lr_scheduler_kwargs", word])
    assert [settings[name] for name in ("max_length", "bf16", "lr_scheduler_kwargs")] == [None] * 3
    for name, kind in {"max_steps": "a whole number", "learning_rate": "a number", "packing": "true or false"}.items():
        with pytest.raises(ValueError, match=rf"^--{name} {word} is not understood\. Use {kind}\.$"):
            parse_flags([f"--{name}", word])


# ------------------------------------------------------------------------------------------------
# Mistakes, all at once and at once
# ------------------------------------------------------------------------------------------------


def test_up_to_five_mistakes_are_told_together(tmp_path, capsys):
    (path := tmp_path / "run.yaml").write_text("zzz: 4\ndtype: [a, b]\noverlong: shorten\n")
    with pytest.raises(ValueError, match=r"--lr is") as error:
        parse_flags(["--lr", "3", "--sp", "two", "--config", str(path)])
    assert end_refused(error.value) == 2
    assert capsys.readouterr().err.splitlines() == [
        "longctx: error: --lr is not a flag. Did you mean --learning_rate?",
        f"longctx: error: --config {path} sets zzz, which is not a flag. All flags: longctx train --help-all",
        f"longctx: error: --config {path} sets dtype to ['a', 'b'], and it takes one value.",
        f"longctx: error: overlong shorten in {path} is unknown. Use raise, truncate, drop, split or turns.",
        "longctx: error: --sp two is not understood. Use a whole number, auto or all.",
    ]
    with pytest.raises(ValueError, match=r"--lr is") as error:
        parse_flags(["--lr", "3", "--sp", "two", "--packing", "maybe", "--config", str(path)])
    assert len(str(error.value).splitlines()) == 5


def test_combinations_are_told_together_too():
    given = ["--max_steps", "0", "--logging_steps", "0", "--eval_on_start", "True"]
    with pytest.raises(ValueError, match="--eval_on_start") as error:
        fill(parse_flags(given), read_profile({}))
    assert [line.split()[0] for line in str(error.value).splitlines()] == [given[4], given[0], given[2]]


AT_ONCE = {
    "a name": (["--lr", "1"], "--lr is not a flag. Did you mean --learning_rate?"),
    "a service": (["--report_to", "neptune"], "--report_to neptune needs the package neptune"),
    "a file's value": (["--config", "bad.yaml"], "max_steps many in bad.yaml is not understood. Use a whole number."),
    "a combination": (["--max_steps", "0"], "--max_steps 0 trains nothing. Give 1 or more"),
}
CHILD = "import sys; from longctx.__main__ import main; print(main(sys.argv[1:]), *{'torch', 'numpy'} & {*sys.modules})"


@pytest.mark.parametrize("case", AT_ONCE)
def test_bad_input_is_refused_before_torch_is_imported(case, tmp_path):
    arguments, message = AT_ONCE[case]
    (tmp_path / "bad.yaml").write_text("max_steps: many\n")
    command = [sys.executable, "-c", CHILD, "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2\n"
    assert done.stderr.startswith(f"longctx: error: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_variables_of_a_file_act_before_torch_is_imported(tmp_path):
    (tmp_path / "run.yaml").write_text("env:\n  OMP_NUM_THREADS: 1\nmax_steps: 1\n")
    script = "import sys, longctx.train; print('torch' in sys.modules); longctx.train.main(sys.argv[1:])"
    script += "; import torch; print(torch.get_num_threads())"
    command = [sys.executable, "-c", script, "--config", "run.yaml", "--max_steps", "0"]  # refused, without torch
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout.startswith("False\n"), done.stderr
    assert done.stdout.endswith("\n1\n"), done.stdout + done.stderr


def test_settings_are_a_mapping_that_changes_by_copies():
    settings = parse_flags(["--sp", "2"])
    other = settings.with_("command", max_seq_length="7").note("noted")
    assert (settings["max_length"], settings.explicit, settings.notes) == (None, {"sp"}, ())
    assert (other["max_length"], other.explicit, other.notes) == (7, {"sp", "max_length"}, ("noted",))
    assert other.decided(max_length=8).origins == other.origins
    assert {*other} == SFT.flags.keys()
    with pytest.raises(ValueError, match="--max_length 1 is below 2"):
        settings.with_("command", max_length=1)
    with pytest.raises(KeyError, match="brand_new"):
        settings["brand_new"]
    assert SimpleNamespace(**settings).sp == 2
