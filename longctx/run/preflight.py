"""Look at all that a run needs, as --dry_run does: its first records, the model's files, disk space, and the forecast.

One process does this, without a process group. No weights are read, and nothing is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from longctx.data import IGNORE_INDEX, DataError
from longctx.launch.console import Line
from longctx.model.files import weight_files
from longctx.model.saving import damage_of_generation_config
from longctx.model.tiny import TINY
from longctx.packing import plan_packing
from longctx.run.preparation import read_tokenizer, template_notes
from longctx.settings.run import Run
from longctx.training.dataset import Reading, first_documents
from longctx.training.fingerprint import is_preference
from longctx.training.schedule import steps_of_epochs

GB = 10**9
SAMPLED, SAMPLED_TOKENS = 256, 4_000_000
"""Documents that are read at least, and tokens up to which further ones are, which takes a few seconds."""
SHOWN = 60
"""Characters that are shown at each end of a part of a sample."""
SHOWN_PARTS = 6
WEIGHT_BYTES = 4
"""Bytes of a trained parameter in a saved model."""
STATE_BYTES = 8
"""Bytes of its states in a checkpoint, besides: AdamW's two moments."""


def preflight(run: Run) -> list[Line]:
    """Return what was found.

    Raises:
        ValueError: for data or a model that cannot be read as asked.
    """
    tokenizer = read_tokenizer(run.settings, run.model_config)
    reading = Reading(run.settings, tokenizer, run.model_config)
    documents, is_all = first_documents(reading, number=SAMPLED, tokens=SAMPLED_TOKENS)
    lengths = [len(document["input_ids"]) for document in documents]
    data = list(_describe_data(documents, lengths, run.settings, is_all=is_all))
    steps, sequences = _count_steps(run, lengths) if is_all else (run.settings["max_steps"], None)
    return [
        *(Line("note", note) for note in template_notes(run.settings, tokenizer, run.model_config)),
        *data,
        Line("sample", _decoded(documents[0], tokenizer)),
        *_describe_files(run),
        Line("disk", _describe_disk(run)),
        *run.describe_batch(),
        Line("steps", _describe_steps(run, steps, sequences)),
        *_describe_time(run, steps),
    ]


def _describe_data(
    documents: Sequence[Mapping[str, NDArray[Any]]],
    lengths: Sequence[int],
    settings: Mapping[str, Any],
    *,
    is_all: bool,
) -> Iterator[Line]:
    """Yield how many tokens the documents have, and how many of them are trained on.

    Raises:
        DataError: if one is too long, and such documents are refused.
    """
    learnt = sum(int((_labels(document)[1:] != IGNORE_INDEX).sum()) for document in documents)
    limit = f" (--dry_run reads {SAMPLED}, and more up to {SAMPLED_TOKENS:,} tokens)"
    yield Line(
        "records",
        f"{'all' if is_all else 'the first'} {len(lengths):,} documents were read{'' if is_all else limit}: "
        f"{sum(lengths):,} tokens, {learnt:,} of them "
        f"({learnt / sum(lengths):.0%}) trained on, {max(lengths):,} in the longest document",
    )
    if not (too_long := sum(length > settings["max_length"] for length in lengths)):
        return
    longer = f"{too_long:,} of these documents have more than --max_length {settings['max_length']:,} tokens"
    if settings["overlong"] == "raise":
        raise DataError(
            f"{longer}, and --overlong raise refuses them. The longest has {max(lengths):,}. Use a longer "
            "--max_length, or --overlong truncate, drop or split; or turns, for conversations."
        )
    yield Line("overlong", f"{longer}: {_OVERLONG[settings['overlong']]}")


_OVERLONG = {
    "truncate": "they are cut",
    "drop": "they are left out",
    "split": "they are split",
    "turns": "their whole turns that fit are kept",
}


def _labels(document: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    return document.get("labels", document["input_ids"])


def _decoded(document: Mapping[str, NDArray[Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the document's text, with the parts that are not trained on in ⟦ ⟧, and long parts shortened."""
    labels = _labels(document).copy()
    labels[:1] = labels[1] if len(labels) > 1 else IGNORE_INDEX  # no target, and shown with those that follow
    parts: list[str] = []
    for is_learnt, group in groupby(zip(document["input_ids"], labels != IGNORE_INDEX, strict=True), lambda x: x[1]):
        if len(parts) == SHOWN_PARTS:
            parts.append(" …")
            break
        text = repr(tokenizer.decode([int(token) for token, _ in group]))[1:-1]
        text = text if len(text) <= 2 * SHOWN + 3 else f"{text[:SHOWN]} … {text[-SHOWN:]}"
        parts.append(text if is_learnt else f"⟦{text}⟧")
    mask = " (not trained on: ⟦ ⟧)" if (labels == IGNORE_INDEX).any() else ""
    return "".join(parts) + mask


def _describe_files(run: Run) -> Iterator[Line]:
    """Yield what is known of the files with the model's weights.

    Raises:
        ValueError: if a folder has none.
    """
    name, revision = run.settings["model_name_or_path"], run.settings["model_revision"]
    if name == TINY:
        found = "the model is built in"
    elif files := weight_files(name, revision):
        size = sum(file.stat().st_size for file in files)
        found = f"the model's weights are {len(files)} file{'s' * (len(files) > 1)} of {size / GB:.1f} GB in {name}"
    elif Path(name).is_dir():
        raise ValueError(
            f"--model_name_or_path {name} has a configuration and no weights. Complete the folder, or download it "
            f"again."
        )
    else:
        found = f"the weights of {name} are downloaded when the run starts, unless they are in the cache"
    yield Line("files", found)
    if damage := damage_of_generation_config(name, revision):
        yield Line("files", f"transformers cannot use generation_config.json: {damage}. It is copied unchanged")


def _describe_disk(run: Run) -> str:
    """Return the space that saving takes, and the space that there is."""
    settings = run.settings
    trained = run.shape.model.num_trained_parameters
    needed = model = WEIGHT_BYTES * trained
    folder = Path(settings["output_dir"]).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    free = shutil.disk_usage(there).free
    text = f"the model takes about {_gb(model)}, and no checkpoints are saved"
    if settings["save_strategy"] != "no":
        checkpoint = model + (0 if settings["save_only_model"] else STATE_BYTES * trained)
        kept = settings["save_total_limit"]
        needed += checkpoint * ((kept or 0) + 1)  # an old one is deleted when a new one is complete
        limit = f"--save_total_limit keeps {kept}" if kept else "without --save_total_limit all of them are kept"
        text = f"a checkpoint takes about {_gb(checkpoint)}, and {limit}"
    lacks = "" if needed <= free else f"; THIS IS TOO LITTLE for {_gb(needed)}"
    return f"{text}; {_gb(free)} are free in {there}{lacks}"


def _gb(size: float) -> str:
    return f"{size / GB:,.1f} GB" if size >= GB / 10 else f"{size / 10**6:,.1f} MB"


def _count_steps(run: Run, lengths: Sequence[int]) -> tuple[int, int | None]:
    """Return the steps of the run and the sequences of an epoch, from the lengths of all documents.

    Where other facts count besides, which only --prepare_only looks at, they are --max_steps and None.
    """
    settings = run.settings
    is_plain = not (settings["datasets"] or is_preference(settings))
    if settings["max_steps"] > 0 or settings["overlong"] == "turns" or not is_plain:
        return settings["max_steps"], None
    strategy = settings["packing_strategy"] if settings["packing"] else "none"
    packing, _ = plan_packing(lengths, settings["max_length"], strategy=strategy, overlong=settings["overlong"])
    epochs, drop_last = settings["num_train_epochs"], settings["dataloader_drop_last"]
    steps = steps_of_epochs(len(packing), run.sequences_per_step, epochs=epochs, drop_last=drop_last)
    return steps, len(packing)


def _describe_steps(run: Run, steps: int, sequences: int | None) -> str:
    if sequences is not None:
        epochs = run.settings["num_train_epochs"]
        return f"{steps:,}: {epochs:g} epoch{'s' * (epochs != 1)} of {sequences:,} sequence{'s' * (sequences != 1)}"
    return f"{steps:,}" if steps > 0 else "known once all documents are packed, which --prepare_only does"


def _describe_time(run: Run, steps: int) -> Iterator[Line]:
    """Yield the predicted time of the whole run, or of a step where an epoch's steps are not yet known."""
    if run.forecast is None or not run.forecast.machine.is_known:
        return
    seconds = run.forecast.step_seconds
    if steps <= 0:
        yield Line("time", f"{seconds:.3g} s a step (predicted)")
        return
    minutes = round(steps * seconds / 60)
    duration = f"{minutes // 60:,} h {minutes % 60:02} min" if minutes else f"{steps * seconds:.0f} s"
    yield Line("time", f"{steps:,} steps × {seconds:.3g} s = {duration} (predicted)")
