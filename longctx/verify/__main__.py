"""Prove it here: `python -m longctx.verify --sp 4 --model_name_or_path …`, or `accelerate launch -m longctx.verify …`.

Exit code 0 if everything is exact, 1 if anything is off, 2 for what cannot be run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from longctx.verify.report import Check, Finding, as_advice, as_json, as_table, culprit

if TYPE_CHECKING:
    from longctx.settings.run import Run

OFF = 1
MODULE = "longctx.verify"


def main(arguments: list[str] | None = None) -> int:
    """Verify one run and return the exit code."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    arguments = sys.argv[1:] if arguments is None else arguments
    own, others = _parser().parse_known_args(arguments)
    if {"-h", "--help"} & set(arguments):
        _parser().print_help()
        return 0
    from longctx.launch.interrupts import interrupts_end
    from longctx.launch.terminal import end_refused
    from longctx.settings.help import check_names

    try:
        check_names(arguments, also=[action.dest for action in _parser()._actions])
    except ValueError as error:
        return end_refused(error)
    with interrupts_end(), redirect_stdout(sys.stderr):  # what libraries print; the result alone goes to stdout
        return _verify(arguments, others, own)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longctx verify",
        usage="longctx verify [--sp N] [--FLAG VALUE ...] [--json] [--num_layers N]",
        description="Compare one optimizer step at --sp N with one device, on your model, data and machine. The exit "
        "code is 0 if they agree, 1 if they do not, and 2 if the comparison cannot run. Findings about the machine are "
        "advice.",
        epilog="It also takes the flags of longctx train (longctx train --help). Those that set the number of steps, "
        "the optimizer, clipping, evaluation, logs or saving have no effect on the one step. Without "
        "--model_name_or_path and --dataset_name, it uses the built-in tiny model and the sources of Python's standard "
        "library. A folder with a config.json and no weights gets random weights.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of a table.")
    parser.add_argument(
        "--num_layers",
        "--num-layers",
        type=int,
        help="Use only this many of the model's layers, from the first on. Default: all layers of a small model; of a "
        "large one two, or as many as include every kind of layer.",
    )
    return parser


def _verify(arguments: list[str], others: list[str], own: argparse.Namespace) -> int:
    from longctx.launch.terminal import end_refused, quieten
    from longctx.training.engines import prefer_huge_pages, set_up_allocators
    from longctx.upstream.deepspeed_internals import stay_on_cpu

    quieten()
    prefer_huge_pages()
    set_up_allocators()
    from longctx.launch.slurm import join_step
    from longctx.launch.spawn import device_count, spawn
    from longctx.settings.flags import parse_flags
    from longctx.settings.profile import read_profile, relaunch, who_starts
    from longctx.settings.resolve import resolve
    from longctx.verify.setup import check_engine, few_layers, with_defaults

    try:
        flags = replace(parse_flags(others), arguments=tuple(arguments))
        if flags.accelerate_config is None:
            join_step(os.environ)
        profile = read_profile()
        if flags.accelerate_config is not None:
            if device_count() == 0:
                stay_on_cpu()  # the launcher imports DeepSpeed, which would say so on stdout
            relaunch(flags, profile, MODULE)
        run = check_engine(resolve(with_defaults(flags, profile), profile, os.environ))
        run = few_layers(run, own.num_layers)
    except ValueError as error:
        return end_refused(error)
    if run.must_spawn:
        print(f"longctx: {who_starts(profile, run.dims.world_size, MODULE)}", flush=True)
        return spawn(run.dims.world_size, arguments, MODULE)

    from longctx.run import finish

    try:
        with tempfile.TemporaryDirectory(prefix="longctx-verify-") as folder:
            checks = _compare(run, folder, for_scripts=own.json)
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

    started = time.perf_counter()
    prepared = probe_rows(prepare(with_tokenizer(replace(run, settings={**run.settings, "output_dir": folder}))))
    trainer = build_trainer(prepared, load_layers(run, prepared))
    machine = check_machine(prepared.run, trainer.args.device)
    checks = broadcast_object(check_parity(trainer, run.dims.sp))
    if trainer.sequence.rank == 0:
        seconds = time.perf_counter() - started
        run = replace(prepared.run, settings=run.settings)  # the backend that the data decided on
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
