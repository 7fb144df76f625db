"""Prove it here: `python -m longctx.verify --sp 4 --model_name_or_path …`, or `accelerate launch -m longctx.verify …`.

Exit code 0 if everything is exact, 1 if anything is off, 2 for what cannot be run.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longctx.launch.terminal import end_refused
from longctx.ranks import is_first_rank
from longctx.settings.flags import SFT
from longctx.settings.launcher import Launcher
from longctx.settings.schema import BOOL, INT, Flag, Method
from longctx.settings.values import Settings
from longctx.train import start
from longctx.verify.report import Check, Finding, as_advice, as_json, as_table, culprit

if TYPE_CHECKING:
    from longctx.settings.run import Run

OFF = 1

VERIFY = Method(
    module="longctx.verify",
    usage="longctx verify [--sp N] [--FLAG VALUE ...] [--json] [--num_layers N]",
    description="Compare one optimizer step at --sp N with one device, on your model, data and machine. The exit code "
    "is 0 if they agree, 1 if they do not, and 2 if the comparison cannot run. Findings about the machine are advice.",
    flags={
        **SFT.flags,
        "json": Flag("json", BOOL, False, "Print one JSON object instead of a table.", own=True, group="Comparison"),
        "num_layers": Flag(
            "num_layers",
            INT,
            None,
            "Use only this many of the model's layers, from the first on.",
            own=True,
            group="Comparison",
            default_is="all layers of a small model; of a large one two, or as many as include every kind of layer",
            least=1,
        ),
    },
    metrics=SFT.metrics,
    closing="It takes the flags of longctx train. Those that set the number of steps, the optimizer, clipping, "
    "evaluation, logs or saving have no effect on the one step. Without --model_name_or_path and --dataset_name, it "
    "uses the built-in tiny model and the sources of Python's standard library. A folder with a config.json and no "
    "weights gets random weights.",
)


DEFAULTS = {
    "model_name_or_path": "tiny",
    "dataset_name": "stdlib",
    "max_length": 512,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,  # with other numbers of label tokens
    "overlong": "split",
}
"""Values of flags that neither the user nor a profile sets.

The precision is that of training: fp32 on a GPU would run other kernels than training does.
"""

FIXED = {
    "max_steps": 1,
    "max_grad_norm": 0.0,
    "optim": "sgd",
    "logging_strategy": "steps",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "save_only_model": True,
    "push_to_hub": False,
    "dataset_streaming": False,
    "streaming": False,
    "eval_strategy": "no",
    "eval_on_start": False,
    "eval_generate": None,
    "load_best_model_at_end": False,
    "early_stopping_patience": None,
    "resume_from_checkpoint": None,
    "output_dir": None,
    "overwrite_output_dir": False,
    "train_sampling_strategy": "sequential",
    "balance_packs": False,
}
"""Whatever the user sets: one step, whose update is of no interest, so no clipping and an optimizer without states."""


def with_defaults(settings: Settings, launcher: Launcher) -> Settings:
    """Return the settings, completed by what a verification needs."""
    wanted: dict[str, Any] = dict(DEFAULTS)
    if settings["datasets"]:
        del wanted["dataset_name"]
    if settings["global_batch_size"] is not None:
        del wanted["gradient_accumulation_steps"]
    wanted = {name: value for name, value in wanted.items() if not settings.is_set(name)} | FIXED
    # What a profile sets, such as the bound on the gradient's norm, stays.
    return settings.with_("command", **{name: value for name, value in wanted.items() if name not in launcher.values})


def main(arguments: list[str] | None = None) -> int:
    """Verify one run and return the exit code."""
    # The result alone goes to stdout, and what libraries print does not.
    return start(arguments, VERIFY, _verify, complete=with_defaults, decide=_on_few_layers, messages=sys.stderr)


def _on_few_layers(run: Run) -> Run:
    from longctx.verify.setup import check_engine, few_layers

    return few_layers(check_engine(run), run.flags["num_layers"])


def _verify(run: Run) -> int:
    from longctx.run import finish

    for name in ("DeepSpeed", "accelerate.accelerator"):  # they warn of the plain optimizer, and of what is overridden
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="longctx-verify-") as folder:
            checks = _compare(run, folder, for_scripts=run.flags["json"])
    except ValueError as error:
        return end_refused(error)
    finish()
    return OFF if culprit(checks) else 0


def _compare(run: Run, folder: str, *, for_scripts: bool) -> list[Check]:
    """Compare on all ranks together. Rank 0 prints the result, and every rank returns it."""
    from longctx.ranks.agreement import broadcast_object
    from longctx.run import build_trainer, prepare
    from longctx.verify.machine import check_machine
    from longctx.verify.parity import check_parity
    from longctx.verify.setup import load_layers, probe_rows, with_tokenizer

    def progress(doing: str) -> None:
        if is_first_rank():
            print(f"longctx: {doing}", flush=True)

    started = time.perf_counter()
    progress("preparing the data")
    prepared = probe_rows(prepare(with_tokenizer(run.decide(output_dir=folder))))
    progress("loading the model")
    trainer = build_trainer(prepared, load_layers(run, prepared))
    progress("looking at the machine")
    machine = check_machine(prepared.run, trainer.args.device)
    progress("taking the step on one device, and then as trained")
    checks = broadcast_object(check_parity(trainer, run.dims.sp))
    if trainer.sequence.rank == 0:
        seconds = time.perf_counter() - started
        run = replace(prepared.run, flags=run.flags)  # the backend that the data decided on
        print(_result(run, checks, machine, seconds, for_scripts=for_scripts), file=sys.__stdout__, flush=True)
    return checks


def _result(run: Run, checks: list[Check], machine: list[Finding], seconds: float, *, for_scripts: bool) -> str:
    from longctx.data import name_data

    text = run.model_config.get_text_config()
    facts = {
        "model": run.settings["model_name_or_path"],
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "data": name_data(run.settings),
        "max_length": run.settings["max_length"],
        "mesh": str(run.dims),
        "backend": str(run.backend.arrangement),
        "engine": run.engine,
        "precision": "bf16" if run.settings["bf16"] else "fp32",
        "seconds": round(seconds, 1),
    }
    if for_scripts:
        return as_json(facts, checks, machine)
    off = culprit(checks)
    verdict = f"NOT exact: {off.name}: {off.detail}" if off else f"exact: sp {run.dims.sp} and one device agree"
    lines = [f"{name:10}  {fact}" for name, fact in facts.items()]
    return "\n".join([*lines, "", as_advice(machine), "", as_table(checks), "", verdict])


if __name__ == "__main__":
    sys.exit(main())
