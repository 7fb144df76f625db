"""The support matrix of benchmarks/results: what resolving refuses, and what a test run has shown, in every cell."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from datetime import date
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import CONFIG_MAPPING, PretrainedConfig

from longctx.model.load import load_config
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.settings.schema import Method
from tests.matrix import FEATURES, MODELS, RUNS, SETUPS, Feature, TrainingRun

PAGE = Path(__file__).parents[1] / "benchmarks" / "results" / "support_matrix.md"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl")
UNTESTED = "**untested**"
_DEVICES_OF_A_NODE = 8


def proof_id(setup: str, run: str) -> str:
    """The test that trains a run of RUNS on a set-up."""
    return f"tests/test_support_matrix.py::test_a_run_equals_one_process[{setup}: {run}]"


def evidence(setup: str, feature: Feature) -> str | None:
    """The id of the test that shows a feature on a set-up; None where there is none."""
    if feature.shown_by is None or setup not in feature.only:
        return None
    return proof_id(setup, feature.shown_by) if feature.shown_by in RUNS else feature.shown_by


def declared(refused: Mapping[tuple[str, str], str | None]) -> set[str]:
    """All tests that cells name which are not refused, and need no GPU."""
    return {
        test
        for (setup, name), reason in refused.items()
        if reason is None and not needs_gpu(setup, FEATURES[name])
        if (test := evidence(setup, FEATURES[name])) is not None
    }


def needs_gpu(setup: str, feature: Feature) -> bool:
    return feature.only_on_gpu or SETUPS[setup].only_on_gpu


def refusals() -> dict[tuple[str, str], str | None]:
    """{(set-up, feature): the reason why it is refused, None where it is not}, from config.json files alone."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (model_type, settings) in MODELS.items():
            CONFIG_MAPPING[model_type](**settings).save_pretrained(Path(folder, name))
        once = cache(partial(refusal, Path(folder)))
        return {(setup, name): _refusal_of(once, setup, name) for setup in SETUPS for name in FEATURES}


def _refusal_of(once: Callable[..., str | None], setup: str, name: str) -> str | None:
    feature = FEATURES[name]
    if feature.refused_by is not None:
        return feature.refused_by()
    run = RUNS.get(feature.shown_by or "", TrainingRun(model=feature.model))
    return once(setup, run.model, run.flags_on(SETUPS[setup]) + feature.flags, feature.only_on_gpu, run.method)


_version = cache(version)


@cache
def _config(name: str, options: str) -> PretrainedConfig:
    return load_config(name, **json.loads(options))


def _load_config(name: str, **options: Any) -> PretrainedConfig:
    """As longctx.model.load's, which looks at a configuration in a process of its own, but once for each."""
    return copy.deepcopy(_config(name, json.dumps(options)))


def refusal(
    models: Path, setup: str, model: str, flags: tuple[str, ...], on_gpu: bool = False, method: Method = SFT
) -> str | None:
    """What resolving the flags says on a process of this set-up; nothing but the model's config.json is read."""
    row = SETUPS[setup]
    devices = _DEVICES_OF_A_NODE if on_gpu or row.only_on_gpu else 0
    world_size = str(row.processes)
    env = {"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, **row.env}
    given = ["--model_name_or_path", str(models / model), "--dataset_name", "data.jsonl", "--max_length", "256"]
    given += ["--max_steps", "5"]
    with (
        mock.patch("longctx.settings.machine_checks.version", _version),
        mock.patch("longctx.settings.model_config.load_config", _load_config),
        mock.patch("longctx.settings.arrange.QLORA_VERSIONS", {}),  # bitsandbytes is in no extra of the tests
        mock.patch("longctx.settings.resolve.device_count", return_value=devices),
        mock.patch(
            "longctx.settings.launcher.default_config_file", return_value=None
        ),  # may be left behind on this machine
    ):
        try:
            resolve(parse_flags([*given, *flags], method), read_profile(env), env)
        except ValueError as error:
            return str(error).replace(f" of {models / model}", "")
    return None


def cell(setup: str, feature: Feature, refusal: str | None, passed: Collection[str]) -> str:
    """exact, refused, untested, or how far what only a GPU runs is shown without one: GPU where it is not."""
    if refusal is not None:
        return "refused"
    if needs_gpu(setup, feature):
        proofs = () if SETUPS[setup].only_on_gpu else feature.without_gpu
        return ", ".join(proof.kind for proof in proofs) or "GPU"
    return "exact" if evidence(setup, feature) in passed else UNTESTED


def table(passed: Collection[str], refused: Mapping[tuple[str, str], str | None]) -> str:
    """The page below its head, as these tests having passed make it."""
    reasons: dict[str, int] = {}
    lines = ["| | " + " | ".join(SETUPS) + " | shown by |", "| --- |" + " --- |" * (len(SETUPS) + 1)]
    for name, feature in FEATURES.items():
        states = []
        for setup in SETUPS:
            reason = refused[setup, name]
            state = cell(setup, feature, reason, passed)
            if reason is not None:
                state += f" {reasons.setdefault(_first_words(reason), len(reasons) + 1)}"
            states.append(state)
        lines.append(f"| {name} | " + " | ".join(states) + f" | {_shown_by(feature)} |")
    lines += ["", "## Reasons for refusals", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    lines += ["", "## On GPUs", ""]
    for name, part in (FEATURES | SETUPS).items():
        if part.only_on_gpu:
            runs = any(reason is None for cell, reason in refused.items() if name in cell)
            lines.append(f"- {name}: {part.last_on_gpu if runs else 'refused so far'}")
            lines += [f"    - {proof}" for proof in part.without_gpu]
    return "\n".join(lines) + "\n"


def _shown_by(feature: Feature) -> str:
    if feature.shown_by in RUNS:
        return f"`{feature.shown_by}`"
    return f"`{feature.shown_by}`" if feature.shown_by else ""


def _first_words(reason: str) -> str:
    """The first sentence, without what differs from machine to machine."""
    words = re.split(r"(?<=[.;]) |\n", reason.replace("|", "\\|"))[0]
    return words if len(words) <= 160 else words[:160].rsplit(" ", 1)[0] + " …"


def page(before: str, outcomes: Mapping[str, bool], refused: Mapping[tuple[str, str], str | None] | None = None) -> str:
    """The whole page after a test run; what it left out stays as it was on the page before.

    Args:
        outcomes: whether each test of the run has passed, by its id.
        refused: as `refusals` gives, where it has been called already.
    """
    refused = refusals() if refused is None else refused
    tests = declared(refused)
    passed = {test for test, has_passed in outcomes.items() if has_passed}
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    foot = _FOOT.format(
        date=date.today(),
        versions=versions,
        files=" ".join(sorted({test.partition("::")[0] for test in tests})),
        run=len(tests & outcomes.keys()),
        tests=len(tests),
    )
    return _HEAD + table(passed | (shown_on(before) - outcomes.keys()), refused) + foot


def shown_on(text: str) -> set[str]:
    """The tests that a page's cells are exact by, as far as they are shown by the same test today."""
    cells = _cells(text)
    return {
        test
        for (name, setup), state in cells.items()
        if state == "exact" and name in FEATURES and setup in SETUPS
        if cells[name, "shown by"] == _shown_by(FEATURES[name])
        if (test := evidence(setup, FEATURES[name])) is not None
    }


_HEAD = """# Support matrix

This table says whether a setup trains as one device would. Engines and backends are its columns, and features its rows.

- **exact**: yes. Training was compared with stock transformers on one process: losses and gradient norms agree to 1e-5
  in the first step, and losses to 1e-4 after five or six.
- **refused** n: no. The run ends before it starts, with the reason that has this number below the table.
- **GPU**: nobody has tried it. It is not refused, but needs a GPU and has not run on one.
- **numbers**, **compiled**: as **GPU**, but the kernels were compared with a reference in an interpreter that has the
  arithmetic of a GPU (numbers), or compiled for GPUs (compiled). What has run on a GPU stands [below](#on-gpus).
- **untested**: it is not refused, and no test covered it.

"""

_FOOT = """
## How this page is written

Runs are real processes on real engines, in fp32 and with dense attention in the reference; the run `bf16` is as close
to fp32 as one process in bf16, and `DPO` is compared with TRL's trainer. Each setup has the smallest number of ranks
over which its backend can spread a sequence, and twice as many in the run `data parallel` if it has no data
parallelism. The test of a run that is named under *shown by* is
`tests/test_support_matrix.py::test_a_run_equals_one_process[setup: run]`; a name with `::` is another test. The soft
device is a simulated CUDA device in host memory.

From tests/matrix.py, on {date}, on a CPU with gloo ({versions}), by:

    pytest {files} -m "long or not long" --support-matrix benchmarks/results/support_matrix.md

The page may be filled by several runs. The last one covered {run} of the {tests} tests behind the cells, and left the
cells of the other tests unchanged.
"""


def body(text: str) -> str:
    """What of a page does not depend on the day it was made."""
    return text[: text.index("## How this page is written")]


def differences(old: str, new: str) -> list[str]:
    """A line for every cell that is another one: set-up, feature, both states."""
    before, after = _cells(old), _cells(new)
    return [
        f"{feature}, {setup}: {before.get((feature, setup), 'not there')} -> {after.get((feature, setup), 'not there')}"
        for feature, setup in dict.fromkeys([*before, *after])
        if before.get((feature, setup)) != after.get((feature, setup))
    ]


def _cells(text: str) -> dict[tuple[str, str], str]:
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    if not rows:
        return {}
    _, *setups = rows[0]
    return {
        (name, setup): re.sub(r" \d+$", "", state)
        for name, *states in rows[2:]
        for setup, state in zip(setups, states, strict=True)
    }
