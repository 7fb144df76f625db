"""Make rows for the collator from a data set's name: records, documents, packs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.data import (
    IGNORE_INDEX,
    DataError,
    DocumentStream,
    MixedStream,
    Mixture,
    SourceReport,
    document_lengths,
    load_records,
    mix,
    name_data,
    order_of_part,
    record_place,
    stream_records,
    target_counts,
    tokenize_records,
    tokenize_stream,
    with_place,
)
from longctx.data.columns import TURN_ENDS
from longctx.data.contents import cache_folder, cache_key
from longctx.data.errors import check_selection
from longctx.data.kinds import PAIRS
from longctx.data.sides import sides_of_pairs
from longctx.model.allow_list import head_size, num_heads
from longctx.packing import (
    PackedDataset,
    PackedStream,
    Packing,
    PackingReport,
    PairedDataset,
    kept_of_sides,
    lengths_of_pairs,
    load_plan,
    pack_costs,
    plan_packing,
    plan_pairs,
    save_plan,
    shared_tokens,
)
from longctx.ranks.agreement import main_process_first, on_all_ranks
from longctx.untrusted.files import check_file, is_template_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Data that the trainer reads."""

    documents: Dataset
    """Columns `input_ids` and, if not all tokens are learnt, `labels`."""
    rows: PackedDataset
    """Packs, or single documents without packing."""
    report: PackingReport
    """Counts of documents and tokens, kept and lost."""
    costs: NDArray[np.floating] | None
    """Modelled cost of each pack, for balancing ranks; None without packing or --balance_packs."""
    mixture: tuple[SourceReport, ...] = ()
    """Share of each of --datasets in the documents."""
    evaluation: TrainingData | None = None
    """The rows of the evaluation split, in data set order; None without --eval_strategy."""
    prompts: tuple[NDArray[np.int32], ...] = ()
    """Of the evaluation split: the tokens of each prompt whose answer --eval_generate samples."""

    def describe_targets(self) -> str | None:
        """Return how many of the documents' tokens are trained on, or None if all are.

        The line also counts the documents in which --overlong leaves tokens, but no token with a label.
        """
        if "labels" not in self.documents.column_names:
            return None
        counts, report = self.rows.target_counts(), self.report
        targets, tokens = int(counts.sum()), report.tokens
        described = f"{targets:,} of the {tokens:,} tokens in the documents ({targets / tokens:.1%}) are trained on"
        if not report.too_long_documents:
            return described
        is_placed = np.bincount(self.rows.packing.indices, minlength=len(counts)) > 0
        without = int(np.count_nonzero(is_placed & (counts == 0) & (target_counts(self.documents) > 0)))
        if without:
            described += f"; --overlong {report.overlong} leaves no token with a label in {without:,} {report.unit}"
        return described


@dataclass(frozen=True, kw_only=True)
class StreamedData:
    """Data that is read, tokenised and packed during training, with --dataset_streaming."""

    rows: PackedStream
    report: None = None
    """The rows count documents and tokens as they are read."""
    costs: None = None
    mixture: tuple[()] = ()
    evaluation: TrainingData | None = None
    """Rows of the whole evaluation split, in memory."""


@dataclass(frozen=True)
class Reading:
    """How documents are read from a data set or a mixture, and made into tokens for a model."""

    settings: Mapping[str, Any]
    """Every flag's value; one of several data sets, or the evaluation split, has some of its own."""
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig

    def of_each(self) -> list[Reading]:
        """Return one for each data set: of a mixture, several."""
        each = []
        for source in self.settings["datasets"]:
            own = {"dataset_name": source.path, "dataset_config": source.name, "dataset_train_split": source.split}
            each.append(replace(self, settings={**self.settings, **own, "columns": source.columns}))
        return each or [self]

    def where(self) -> dict[str, Any]:
        """Return the keyword arguments for the functions that load a split."""
        return {
            "dataset_name": self.settings["dataset_name"],
            "config": self.settings["dataset_config"],
            "split": self.settings["dataset_train_split"],
            "text_field": self.settings["dataset_text_field"],
            "columns": self.settings.get("columns"),
        }

    def encoding(self) -> dict[str, Any]:
        """Return the keyword arguments for the functions that tokenise records."""
        return {
            "text_field": self.settings["dataset_text_field"],
            "completion_only_loss": self.settings["completion_only_loss"],
            "assistant_only_loss": self.settings["assistant_only_loss"],
            "chat_template": read_template(self.settings["chat_template_path"]),
            "gives_turns": self.settings["overlong"] == "turns",
            "vocab_size": self.model_config.get_text_config().vocab_size,
            "now": self.settings.get("began"),
            **({"gives_prompts": True} if "gives_prompts" in self.settings else {}),
        }


def prepare_data_set(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> TrainingData | StreamedData:
    """Load, tokenise and pack, first on rank 0, whose cache the others then read. Of a stream only the start is read.

    Args:
        settings: every flag's value, and as `began` the time that chat templates are told; the present without it.

    Raises:
        ValueError: for data that cannot be read or trained on as asked, with file and record.
    """
    prepare = partial(_prepare, Reading(settings, tokenizer, model_config))
    if settings["dataset_streaming"]:  # nothing is cached for other ranks
        return on_all_ranks(prepare)
    return main_process_first(prepare, cache_folder())


def _prepare(reading: Reading) -> TrainingData | StreamedData:
    settings = reading.settings
    prepare_split = _stream_of_split if settings["dataset_streaming"] else _rows_of_split
    training: TrainingData | StreamedData = prepare_split(reading)
    if isinstance(training, TrainingData):
        _check_targets(training, settings, "train")
    if settings["eval_strategy"] == "no":
        return training
    try:
        evaluation = _rows_of_split(replace(reading, settings=_evaluation_settings(settings)))
    except DataError as error:
        raise DataError(
            f"--dataset_test_split {settings['dataset_test_split']} cannot be evaluated on. {error} To train without "
            "evaluation, leave out --eval_strategy."
        ) from error
    _check_targets(evaluation, settings, "test")
    return replace(training, evaluation=replace(evaluation, prompts=tuple(evaluation_prompts(reading))))


def _check_targets(part: TrainingData, settings: Mapping[str, Any], split: str) -> None:
    """Check that --overlong leaves at least one token with a label.

    The documents have one before they are cut, so no row is read if none was too long.

    Raises:
        DataError: if no sequence is left, or none with a label.
    """
    if not part.report.too_long_documents:
        return
    for number in range(len(part.rows)):
        row = part.rows[number]
        labels = row.get("labels", row["input_ids"])
        if (labels[row["position_ids"] != 0] != IGNORE_INDEX).any():  # a document's first token is no target
            return
    left = "no token with a label" if len(part.rows) else "no sequence"
    name = settings[f"dataset_{split}_split"]
    remedy = "" if settings["dataset_text_field"] == PAIRS else ", or --overlong split"  # which is refused for pairs
    raise DataError(
        f"--dataset_{split}_split {name} of {name_data(settings)}: --overlong {settings['overlong']} leaves {left} to "
        f"{'train' if split == 'train' else 'evaluate'} on: {part.report}. Use a longer "
        f"--max_length{remedy}."
    )


def _evaluation_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings to read the evaluation split: every row once, in data set order."""
    packing = settings["packing"] if settings["eval_packing"] is None else settings["eval_packing"]
    evaluation = {**settings, "packing": packing, "balance_packs": False, "shuffle_dataset": False}
    if settings["datasets"] and settings["test_split_size"] is not None:
        return {**evaluation, "part": "test"}
    test_split = settings["dataset_test_split"]
    sources = [replace(source, split=test_split, fraction=None) for source in settings["datasets"]]
    return {**evaluation, "dataset_train_split": test_split, "datasets": sources, "dataset_weights": None}


def _rows_of_split(reading: Reading) -> TrainingData:
    settings = reading.settings
    mixture: tuple[SourceReport, ...] = ()
    sources = [_documents(one) for one in reading.of_each()]
    if settings["datasets"]:
        documents, shares = mix(sources, Mixture.of_settings(settings), settings.get("part", "train"))
        mixture = shares if len(sources) > 1 else ()
    else:
        (documents,) = sources
    if settings["shuffle_dataset"]:
        documents = documents.shuffle(seed=settings["seed"])
    lengths = document_lengths(documents)
    rows, report = _plan(documents, lengths, settings)
    if isinstance(rows, PairedDataset):
        lengths = lengths_of_pairs(rows.kept, rows.shared)
    balances = settings["packing"] and settings["balance_packs"]
    costs = pack_costs(rows.packing, lengths, linear_cost(reading.model_config)) if balances else None
    return TrainingData(documents=documents, rows=rows, report=report, costs=costs, mixture=mixture)


def _documents(reading: Reading) -> Dataset:
    """Read all documents of a split, those of a stream into memory."""
    if reading.settings["dataset_streaming"]:
        return Dataset(pa.concat_tables(_document_stream(reading).tables()))
    return _tokenized(reading, load_records, partial(tokenize_records, num_proc=reading.settings["dataset_num_proc"]))


def _tokenized(reading: Reading, load: Callable[..., Any], tokenize: Callable[..., Any]) -> Any:
    """Return the documents of a split, with the place of the record in an error."""
    where = reading.where()
    try:
        records = load(**where)
        if (columns := where["columns"]) is not None:
            check_selection(columns, records.column_names)
            records = records.select_columns(columns)
        return tokenize(records, reading.tokenizer, **reading.encoding())
    except DataError as error:
        raise _named(error, where) from error


def _named(error: DataError, where: Mapping[str, Any]) -> DataError:
    """Return the error with the place of its record, or at least the name of the data set."""
    placed = with_place(error, lambda record: record_place(record, **where))
    name = str(where["dataset_name"])
    return placed if name in str(placed) or placed is not error else DataError(f"{name}: {error}")


def first_documents(reading: Reading, *, number: int, tokens: int) -> tuple[list[dict[str, NDArray[np.int32]]], bool]:
    """Read and tokenise the first documents of the training split, of each data set alike; nothing is cached.

    Args:
        number: documents that are read at least.
        tokens: further documents are read as long as there are fewer.

    Returns:
        Documents, each with `input_ids` [tokens] and, if not all tokens are learnt, `labels` [tokens]; and whether
        there are no others.

    Raises:
        DataError: for data that cannot be read or trained on as asked.
    """
    streams = [_document_stream(one) for one in reading.of_each()]
    found: list[dict[str, NDArray[np.int32]]] = []
    is_all = True
    for stream in streams:
        held = 0
        for count, document in enumerate(stream):
            if count * len(streams) >= number and held * len(streams) >= tokens:
                is_all = False
                break
            found.append(document)
            held += len(document["input_ids"])
    return found, is_all


def evaluation_prompts(reading: Reading) -> list[NDArray[np.int32]]:
    """Return the tokens of the first --eval_generate prompts of the evaluation split, or all if there are fewer.

    Raises:
        DataError: for records that cannot be read, or have no prompts.
    """
    number = reading.settings["eval_generate"]
    if number is None:
        return []
    evaluation = _evaluation_settings(reading.settings) | {"gives_prompts": True}
    sources, prompts = replace(reading, settings=evaluation).of_each(), dict[int, NDArray[np.int32]]()
    try:
        lengths, order = [number] * len(sources), np.arange(number * len(sources))  # of the first of each
        if "part" in evaluation:
            lengths = [len(load_records(**one.where())) for one in sources]
            order = order_of_part(lengths, Mixture.of_settings(evaluation), evaluation["part"])[1][:number]
        for one, start, length in zip(sources, np.cumsum(lengths) - lengths, lengths, strict=True):
            wanted = set(order[(order >= start) & (order < start + length)] - start)
            stream = _document_stream(one)
            documents = islice(stream.documents_from(0, wanted.__contains__), len(wanted))
            prompts |= {start + document.number: document.columns["input_ids"] for document in documents}
            stream.encoder.process.close()
    except DataError as error:
        raise DataError(f"--eval_generate {number}: {error}") from error
    return [prompts[place] for place in order if place in prompts][:number]


def _stream_of_split(reading: Reading) -> StreamedData:
    settings, streams = reading.settings, [_document_stream(one) for one in reading.of_each()]
    stream = MixedStream(streams, Mixture.of_settings(settings)) if settings["datasets"] else streams[0]
    rows = PackedStream(
        stream,
        settings["max_length"],
        overlong=settings["overlong"],
        strategy="stream" if settings["packing"] else "none",
    )
    return StreamedData(rows=rows)


def _document_stream(reading: Reading) -> DocumentStream:
    place = partial(record_place, **reading.where())
    return _tokenized(reading, stream_records, partial(tokenize_stream, place=place))


def read_template(path: str | None) -> str | None:
    """Return the chat template in a file; that of another tokenizer is already in the tokenizer."""
    try:
        return check_file(Path(path)).read_text(encoding="utf-8") if path and is_template_file(path) else None
    except (OSError, ValueError) as error:
        raise DataError(f"--chat_template_path {path} cannot be read: {error}. Save it as UTF-8 text.") from error


def linear_cost(config: PretrainedConfig) -> float:
    """Return a token's cost besides attention, in units of ℓ² (longctx.packing.balance): linear layers / (L · q).

    The linear layers of a decoder with L layers of width h, query and key/value heads of q and k elements in all, an
    MLP of three matrices with i elements between them, and V words have L · (2 · h · q + 2 · h · k + 3 · h · i) + h · V
    parameters. Embeddings do not count, since nothing is multiplied with them.
    """
    text, (heads, kv_heads), size = config.get_text_config(), num_heads(config), head_size(config)
    layer = text.hidden_size * (2 * heads * size + 2 * kv_heads * size + 3 * text.intermediate_size)
    parameters = text.num_hidden_layers * layer + text.hidden_size * text.vocab_size
    return parameters / (text.num_hidden_layers * heads * size)


def _plan(
    documents: Dataset, lengths: NDArray[np.int64], settings: Mapping[str, Any]
) -> tuple[PackedDataset, PackingReport]:
    """Pack documents by the cached plan, or by a new one, which replaces a cached plan that does not fit."""
    strategy = settings["packing_strategy"] if settings["packing"] else "none"
    capacity, overlong = settings["max_length"], settings["overlong"]
    tokens, is_paired, share = int(lengths.sum()), settings["dataset_text_field"] == PAIRS, False
    plan: Callable[[], tuple[Packing, PackingReport]]
    make: Callable[[Packing], PackedDataset]
    if is_paired:
        sides, share = sides_of_pairs(documents), settings["share_prompts"]
        tokens -= int(shared_tokens(sides, share=share).sum())
        plan = partial(plan_pairs, sides, capacity, strategy=strategy, overlong=overlong, share=share)
        kept_of = kept_of_sides(sides, capacity, overlong, share=share)
        make = partial(PairedDataset, documents, sides=sides, kept=kept_of, share=share)
    else:
        ends = documents[TURN_ENDS] if overlong == "turns" else None
        plan = partial(plan_packing, lengths, capacity, strategy=strategy, overlong=overlong, turn_ends=ends)
        make = partial(PackedDataset, documents)
    # The documents' fingerprint covers the tokenizer if it made their tokens.
    key = cache_key(
        "plan",
        documents._fingerprint,
        capacity,
        strategy,
        overlong,
        settings["pad_to_multiple_of"],
        settings["seed"],
        is_paired,
        share,
    )
    kept = load_plan(cache_folder(), key)
    if kept is not None and (kept[1].documents, kept[1].tokens) == (len(lengths), tokens):
        try:
            return make(kept[0]), kept[1]
        except ValueError:  # a plan for other documents
            pass
    packing, report = plan()
    try:
        save_plan(cache_folder(), key, packing, report)
    except OSError as error:
        logger.warning("the packing plan is not kept for later runs: %s", error)
    return make(packing), report
