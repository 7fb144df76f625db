"""What became of a case: exact, refused as promised, or a finding."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .commands import Prepared, evaluated_at, prepare
from .models import make_model, name_of
from .processes import Ran, call, run_command
from .reference import train
from .space import Case

EXACT, REFUSED, UNCOMPARED = "exact", "refused", "not compared"
"""`not compared`: an unlucky flag changes what is trained in a way that the plan does not follow; it only has to run
or to be refused."""
UNDETERMINED = "undetermined"
"""Rounding alone moves the reference's later steps as far: the run of its own that has its weights changed by
PERTURBATION differs from it as much as the run at hand."""
NO_MODEL = "no model"
"""transformers has no model of these sizes."""
FINDINGS = ("wrong", "crash", "hang", "refused late", "unclear refusal", "nothing trained", "no reference")

USAGE_ERROR, FAILED = 2, 1

FIRST_STEP = {"loss": 1e-5, "grad_norm": 1e-4}
"""Relative bounds, as in tests/training/test_training.py. fp32 has 6e-8; a sum over a few hundred tokens in another
order differs by about 1e-7, and a gradient norm by 1e-6 where large gradients cancel."""
LATER_STEPS = {"loss": 1e-4, "grad_norm": 2e-3}
"""Each step enlarges the differences of the one before."""
PERTURBATION, AS_FAR = 3e-7, 10.0
"""A part of every weight, five times what fp32 rounds; and of the difference that it makes, what counts as much."""
LEARNING_RATE = 1e-6
"""Relative; computed in double precision everywhere, and logged as such."""
UPDATE = 2e-3
"""Of SGD's saved weights: the norm of the difference over the norm of the update; a step's relative gradient error."""
ROUNDING = 3e-7
"""The same over the norm of the weights: where a small update is added, fp32 rounds the sum."""
FIRM, ALL = 0.05, 2.5
"""Of an adaptive optimizer's saved weights, in parts of the sum of the learning rates: of weights whose gradients stand
clear of rounding, and of all. AdamW moves a weight by the learning rate whatever the size of its gradient, so where
that is rounding alone, two right runs may move it in opposite directions."""
LOOSE = 1e-5
"""Of the loss: the change by weights that rounding has moved from which on gradients and weights are not compared."""
ADAPTIVE_STEP = {"rmsprop": 10.0}
"""The first steps of an optimizer in learning rates, where that is not 1: RMSprop's are 1 / sqrt(1 - alpha)."""

REMEDIES = re.compile(
    r"\b(Add|Call|Change|Check|Choose|Correct|Divide|Expected|Give|Keep|Leave|Look|Lower|Mask|Name|Pass|Raise|Reduce|"
    r"Remove|Run|Save|Set|Shorten|Start|Store|Tokenise|Train|Use|Did you mean|Example|choose|give|keep|leave|name|pass|"
    r"set|use|must be|expected)\b"
)
NAMED = re.compile(
    r"--\w+|[\w./-]+\.(json|jsonl|parquet|arrow|yaml|txt|jinja|safetensors)|config\.json|record \d+|/\w+"
)
"""A flag, a file or a record."""

COMPARED_UNLUCKY = {
    "learning_rate": ("learning_rate", float),
    "warmup_steps": ("warmup", float),
    "label_smoothing_factor": ("smoothing", float),
    "weight_decay": ("weight_decay", float),
    "max_grad_norm": ("clipping", float),
}
"""Unlucky flags that the reference follows: keys of its plan."""
FOLLOWED_IN_DATA = ("shuffle_dataset",)
"""Unlucky flags by which the documents of a plan lie otherwise."""
WITHOUT_EFFECT = (
    "pad_to_multiple_of",
    "sequence_chunk_size",
    "heads_k_stride",
    "tiled_mlp_num_shards",
    "dataloader_num_workers",
    "dataset_num_proc",
    "torch_empty_cache_steps",
    "save_total_limit",
    "on_nonfinite",
    "balance_packs",
    "communication_data_type",
    "logging_first_step",
    "full_determinism",
    "attn_implementation",
    "profile",
)
"""Unlucky flags that change nothing in what is computed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The verdict on a case."""

    case: Case
    status: str
    detail: str = ""
    """The message of a refusal, or what is wrong."""
    signature: str = ""
    """What two findings with one cause have in common."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """The largest relative error by quantity."""
    commands: Sequence[str] = ()
    """What a user types."""
    log: str = ""
    seconds: float = 0.0

    @property
    def is_finding(self) -> bool:
        return self.status in FINDINGS


class Judge:
    """Runs cases and compares them.

    Args:
        work: a folder for models, data and outputs.
        timeout: seconds of each command.
        keeps: whether data and outputs stay on disk.
        plant: called in every rank before the run, to put a bug there.
    """

    def __init__(self, work: Path, timeout: float, *, keeps: bool = False, plant: Callable[[], None] | None = None):
        self.work, self.timeout, self.keeps, self.plant = work, timeout, keeps, plant
        self._numbers = itertools.count()

    def __call__(self, case: Case) -> Outcome:
        """Run the case."""
        folder = self.work / "cases" / str(next(self._numbers))
        folder.mkdir(parents=True)
        try:
            return self._judge(case, folder)
        finally:
            if not self.keeps:
                shutil.rmtree(folder, ignore_errors=True)

    def _judge(self, case: Case, folder: Path) -> Outcome:
        model = self.work / "models" / name_of(case)
        model.parent.mkdir(exist_ok=True)
        if not model.exists():
            try:
                call(_make_model, (case, model), folder=folder / "model", timeout=self.timeout)
            except RuntimeError as error:
                return Outcome(case=case, status=NO_MODEL, detail=str(error).splitlines()[0])
        prepared = prepare(case, self.work / "models", folder)
        # Under the folder of --keep, where this case is the first one when it is run again.
        pasted = [
            command.pasted().replace(str(folder), "cases/0").replace(f"{self.work}/", "")
            for command in prepared.commands
        ]
        runs: list[Ran] = []
        for number, command in enumerate(prepared.commands):
            ranks = folder / f"ranks-{number}"
            runs.append(run_command(command, folder=ranks, timeout=self.timeout, plant=self.plant))
            if runs[-1].is_late or set(runs[-1].codes) != {0}:
                break
        ended = _ending(case, runs[-1]) or self._compare(prepared)
        return Outcome(case=case, **ended, commands=pasted, log=runs[-1].log, seconds=sum(ran.seconds for ran in runs))

    def _compare(self, prepared: Prepared) -> dict[str, Any]:
        """Of a run that ended well."""
        case, output = prepared.case, Path(prepared.plan["saved"])
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        logged = [entry for entry in history if "loss" in entry]
        evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        if not logged and not case.unlucky.startswith("logging_steps"):
            return {"status": "nothing trained", "detail": "exit code 0 without a step", "signature": "nothing"}
        plan = _followed(prepared, logged)
        if plan is None:
            return {"status": UNCOMPARED}
        try:
            expected = call(train, plan, folder=prepared.folder / "reference", timeout=self.timeout)
        except RuntimeError as error:
            last = str(error).strip().splitlines()
            status = "wrong" if "NotExplainedError" in str(error) else "no reference"
            return {"status": status, "detail": last[-1], "signature": last[0]}
        verdict = _compared(plan, logged, evaluations, expected)
        if verdict["status"] == "wrong" and len(expected["steps"]) > 1:
            perturbed = plan | {"perturbation": PERTURBATION}
            moved = call(train, perturbed, folder=prepared.folder / "perturbed", timeout=self.timeout)
            as_long = all(len(moved[part]) == len(expected[part]) for part in ("steps", "evaluations"))
            if as_long and _compared(plan, logged, evaluations, expected, moved)["status"] == EXACT:
                return verdict | {"status": UNDETERMINED}
        return verdict


def _make_model(argument: tuple[Case, Path]) -> dict[str, Any]:
    make_model(*argument)
    return {}


# ------------------------------------------------------------------------------------------------
# Runs that did not end well
# ------------------------------------------------------------------------------------------------


def _ending(case: Case, ran: Ran) -> dict[str, Any] | None:
    """The verdict on a command that was refused, failed or hung; None for one that ended well."""
    if ran.is_late:
        return {"status": "hang", "detail": _stacks(ran.log), "signature": "hang " + _innermost(ran.log)}
    codes = {code for code in ran.codes if code is not None}
    if codes == {0} and None not in ran.codes:
        return None
    if codes == {USAGE_ERROR} and "Traceback (most recent call last)" not in ran.log:
        return _refusal(case, ran)
    if codes == {FAILED} and "Traceback" not in ran.log and re.search(r"longctx: error: .*gradient", ran.log):
        return {"status": REFUSED, "detail": error_of(ran.log), "signature": "not finite"}
    last = last_error(ran.log)
    return {"status": "crash", "detail": f"exit codes {ran.codes}: {last}", "signature": general(last)}


def _refusal(case: Case, ran: Ran) -> dict[str, Any]:
    message = error_of(ran.log)
    verdict = {"detail": message, "signature": general(message)}
    has_trained = re.search(r"^ *1/\d+ ", ran.log, re.MULTILINE)
    if has_trained and "stream" not in case.reading:  # a stream is read while the run goes on
        return verdict | {"status": "refused late"}
    is_one = ran.log.count("longctx: error: ") == 1 or "longctx: error: " not in ran.log
    if not message or not is_one or not NAMED.search(message) or not REMEDIES.search(message):
        return verdict | {"status": "unclear refusal"}
    return verdict | {"status": REFUSED}


def error_of(log: str) -> str:
    """The message of a refusal, which may have several lines."""
    found = re.search(r"longctx: error: (.*?)(?=\n--- rank|\nleft to the launcher|\Z)", log, re.DOTALL)
    found = found or re.search(r"left to the launcher: (.*?)(?=\n--- rank|\Z)", log, re.DOTALL)
    return found[1].strip() if found else ""


def last_error(log: str) -> str:
    """The last line of the first traceback, and where it was raised."""
    found = re.search(r"Traceback \(most recent call last\).*?\n(?=\S)(?!Traceback)[^\n]*", log, re.DOTALL)
    if found is None:
        return error_of(log) or (log.strip().splitlines() or ["no output"])[-1]
    lines = found[0].splitlines()
    places = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', found[0])
    ours = [f"{path.rpartition('/longctx/')[2]}:{line} {name}" for path, line, name in places if "/longctx/" in path]
    return f"{lines[-1]} ({ours[-1] if ours else 'outside longctx'})"


def general(message: str) -> str:
    """A message without what differs between cases: numbers and names of files."""
    return re.sub(r"/\S+|\d+(\.\d+)?(e-?\d+)?", "#", message)[:160]


def _stacks(log: str) -> str:
    found = log.find("Timeout (")
    return log[found : found + 3000] if found >= 0 else log[-1500:]


def _innermost(log: str) -> str:
    found = re.search(r'File "[^"]*/(longctx/[^"]+)", line \d+ in (\S+)', log)
    return f"{found[1]} {found[2]}" if found else ""


# ------------------------------------------------------------------------------------------------
# Runs that ended well
# ------------------------------------------------------------------------------------------------


def _followed(prepared: Prepared, logged: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The plan with what the log has to say; None where an unlucky flag leaves no plan."""
    case, plan = prepared.case, dict(prepared.plan)
    name, _, value = case.unlucky.partition(" ")
    if name in COMPARED_UNLUCKY:
        key, kind = COMPARED_UNLUCKY[name]
        plan[key] = kind(value)
    elif name and name not in WITHOUT_EFFECT + FOLLOWED_IN_DATA:
        return None
    plan["num_steps"] = len(logged) if prepared.total is None else prepared.total
    plan["evaluate_at"] = evaluated_at(case, plan["num_steps"], plan["steps_per_epoch"])
    if case.evaluation in ("best model", "early stopping"):
        plan["saved"] = ""
    if case.order == "random":
        totals = [0, *(entry["num_tokens"] for entry in logged)]
        plan["tokens"] = [after - before for before, after in itertools.pairwise(totals)]
        plan["losses"] = [-entry["logps/chosen"] if case.reads_pairs else entry["loss"] for entry in logged]
        plan["epochs"] = [entry["epoch"] for entry in logged]
    return plan


def _compared(
    plan: Mapping[str, Any],
    logged: Sequence[Mapping[str, Any]],
    evaluations: Sequence[float],
    expected: Mapping[str, Any],
    moved: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The verdict on what a run has logged and saved.

    Args:
        moved: a perturbed reference. From the second step on, what differs from the reference by up to AS_FAR times as
            much as it does is not wrong, and saved weights are not compared.
    """
    wrong: list[str] = []
    errors: dict[str, float] = {}

    def check(quantity: str, where: str, actual: float, right: float, bound: float) -> None:
        error = abs(actual - right) / max(abs(right), 1e-12) if actual != right else 0.0
        if actual != actual and right != right:
            error = 0.0
        if bound <= max(LATER_STEPS.values()):  # else rounding has moved weights
            errors[quantity] = max(errors.get(quantity, 0.0), error)
        if not error <= bound:
            wrong.append(f"{quantity} {where} is {actual:.8g} instead of {right:.8g} (relative error {error:.1e})")

    if len(logged) != len(expected["steps"]):
        wrong.append(f"steps: {len(logged)} are logged instead of {len(expected['steps'])}")
    for number, (entry, step) in enumerate(zip(logged, expected["steps"], strict=False), 1):
        where = f"of step {number}"
        bounds: Mapping[str, float] = FIRST_STEP if number == 1 else LATER_STEPS
        if plan["optimizer"] != "sgd":
            bounds = _with_rounding(bounds, plan, step)
        if moved is not None and number > 1:
            bounds = {name: max(bound, AS_FAR * _change(moved, step, name, number)) for name, bound in bounds.items()}
        check("num_tokens", where, entry["num_tokens"], step["num_tokens"], 0.0)
        check("learning_rate", where, entry["learning_rate"], step["learning_rate"], LEARNING_RATE)
        check("loss", where, entry["loss"], step["loss"], bounds["loss"])
        check("grad_norm", where, entry["grad_norm"], step["grad_norm"], bounds["grad_norm"])
    if len(evaluations) != len(expected["evaluations"]):
        wrong.append(f"evaluations: {len(evaluations)} are logged instead of {len(expected['evaluations'])}")
    for number, (actual, right) in enumerate(zip(evaluations, expected["evaluations"], strict=False), 1):
        bound = max(LATER_STEPS["loss"], *(2 * _looseness(plan, step) for step in expected["steps"]))
        if moved is not None:
            bound = max(bound, AS_FAR * abs(moved["evaluations"][number - 1] / right - 1))
        check("eval_loss", f"of evaluation {number}", actual, right, bound)
    if moved is not None:
        return {"status": "wrong" if wrong else EXACT}
    is_firm = all(_looseness(plan, step) <= LOOSE for step in expected["steps"])
    wrong += _wrong_weights(plan, expected.get("weights"), errors, is_firm=is_firm)
    if not wrong:
        return {"status": EXACT, "errors": errors}
    return {"status": "wrong", "detail": "; ".join(wrong[:4]), "signature": wrong[0].split()[0], "errors": errors}


def _change(moved: Mapping[str, Any], step: Mapping[str, float], quantity: str, number: int) -> float:
    """The relative difference between the perturbed reference's step, the `number`-th, and the reference's."""
    return abs(moved["steps"][number - 1][quantity] / step[quantity] - 1) if step[quantity] else 0.0


def _looseness(plan: Mapping[str, Any], step: Mapping[str, float]) -> float:
    """By what part the loss may change, since an adaptive optimizer has moved weights by rounding alone."""
    if plan["optimizer"] == "sgd" or not step["loss"]:
        return 0.0
    return ADAPTIVE_STEP.get(plan["optimizer"], 1.0) * step["loose"] / step["loss"]


def _with_rounding(
    bounds: Mapping[str, float], plan: Mapping[str, Any], step: Mapping[str, float]
) -> Mapping[str, float]:
    """Bounds for a step whose weights are not determined: first order for the loss, none for the gradient."""
    loose = _looseness(plan, step)
    return {
        "loss": max(bounds["loss"], 2 * loose),
        "grad_norm": bounds["grad_norm"] if loose <= LOOSE else math.inf,
    }


def _wrong_weights(
    plan: Mapping[str, Any], weights: Mapping[str, Any] | None, errors: dict[str, float], *, is_firm: bool
) -> list[str]:
    if weights is None:
        return []
    if "names" in weights:
        return [f"weights: other names are saved: {weights['names']}"]
    if plan["optimizer"] == "sgd":
        errors["weights"] = weights["update"]
        is_right = weights["update"] <= UPDATE or weights["size"] <= ROUNDING
    else:
        scale = ADAPTIVE_STEP.get(plan["optimizer"], 1.0)
        if is_firm:
            errors["weights of adaptive optimizers"] = weights["firm"] / scale
        is_right = (weights["firm"] <= FIRM * scale or not is_firm) and weights["all"] <= ALL * scale
    return [] if is_right else [f"weights that were saved differ, most in {weights['worst']}: {dict(weights)}"]
