"""What flags, files, a launcher's environment and a machine resolve to, before processes start.

A value is one command line on one machine: its refusal, or the lines that it prints, its mesh, engine and memory
options, the settings that differ from the defaults, and the keywords for SFTConfig that differ from TRL's. Values hold
only what differs from the plain run of their command on their machine, which is recorded whole.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from transformers import CONFIG_MAPPING, LlamaConfig

from benchmarks.differential.commands import ADAPTERS
from benchmarks.differential.values import PREFERENCES, SCHEDULES, UNLUCKY
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.schema import BOOL, FLOAT, FLOATS, Method
from tests import support_page
from tests.golden.commands import ALONE, ENVIRONMENTS, ON_8B, PAIRS, RANDOM, RUN_FILES, SETS, WITH_PROFILES
from tests.matrix import MODELS, RUNS, SETUPS
from tests.settings.conftest import launcher
from tests.settings.test_auto import EIGHT_B
from tests.settings.test_profile_runs import LEFT_BEHIND, WIZARD

ROOT = Path(__file__).parents[2]
GIB = 2**30
MACHINES = {"CPU": 0, "1 H100": 1, "8 H100": 8}
TINY = ("--model_name_or_path", "tiny", "--dataset_name", "stdlib")


class Case(NamedTuple):
    """A command line in an environment, on a machine."""

    machine: str
    given: tuple[str, ...]
    env: Mapping[str, str] = {}
    method: Method = SFT
    under: str = ""
    """The name of the environment."""

    @property
    def name(self) -> str:
        place = ", ".join(part for part in (self.machine, self.method.command, self.under) if part not in ("", "train"))
        return f"{place}: {shlex.join(self.given)}".replace(shlex.join(TINY), "tiny")


@contextmanager
def _place() -> Iterator[Callable[[Case], Any]]:
    """A folder with configurations of models, and a function that resolves a case there.

    Adapter: all that this module knows of the inside of longctx.
    """
    from longctx.machine.here import Machine
    from longctx.settings.launcher import read_profile
    from longctx.settings.read import parse_flags
    from longctx.settings.resolve import resolve

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        for name, config in _models().items():
            config.save_pretrained(Path(folder, name))
        patch.setattr("longctx.settings.machine_checks.version", support_page._version)
        patch.setattr("longctx.settings.model_config.load_config", support_page._load_config)
        patch.setattr("longctx.settings.arrange.QLORA_VERSIONS", {})
        patch.setattr("longctx.settings.machine_checks._has_async_io", lambda use_cpu: True)
        patch.setattr("longctx.settings.launcher.default_config_file", lambda: None)

        def resolved(case: Case) -> Any:
            gpus = MACHINES[case.machine]
            name, host = ("NVIDIA H100 80GB HBM3", 221 * gpus) if gpus else ("CPU", 64)
            here = Machine.of(name, max(gpus, 1), device_bytes=int(79.2 * GIB) * (gpus > 0), host_bytes=host * GIB)
            patch.setattr("longctx.settings.resolve.device_count", lambda: gpus)
            patch.setattr(Machine, "here", lambda gpus: here)
            patch.setattr("longctx.settings.machine_checks.available_host_memory", lambda: host * GIB)
            env, given = dict(case.env), [word.replace("ROOT", str(ROOT)) for word in case.given]
            try:
                run = resolve(parse_flags(given, case.method), read_profile(env), env)
            except ValueError as error:
                return _plain(f"refused: {error}", folder)
            told = {line.label: [] for line in [*run.summary(), *run.describe_batch()]}
            for line in [*run.summary(), *run.describe_batch()]:
                told[line.label].append(_without_forecasts(str(line).partition(" ")[2].strip()))
            choice = {"engine": run.engine, "zero_stage": run.zero_stage, "promoted": run.promotes_engine}
            choice |= {
                "use_cpu": run.use_cpu,
                "spawns": run.has_group and not run.facts.launcher.launched,
                "has_group": run.has_group,
            }
            given_defaults = parse_flags([], case.method)
            found = {f"says {label}": lines for label, lines in told.items()} | asdict(run.dims) | choice
            found |= {f"memory.{name}": value for name, value in asdict(run.memory_options).items()}
            found |= {f"--{k}": v for k, v in run.settings.items() if v != given_defaults.get(k, MISSING)}
            found |= {f"SFTConfig.{k}": v for k, v in run.training_arguments().items() if v != _of_trl().get(k)}
            left = {name: value for name, value in env.items() if case.env.get(name) != value}
            found |= {
                f"environment.{name}": left.get(name) for name in sorted(case.env.keys() - env.keys() | left.keys())
            }
            return json.loads(
                _plain(json.dumps(found, default=lambda value: getattr(value, "value", str(value))), folder)
            )

        yield resolved


@cache
def _of_trl() -> dict[str, Any]:
    """The defaults of SFTConfig, which is not built, since that starts a process group."""
    from trl import SFTConfig

    made = {f.name: f.default_factory() for f in fields(SFTConfig) if f.default_factory is not MISSING}
    return {f.name: f.default for f in fields(SFTConfig) if f.default is not MISSING} | made


def _models() -> dict[str, Any]:
    made = {name: CONFIG_MAPPING[model_type](**settings) for name, (model_type, settings) in MODELS.items()}
    return made | {"8B": EIGHT_B, "dropout": LlamaConfig(num_hidden_layers=2, attention_dropout=0.1)}


def _plain(text: str, folder: str) -> str:
    return text.replace(f"{folder}/", "").replace(folder, "WORK").replace(str(ROOT), "ROOT")


_FORECASTS = (
    (re.compile(r"[\d.,]*\d of [\d.,]*\d(?= GiB)"), "N of N"),
    (re.compile(r"[\d.,]*\d(?= (?:s a step|tokens/s a device))"), "N"),
    (re.compile(r"(?<=[a-z] \d: )[\d.]+(e\+\d+)?"), "N"),
)


def _without_forecasts(text: str) -> str:
    """What was decided, without numbers of predictions, which the group `forecasts` has."""
    for pattern, put in _FORECASTS:
        text = pattern.sub(put, text)
    return text


# ------------------------------------------------------------------------------------------------
# Cases
# ------------------------------------------------------------------------------------------------


def _words(line: str, *, own: tuple[str, ...] = TINY) -> tuple[str, ...]:
    """The words of a line of flags, for the tiny model unless it names another, or says that it is the demo."""
    words = tuple(shlex.split(line))
    if words[:1] == ("demo",):
        return words[1:]
    return words if "--model_name_or_path" in words else (*own, *words)


def _bases() -> Iterator[Case]:
    for machine in MACHINES:
        yield from (Case(machine, TINY), Case(machine, TINY, method=DPO))


def _cases() -> Iterator[Case]:
    """All cases but those of profiles."""
    for machine, line in itertools.product(MACHINES, SETS):
        yield Case(machine, _words(line))
    for machine, line in itertools.product(("CPU", "8 H100"), PAIRS):
        yield Case(machine, _words(line), method=DPO)
    for line in ON_8B:
        yield Case("8 H100", _words(line, own=("--model_name_or_path", "8B", "--dataset_name", "stdlib")))
    for under, (env, lines) in ENVIRONMENTS.items():
        for machine, line in itertools.product(("CPU", "8 H100"), lines):
            yield Case(machine, _words(line), env=env, under=under)
    for schedule in SCHEDULES:
        name, _, kwargs = schedule.partition(" ")
        yield Case("CPU", (*TINY, "--lr_scheduler_type", name, *(("--lr_scheduler_kwargs", kwargs) if kwargs else ())))
    for flags, _ in ADAPTERS.values():
        yield Case("CPU", (*TINY, "--use_peft", *_spelled(flags)))
    for flags in PREFERENCES.values():
        yield Case("CPU", (*TINY, *_spelled(flags)), method=DPO)
    yield from _matrix()
    yield from _alone()


def _spelled(flags: Mapping[str, Any]) -> tuple[str, ...]:
    values = {name: value if isinstance(value, list) else [value] for name, value in flags.items()}
    return tuple(word for name, value in values.items() for word in (f"--{name}", *map(str, value)))


def _matrix() -> Iterator[Case]:
    """Every run of the support matrix on three of its set-ups, so that each has its turns."""
    for number, (run, shift) in enumerate(itertools.product(RUNS.values(), (0, 3, 7))):
        title, setup = list(SETUPS.items())[(number + shift) % len(SETUPS)]
        size = str(setup.processes)
        env = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, **setup.env}
        given = ("--model_name_or_path", run.model, "--dataset_name", "data.jsonl", "--max_length", "256")
        machine = "8 H100" if setup.only_on_gpu else "CPU"
        yield Case(machine, (*given, *run.flags_on(setup)), env=env, method=run.method, under=title)


def _alone() -> Iterator[Case]:
    """Every flag by itself, with values that differ from its default."""
    seen = set()
    for method in (SFT, DPO):
        for name, flag in method.flags.items():
            values = ALONE.get(name) or [choice for choice in flag.choices if choice != flag.unset]
            if flag.kind is BOOL:
                values = [str(not flag.unset)] if flag.unset is not None else ["True", "False"]
            whole, fraction = flag.kind.name.startswith("a whole number"), flag.kind in (FLOAT, FLOATS)
            values = values or ["2" if whole else "0.5" if fraction else "other"]
            for value in values:
                if (name, value) not in seen:
                    yield Case(
                        "CPU", (*TINY, f"--{name}", *([value] if isinstance(value, str) else value)), method=method
                    )
                seen.add((name, value if isinstance(value, str) else tuple(value)))
    for line in UNLUCKY:
        name, _, value = line.partition(" ")
        if (name, value) not in seen:
            yield Case("CPU", (*TINY, f"--{name}={value}"))


def _profiles() -> Iterator[tuple[str, Any, list[Case]]]:
    """Every shipped profile and what the wizard leaves behind: its name, what accelerate starts, and cases under it."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        launch = launcher(patch)
        files = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}
        for kind, settings in LEFT_BEHIND.items():
            files[f"left {kind}"] = Path(folder, f"{kind}.yaml")
            files[f"left {kind}"].write_text(yaml.safe_dump(WIZARD | settings | {"distributed_type": kind}))
        for name, path in files.items():
            started = launch(path)
            env = {
                key: value
                for key, value in started["env"].items()
                if key not in ("PYTHONPATH", "PYTORCH_NVML_BASED_CUDA_CHECK")
            }
            shown = {key: value for key, value in started.items() if key != "command"} | {"env": dict(env)}
            if "nproc_per_node" in started:
                local, nodes = started["nproc_per_node"], int(started["nnodes"].partition(":")[0])
                env |= {"RANK": "0", "WORLD_SIZE": str(int(local) * nodes), "LOCAL_WORLD_SIZE": local}
            lines = [*WITH_PROFILES, *(["--config ROOT/configs/run/" + RUN_FILES[name]] if name in RUN_FILES else [])]
            yield (
                name,
                shown,
                [
                    Case(machine, _words(line), env=env, under=name)
                    for machine, line in itertools.product(("CPU", "8 H100"), lines)
                ],
            )


# ------------------------------------------------------------------------------------------------
# Values
# ------------------------------------------------------------------------------------------------

_QUICK = 20
"""One case of so many is resolved in every run of the tests."""


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    """Every case, and the support matrix."""
    with _place() as resolved:
        plain = {(case.machine, case.method): (case.name, resolved(case)) for case in _bases()}
        yield from (pair for pair in plain.values())
        names = {name for name, _ in plain.values()}
        cases = list(_cases())
        for name, started, under in _profiles():
            yield f"profile {name}: what accelerate starts", started
            cases += under
        for number, case in enumerate(cases):
            if case.name not in names and not (quick and number % _QUICK):
                yield case.name, _changed(plain[case.machine, case.method][1], resolved(case))
            names.add(case.name)
    if not quick:
        reasons: dict[str, list[str]] = {}
        for (setup, feature), refusal in support_page.refusals().items():
            reasons.setdefault(refusal or "exact", []).append(f"{feature} on {setup}")
        yield from ((f"support matrix: {reason}", cells) for reason, cells in reasons.items())


def _changed(plain: Any, now: Any) -> Any:
    """What a record has that the plain one has not, and the names of what it has not."""
    if isinstance(now, str) or isinstance(plain, str):
        return now
    gone = {"without": gone} if (gone := sorted(plain.keys() - now.keys())) else {}
    return {name: value for name, value in now.items() if name not in plain or plain[name] != value} | gone


def measured(number: int = 1000) -> Iterator[tuple[str, Any]]:
    """Random command lines, whole: too many to commit, and the same in two trees on one machine."""
    draw = random.Random(0)
    profiles = [case for _, _, cases in _profiles() for case in cases[:1]]
    profiles += [Case("CPU", (), env=env, under=name) for name, (env, _) in ENVIRONMENTS.items()]
    everything = [*SETS, *RANDOM]
    with _place() as resolved:
        for at in range(number):
            method = DPO if draw.random() < 0.2 else SFT
            lines = draw.sample(everything + list(PAIRS) * (method is DPO), draw.choice((1, 2, 2, 3, 4, 6)))
            words = [word for line in lines for word in shlex.split(line) if word != "demo"]
            if method is DPO or draw.random() < 0.8:
                words = [*TINY, *words]
            under = draw.choice(profiles) if draw.random() < 0.4 else Case("CPU", ())
            case = Case(draw.choice(list(MACHINES)), tuple(words), dict(under.env), method, under.under)
            yield f"{at:04} {case.name}", resolved(case)
