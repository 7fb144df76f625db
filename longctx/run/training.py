"""Train, and print what a run reports before and after."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from transformers import EarlyStoppingCallback, PreTrainedModel, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from longctx.data import DataError, name_data
from longctx.launch.console import Line, say, show, show_result, show_row, show_summary
from longctx.launch.failures import FollowSteps
from longctx.model.adapter import add_adapter
from longctx.model.card import CARD_FILE, TrainedModel
from longctx.model.load import count_parameters, count_trained_parameters, load_model, load_whole_config
from longctx.ranks.agreement import broadcast_object
from longctx.ranks.peers import current_peers
from longctx.report.memory_advice import describe_memory
from longctx.report.page import reported
from longctx.run.dashboards import charts_go_on
from longctx.run.model import attention_kernel, build_trainer
from longctx.run.preparation import PreparedRun
from longctx.settings.run import Run
from longctx.training.callbacks import CompareForecast, ProfileSteps
from longctx.training.checkpoint.files import read_manifest
from longctx.training.checkpoint.folder import checkpoints, end, stamp
from longctx.training.completions import LogCompletions
from longctx.training.dataset import TrainingData
from longctx.training.exactness import NOT_LOGGED, Exactness
from longctx.training.reference import single_device_step
from longctx.training.trainer import SequenceTrainer


def fit(prepared: PreparedRun, model: PreTrainedModel) -> SequenceTrainer:
    """Train, and save the model and trainer_state.json in output_dir, or a checkpoint if a signal stops the run."""
    run, settings = prepared.run, prepared.run.settings
    trainer = build_trainer(prepared, model)
    is_first, metrics, folder = trainer.sequence.rank == 0, trainer.step_metrics, Path(trainer.args.output_dir)
    trainer.add_callback(FollowSteps())
    if run.forecast is not None and is_first:
        trainer.add_callback(
            CompareForecast(
                run.forecast,
                lambda: () if metrics.peak_memory is None else metrics.peak_memory.reserved,
                kernel=run.forecast.machine.kernel if settings["learned"] and not run.use_cpu else "",
            )
        )
    if settings["profile"]:
        trainer.add_callback(ProfileSteps(str(folder), settings["profile_steps"], trainer.sequence.rank))
    completions = None
    if settings["eval_generate"] is not None:
        assert prepared.data.evaluation is not None, "the flag needs it"
        completions = LogCompletions(trainer, prepared.data.evaluation.prompts, settings["max_length"])
        trainer.add_callback(completions)
    if (patience := settings["early_stopping_patience"]) is not None:
        trainer.add_callback(EarlyStoppingCallback(patience, settings["early_stopping_threshold"]))
    disable_progress_bar()  # transformers' bar for every saved file
    if is_first:
        generate = [Line("generate", str(completions))] if completions else []
        show_summary([*run.summary(), *_sizes(prepared, model), *generate], explain=settings["explain"])
    exactness = Exactness.of_start(is_demo=run.flags.is_demo, resume_from=prepared.resume_from)
    if trainer.args.should_save:
        exactness.write(folder)
    memory: list[str] = []
    resumed_at = None if prepared.resume_from is None else read_manifest(prepared.resume_from).step
    with _marked(trainer), reported(run, trainer) as results, charts_go_on(trainer, resumed_at=resumed_at):
        trainer.train(resume_from_checkpoint=None if prepared.resume_from is None else str(prepared.resume_from))
        stopped_by = trainer.stop_on_signal.stopped_by
        if is_first and (read := trainer.stream_read) is not None:
            show([Line("packing", f"{read.report}; the data set was begun {read.passes} times")])
            show(Line("mixture", str(source)) for source in trainer.mixture_read())
        if stopped_by is None:
            _check_labels_seen(trainer, prepared)
            if is_first and trainer.has_stopped_early:
                state, metric = trainer.state, str(trainer.args.metric_for_best_model).removeprefix("eval_")
                say(
                    f"stopped early after step {state.global_step}: {patience} evaluations in a row were no better "
                    f"than eval_{metric} {state.best_metric:.6g}"
                )
            trainer.save_results()
        if is_first:
            assert metrics.peak_memory is not None, "read at the end of training"
            memory = describe_memory(run, metrics.peak_memory, metrics.longest_row, trainer.model)
            results.append(("Memory", memory[-1]))
        if run.flags.is_demo and stopped_by is None:
            exactness = broadcast_object(_compare_first_step(trainer, run) if is_first else exactness)
            if trainer.args.should_save:
                exactness.write(folder)
    if stopped_by is None:
        trained = trainer.trained_model(settings["model_name_or_path"], is_part=is_first and _is_text_part(settings))
        trainer.create_model_card(dataset_name=name_data(settings), model=trained, also={"flags": _flags_set(run)})
        if trainer.args.push_to_hub:  # includes the page that `reported` wrote
            trainer.push_results()
    if is_first:
        show(Line("memory", line) for line in (memory if settings["explain"] else memory[-1:]))
        if stopped_by is None:
            show_row(Text())
            show(_afterwards(trainer, trained))
        if stopped_by is not None:
            say(
                f"stopped by {stopped_by.name} after step {trainer.state.global_step}, whose checkpoint is in "
                f"{folder}: --resume_from_checkpoint auto goes on from it"
            )
        elif exactness.compared and resumed_at is None:  # else step 1 was another start's, perhaps on another layout
            show_result(*str(exactness).split(": ", 1))
    return trainer


def _is_text_part(settings: Mapping[str, Any]) -> bool:
    """Whether the text part of a multimodal model is trained, as far as can be told at the end of a run."""
    with suppress(OSError, ValueError):
        return load_whole_config(settings["model_name_or_path"], revision=settings["model_revision"]) is not None
    return False


def _flags_set(run: Run) -> str:
    """Return the flags that the user has set to other values than the defaults, without secrets and what rows tell."""
    flags, elsewhere = run.flags.method.flags, ("model_name_or_path", "dataset_name", "datasets", "output_dir")
    given = {name: run.flags[name] for name in sorted(run.flags.explicit) if name not in elsewhere}
    changed = {name: of for name, of in given.items() if of != flags[name].default and not flags[name].secret}
    texts = {name: of if isinstance(of, str) else json.dumps(of, default=str) for name, of in changed.items()}
    return " ".join(f"`--{name} {text}`" for name, text in texts.items()) or "none"


def _afterwards(trainer: SequenceTrainer, model: TrainedModel) -> list[Line]:
    """Return what to do with the model that was saved, and how to go on from it."""
    folder, best = Path(model.folder), trainer.best_evaluation()
    what = "the model" if model.adapter is None else f"an adapter of {model.base}"
    evaluated = "not evaluated; --eval_strategy steps evaluates during training"
    if best is not None:
        evaluated = f"{best}{_which_is_saved(trainer, best.step)}"
    if kept := checkpoints(folder):
        go_on = f"--resume_from_checkpoint auto with a larger --max_steps goes on from {kept[0].name}"
    else:
        go_on = f"without a checkpoint (--save_strategy steps), from the weights: --model_name_or_path {model.weights}"
    export, use = Line("export", model.export()), [Line("load", model.load()), Line("serve", model.serve())]
    return [
        Line("model", f"{folder} has {what}; its {CARD_FILE} says how it was trained"),
        Line("best", evaluated),
        *([export, *use] if model.needs_export else [*use, export]),
        Line("go on", go_on),
    ]


def _which_is_saved(trainer: SequenceTrainer, step: int) -> str:
    """Return how the saved model is related to the step of the best evaluation."""
    last = trainer.state.global_step
    if trainer.args.load_best_model_at_end:
        return ", which is the saved model"
    if step == last:
        return ", the last"
    return f"; the saved model is that of step {last:,} (--load_best_model_at_end True saves the best)"


class _Stamp(TrainerCallback):
    """Records after each step that the run is alive."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            stamp(Path(args.output_dir))


@contextmanager
def _marked(trainer: SequenceTrainer) -> Iterator[None]:
    """Keep run.json up to date: the time of the last step, and at the end whether the run has taken all of them."""
    trainer.add_callback(_Stamp())
    finished = None
    try:
        yield
        if trainer.stop_on_signal.stopped_by is None:
            finished = trainer.state.global_step
    except BaseException:
        peers = current_peers()
        if peers is not None and peers.rank > 0 and all(map(peers.has_ended, range(peers.rank))):
            end(Path(trainer.args.output_dir))  # on behalf of rank 0, which has died
        raise
    finally:
        if trainer.args.should_save:
            end(Path(trainer.args.output_dir), finished=finished)


def _check_labels_seen(trainer: SequenceTrainer, prepared: PreparedRun) -> None:
    """Check after training that at least one step had a token with a label.

    Raises:
        DataError: if no step had a token with a label, so that nothing was trained.
    """
    if not trainer.has_seen_labels:
        read = trainer.stream_read
        data = "the data set" if read is None else "the stream"
        raise DataError(
            f"{data} of {name_data(prepared.run.settings)} had no token with a label in {trainer.state.global_step} "
            f"steps: {prepared.data.report if read is None else read.report}. Nothing was trained, and no model is "
            "saved. Use a longer --max_length, --overlong split, or more steps."
        )


def _sizes(prepared: PreparedRun, model) -> list[Line]:
    """Return the lines that need the data and the model: batch equation, tokens, kernel."""
    settings = prepared.run.settings
    kernel = attention_kernel(prepared, model)
    asked = f", {settings['attn_implementation']} was asked for" if settings["attn_implementation"] else ""
    adapter = f", {count_trained_parameters(model):,} of them trained, in the adapter" if settings["use_peft"] else ""
    targets = prepared.data.describe_targets() if isinstance(prepared.data, TrainingData) else None
    report, evaluation = prepared.data.report, prepared.data.evaluation
    return [
        Line("packing", report.short(), str(report))
        if report
        else Line("packing", "as the stream is read; the counts come at the end of the run"),
        *([Line("targets", targets)] if targets else []),
        *(Line("mixture", str(source)) for source in prepared.data.mixture),
        *([Line("evaluate", evaluation.report.short(), str(evaluation.report))] if evaluation else []),
        *([Line("resume", f"from {prepared.resume_from}")] if prepared.resume_from else []),
        *prepared.run.describe_batch(),
        Line("weights", f"{count_parameters(model):,} parameters{adapter}"),
        Line("kernel", f"{kernel.name}{asked}", f"attention kernel {kernel.name} (packed-exact{asked})"),
    ]


def first_step_batches(trainer: SequenceTrainer, dp_rank: int) -> list[dict[str, torch.Tensor]]:
    """Return the uncut micro-batches that data-parallel rank `dp_rank` sees in the first optimizer step."""
    step = islice(trainer.micro_batches(dp_rank), trainer.args.gradient_accumulation_steps)
    return [trainer.data_collator.whole(rows) for rows in step if rows]


def _compare_first_step(trainer: SequenceTrainer, run: Run) -> Exactness:
    """Compare the first logged step with the same step on one device, from the same weights."""
    logged = next((entry for entry in trainer.state.log_history if entry.get("step") == 1 and "loss" in entry), None)
    if logged is None:
        return Exactness(compared=False, reason=NOT_LOGGED)
    batches = [batch for dp_rank in range(run.dims.dp) for batch in first_step_batches(trainer, dp_rank)]
    model = load_model(run.settings["model_name_or_path"], run.model_config)
    if run.settings["use_peft"]:
        model = add_adapter(model, run.settings)
    loss, grad_norm = single_device_step(model, batches, trainer.args.label_smoothing_factor)
    return Exactness.of_step((logged["loss"], loss), (logged["grad_norm"], grad_norm), bf16=trainer.args.bf16)
