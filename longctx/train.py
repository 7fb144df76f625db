"""Train: `accelerate launch -m longctx.train --sp 4`, or `python -m longctx.train`, or torchrun."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import longctx
from longctx.launch.accelerate import relaunch, who_starts
from longctx.launch.slurm import join_step
from longctx.launch.store import check_restarts
from longctx.launch.terminal import USAGE_ERROR, end_refused, interrupts_end, quieten, say_hello
from longctx.ranks import FAILED, is_first_on_node, is_first_rank
from longctx.settings.flags import SFT
from longctx.settings.help import help_asked
from longctx.settings.launcher import Launcher, read_profile
from longctx.settings.read import parse_flags
from longctx.settings.schema import Method
from longctx.settings.values import Settings

if TYPE_CHECKING:
    from longctx.settings.run import Run


def main(arguments: list[str] | None = None, method: Method = SFT) -> int:
    """Train, and return the exit code. Input that cannot be trained on exactly ends with a one-line error.

    Flags, the YAML file and the launcher's profile are checked before torch is imported.
    """
    return start(arguments, method, _carry_out, how_to_resume=how_to_resume)


def start(
    arguments: list[str] | None,
    method: Method,
    work: Callable[[Run], int],
    *,
    complete: Callable[[Settings, Launcher], Settings] = lambda settings, _: settings,
    decide: Callable[[Run], Run] = lambda run: run,
    how_to_resume: Callable[[str], str] | None = None,
    messages: TextIO | None = None,
) -> int:
    """Resolve a run in each of its processes, which a launcher or this function starts, and return what `work` returns.

    Args:
        arguments: the command line; None for that of this process.
        complete: adds to the settings what the command sets itself.
        decide: what the command decides besides, or refuses by a ValueError.
        how_to_resume: returns how to go on from a run in a folder, after a process was killed.
        messages: where to print what is not the command's result; stdout if None.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    arguments = sys.argv[1:] if arguments is None else arguments
    if text := help_asked(arguments, method):
        if is_first_rank():
            print(text)
        return 0
    with redirect_stdout(messages or sys.stdout):
        try:
            settings = parse_flags(arguments, method)
            launcher = take_over(settings, method.module)
            from longctx.settings.processes import count_to_start
            from longctx.settings.rules import fill

            settings = fill(complete(settings, launcher), launcher)
            count = count_to_start(settings, launcher)
        except ValueError as error:
            return end_refused(error)
        with interrupts_end():
            if is_first_rank():
                say_hello(longctx.__version__)
            if count:
                who = who_starts(count, method.module, only_one_started=launcher.only_one_started)
                print(f"longctx: {who}", flush=True)
                from longctx.launch.spawn import spawn

                return spawn(count, list(settings.arguments), method.module, how_to_resume=how_to_resume)
            from longctx.training.engines import prefer_huge_pages, set_up_allocators

            quieten()
            prefer_huge_pages()
            set_up_allocators()
            try:
                with _without_collections():
                    from longctx.settings.resolve import resolve_together
                run = resolve_together(settings, launcher, os.environ, decide)
            except ValueError as error:
                return end_refused(error)
            return work(run)


def take_over(settings: Settings, module: str) -> Launcher:
    """Return what started this process, or replace it by `accelerate launch` with the profile that a flag names.

    Raises:
        ValueError: for a launcher or a profile that cannot be carried out.
    """
    check_restarts()
    if settings["accelerate_config"] is None:
        join_step(os.environ)
    launcher = read_profile()
    if settings["accelerate_config"] is not None:
        if is_first_rank():
            say_hello(longctx.__version__)  # accelerate's launcher takes seconds, too
        from longctx.launch.spawn import device_count
        from longctx.upstream.deepspeed_internals import stay_on_cpu

        if device_count() == 0:
            stay_on_cpu()  # else DeepSpeed, which it imports, says on stdout that it looks for a GPU
        is_launched = launcher.launched or launcher.by_accelerate
        relaunch(settings, settings.arguments, is_launched=is_launched, module=module)
    return launcher


def how_to_resume(output_dir: str) -> str:
    """Return a sentence on how to go on from the last checkpoint in a folder."""
    from longctx.training.checkpoint.folder import how_to_resume

    return how_to_resume(Path(output_dir))


def _carry_out(run: Run) -> int:
    """Do what the flags ask for, and return the exit code."""
    if run.settings["dry_run"]:
        return dry_run(run) if is_first_rank() else 0
    if run.settings["prepare_only"]:
        return prepare_only(run)
    with _without_collections():
        from longctx.launch.failures import failures_told
        from longctx.report.memory_advice import out_of_memory_explained
    resume = partial(how_to_resume, run.settings["output_dir"])
    told = failures_told(resume, run.settings["ddp_timeout"], Path(run.settings["output_dir"]))
    with out_of_memory_explained(run), told:
        return _train(run)


def _train(run: Run) -> int:
    """Prepare processes and data, train the model, and return the exit code."""
    with _without_collections():
        from longctx.data import DataError
        from longctx.ranks.agreement import RefusedOnAllRanks
        from longctx.run import finish, fit, load, prepare
        from longctx.training.beforehand import UntrainableError
        from longctx.training.callbacks import RESUMABLE
        from longctx.training.checkpoint.files import CheckpointError, NotSavedError
        from longctx.training.nonfinite import NonFiniteError

    try:
        prepared = prepare(run)
        if prepared.is_finished:
            finish()
            return 0
        model = load(prepared)
    except ValueError as error:
        return end_refused(error)
    try:
        trainer = fit(prepared, model)
    except (DataError, NonFiniteError, UntrainableError) as error:  # every rank raises it in the same step
        code = FAILED if isinstance(error, NonFiniteError) else USAGE_ERROR
        return end_refused(error, is_mine=is_first_rank(), together=True, code=code)
    except (CheckpointError, NotSavedError, RefusedOnAllRanks) as error:  # raised by one rank; the others know
        code = USAGE_ERROR if isinstance(error, CheckpointError) else FAILED
        return end_refused(error, together=True, code=code)
    finish()
    return 0 if trainer.stop_on_signal.stopped_by is None else RESUMABLE


@contextmanager
def _without_collections() -> Iterator[None]:
    """Import large libraries in three quarters of the time, without collecting garbage among their million objects.

    Later collections do not walk through these objects either.
    """
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
            atexit.register(gc.unfreeze)  # else libraries report objects that are left at the end
        if was_enabled:
            gc.enable()


def dry_run(run: Run) -> int:
    """Print the resolved run and what it finds on this machine, and return the exit code."""
    from longctx.launch.console import show_summary
    from longctx.upstream.deepspeed_internals import stay_on_cpu

    stay_on_cpu()
    from longctx.run.preflight import preflight

    try:
        found = preflight(run)
    except ValueError as error:
        show_summary(run.summary(), explain=run.settings["explain"])
        return end_refused(error)
    show_summary([*run.summary(), *found], explain=run.settings["explain"])
    return 0


def prepare_only(run: Run) -> int:
    """Tokenise and plan for later runs, once on each machine, and return the exit code."""
    from longctx.launch.console import Line, show

    if not is_first_on_node():
        return 0
    from longctx.upstream.deepspeed_internals import stay_on_cpu

    stay_on_cpu()
    from longctx.data.contents import cache_folder
    from longctx.run import prepare_data

    try:
        data = prepare_data(run)
    except ValueError as error:
        return end_refused(error)
    show([Line("packing", str(data.report))])
    show(Line("mixture", str(source)) for source in data.mixture)
    show([Line("prepared", f"{cache_folder()} keeps the plan; a run with the same flags starts from it")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
