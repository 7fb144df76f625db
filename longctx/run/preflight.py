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
from longctx.forecast.model_sizes import ModelSizes, adapter_rows
from longctx.launch.console import Line
from longctx.model.files import weight_files
from longctx.model.saving import damage_of_generation_config
from longctx.model.tiny import TINY
from longctx.run.preparation import read_tokenizer, template_notes
from longctx.settings.run import Run
from longctx.training.dataset import first_documents

GB = 10**9
SAMPLED = 256
"""Documents that are read."""
SHOWN = 60
"""Characters that are shown at each end of a part of a sample."""
SHOWN_PARTS = 6
WEIGHT_BYTES = 4
"""Bytes of a trained parameter in a saved model."""
STATE_BYTES = 12
"""Bytes of its states in a checkpoint, besides: the optimizer's copy in fp32, and AdamW's two moments."""


def preflight(run: Run) -> list[Line]:
    """Return what was found.

    Raises:
        ValueError: for data or a model that cannot be read as asked.
    """
    tokenizer = read_tokenizer(run.settings, run.model_config)
    documents = first_documents(run.settings, tokenizer, run.model_config, SAMPLED)
    return [
        *(Line("note", note) for note in template_notes(run.settings, tokenizer, run.model_config)),
        *_describe_data(documents, run.settings),
        Line("sample", _decoded(documents[0], tokenizer)),
        *_describe_files(run),
        Line("disk", _describe_disk(run)),
        *run.describe_batch(),
        *_describe_time(run),
    ]


def _describe_data(documents: Sequence[Mapping[str, NDArray[Any]]], settings: Mapping[str, Any]) -> Iterator[Line]:
    """Yield how many tokens the documents have, and how many of them are trained on.

    Raises:
        DataError: if one is too long, and such documents are refused.
    """
    lengths = [len(document["input_ids"]) for document in documents]
    learnt = sum(int((_labels(document)[1:] != IGNORE_INDEX).sum()) for document in documents)
    yield Line(
        "records",
        f"{len(lengths):,} documents were read: {sum(lengths):,} tokens, {learnt:,} of them "
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
    sizes = ModelSizes.of_config(run.model_config)
    trained = settings["lora_r"] * adapter_rows(sizes) if settings["use_peft"] else sizes.num_parameters
    needed = model = WEIGHT_BYTES * trained
    folder = Path(settings["output_dir"]).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    free = shutil.disk_usage(there).free
    text = f"the model takes about {_gb(model)}, and no checkpoints are saved"
    if settings["save_strategy"] != "no":
        checkpoint = model + (0 if settings["save_only_model"] else STATE_BYTES * trained)
        kept = settings["save_total_limit"]
        needed += checkpoint * (kept or 1)
        limit = f"--save_total_limit keeps {kept}" if kept else "without --save_total_limit all of them are kept"
        text = f"a checkpoint takes about {_gb(checkpoint)}, and {limit}"
    lacks = "" if needed <= free else f"; THIS IS TOO LITTLE for {_gb(needed)}"
    return f"{text}; {_gb(free)} are free in {there}{lacks}"


def _gb(size: float) -> str:
    return f"{size / GB:,.1f} GB" if size >= GB / 10 else f"{size / 10**6:,.1f} MB"


def _describe_time(run: Run) -> Iterator[Line]:
    """Yield the predicted time of the whole run, or of a step where an epoch's steps are not yet known."""
    if run.forecast is None or not run.forecast.machine.is_known:
        return
    steps, seconds = run.settings["max_steps"], run.forecast.step_seconds
    if steps <= 0:
        yield Line("time", f"{seconds:.3g} s a step (predicted); --prepare_only counts the steps of an epoch")
        return
    minutes = round(steps * seconds / 60)
    duration = f"{minutes // 60:,} h {minutes % 60:02} min" if minutes else f"{steps * seconds:.0f} s"
    yield Line("time", f"{steps:,} steps × {seconds:.3g} s = {duration} (predicted)")
