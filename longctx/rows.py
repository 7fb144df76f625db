"""The way from a data set's name to rows that can be collated: records, documents, packs."""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from datasets import Dataset, IterableDataset
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from longctx.attention.support import head_size, num_heads
from longctx.data import (
    DataError,
    DocumentStream,
    MixedStream,
    Mixture,
    SourceReport,
    document_lengths,
    encoder_key,
    load_records,
    mix,
    name_data,
    record_place,
    stream_records,
    tokenize_records,
    tokenize_stream,
    with_place,
)
from longctx.data.cache import cache_key
from longctx.model import is_template_file
from longctx.packing import PackedDataset, PackedStream, PackingReport, load_plan, pack_costs, plan_packing, save_plan
from longctx.turns import first_rank_first, together

logger = logging.getLogger(__name__)

Records = TypeVar("Records", Dataset, IterableDataset)


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """What the trainer reads."""

    documents: Dataset
    """`input_ids` and, where not all tokens are learnt, `labels`."""
    rows: PackedDataset
    """Packs, or single documents without packing."""
    report: PackingReport
    """What became of every document and token."""
    costs: NDArray[np.floating] | None
    """Modelled cost of each pack, to balance ranks by; None without packing or --balance_packs."""
    mixture: tuple[SourceReport, ...] = ()
    """What the documents have of each of --datasets."""
    evaluation: TrainingRows | None = None
    """The rows of the evaluation split, in data set order; None without --eval_strategy."""


@dataclass(frozen=True, kw_only=True)
class StreamedRows:
    """The same with --dataset_streaming: what is read, tokenised and packed while the trainer asks for it."""

    documents: IterableDataset
    rows: PackedStream
    report: None = None
    """The rows count documents and tokens as they are read."""
    costs: None = None
    mixture: tuple[()] = ()
    evaluation: TrainingRows | None = None
    """Of the whole split, which is read once, into memory."""


def prepare_rows(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> TrainingRows | StreamedRows:
    """Load, tokenise and pack; rank 0 first, the others then read its cache. Of a stream no more than its start.

    Raises:
        ValueError: for data that cannot be read or trained on as asked, with file and record.
    """
    if settings["dataset_streaming"]:  # nothing is kept for others to find
        return together(lambda: _prepare(settings, tokenizer, model_config))
    return first_rank_first(lambda: _prepare(settings, tokenizer, model_config), cache_folder())


def _prepare(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> TrainingRows | StreamedRows:
    prepare_split = _stream_of_split if settings["dataset_streaming"] else _rows_of_split
    training: TrainingRows | StreamedRows = prepare_split(settings, tokenizer, model_config)
    if settings["eval_strategy"] == "no":
        return training
    evaluation = _rows_of_split(_evaluation_settings(settings), tokenizer, model_config)
    if not len(evaluation.rows):
        raise ValueError(
            f"--dataset_test_split {settings['dataset_test_split']} of {name_data(settings)} leaves no row to "
            f"evaluate on: {evaluation.report}. Use --overlong split or truncate, or a longer --max_length."
        )
    return replace(training, evaluation=evaluation)


def _evaluation_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under which the evaluation split is read: every row once, in data set order."""
    packing = settings["packing"] if settings["eval_packing"] is None else settings["eval_packing"]
    evaluation = {**settings, "packing": packing, "balance_packs": False, "shuffle_dataset": False}
    if settings["datasets"] and settings["test_split_size"] is not None:
        return {**evaluation, "part": "test"}
    test_split = settings["dataset_test_split"]
    sources = [replace(source, split=test_split, fraction=None) for source in settings["datasets"]]
    return {**evaluation, "dataset_train_split": test_split, "datasets": sources, "dataset_weights": None}


def _of_each(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings under which each data set is read: the only one, or those of the mixture."""
    return [
        {
            **settings,
            "dataset_name": source.path,
            "dataset_config": source.name,
            "dataset_train_split": source.split,
            "columns": source.columns,
        }
        for source in settings["datasets"]
    ] or [settings]


def _rows_of_split(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> TrainingRows:
    read = _streamed_documents if settings["dataset_streaming"] else _documents
    mixture: tuple[SourceReport, ...] = ()
    sources = [read(one, tokenizer, model_config) for one in _of_each(settings)]
    if settings["datasets"]:
        documents, mixture = mix(sources, Mixture.of_settings(settings), settings.get("part", "train"))
    else:
        (documents,) = sources
    if settings["shuffle_dataset"]:
        documents = documents.shuffle(seed=settings["seed"])
    lengths = document_lengths(documents)
    rows, report = _plan(documents, lengths, settings)
    balances = settings["packing"] and settings["balance_packs"]
    costs = pack_costs(rows.packing, lengths, linear_cost(model_config)) if balances else None
    return TrainingRows(documents=documents, rows=rows, report=report, costs=costs, mixture=mixture)


def _documents(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> Dataset:
    where = _where(settings)
    try:
        return tokenize_records(
            _select(load_records(**where), settings),
            tokenizer,
            num_proc=settings["dataset_num_proc"],
            **_encoding(settings, model_config),
        )
    except DataError as error:
        raise _named(error, where) from error


def _streamed_documents(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> Dataset:
    """Of a stream, read once into memory."""
    return Dataset(pa.concat_tables(_document_stream(settings, tokenizer, model_config).tables()))


def _select(records: Records, settings: Mapping[str, Any]) -> Records:
    """The columns that an entry of --datasets names, or all."""
    columns = settings.get("columns")
    if columns is None:
        return records
    if missing := sorted(set(columns) - set(records.column_names)):
        raise DataError(f"no column {missing[0]!r} to select; there are {', '.join(sorted(records.column_names))}.")
    return records.select_columns(columns)


def _named(error: DataError, where: Mapping[str, Any]) -> DataError:
    """The error with the place of its record, or at least the name of the data set."""
    placed = with_place(error, lambda record: record_place(record, **where))
    name = str(where["dataset_name"])
    return placed if name in str(placed) or placed is not error else DataError(f"{name}: {error}")


def _stream_of_split(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> StreamedRows:
    streams = [_document_stream(one, tokenizer, model_config) for one in _of_each(settings)]
    stream = MixedStream(streams, Mixture.of_settings(settings)) if settings["datasets"] else streams[0]
    rows = PackedStream(
        stream,
        settings["max_length"],
        overlong=settings["overlong"],
        strategy="stream" if settings["packing"] else "none",
    )
    return StreamedRows(documents=IterableDataset.from_generator(stream.__iter__), rows=rows)


def _document_stream(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> DocumentStream:
    where = _where(settings)
    try:
        return tokenize_stream(
            _select(stream_records(**where), settings),
            tokenizer,
            place=partial(record_place, **where),
            **_encoding(settings, model_config),
        )
    except DataError as error:
        raise _named(error, where) from error


def _where(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords that name a split of a data set."""
    return {
        "dataset_name": settings["dataset_name"],
        "config": settings["dataset_config"],
        "split": settings["dataset_train_split"],
        "text_field": settings["dataset_text_field"],
    }


def _encoding(settings: Mapping[str, Any], model_config: PretrainedConfig) -> dict[str, Any]:
    """Keywords that say how records become tokens."""
    return {
        "text_field": settings["dataset_text_field"],
        "completion_only_loss": settings["completion_only_loss"],
        "assistant_only_loss": settings["assistant_only_loss"],
        "chat_template": _template(settings["chat_template_path"]),
        "vocab_size": model_config.get_text_config().vocab_size,
    }


def _template(path: str | None) -> str | None:
    """That of a file; another tokenizer's is in the tokenizer itself by now."""
    try:
        return Path(path).read_text(encoding="utf-8") if path and is_template_file(path) else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--chat_template_path {path} cannot be read: {error}. Save it as UTF-8 text.") from error


def data_identity(data: TrainingRows | StreamedRows, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which tokens each step trains on, by name, to tell whether a run goes on with the same.

    Of a stream, which cannot be read beforehand, what it is called, its files' names, sizes and ends, how its records
    become tokens and how it is packed. An adapter's base model, which no checkpoint holds, is known in the same way.
    """
    order = {name: settings[name] for name in ("max_length", "packing", "overlong", "train_sampling_strategy")}
    order["seed"] = settings["seed"] if settings["data_seed"] is None else settings["data_seed"]
    order |= {name: settings[name] for name in _WHERE_SET if settings.get(name)}
    if isinstance(order.get("model_init_kwargs"), str):  # however it is spelled
        order["model_init_kwargs"] = json.loads(order["model_init_kwargs"])
    if settings["use_peft"]:
        base = settings["model_name_or_path"]
        order |= {"use_peft": True, "base_model": _files_identity(base) or base}
        order |= {name: settings[name] for name in ("lora_alpha", "use_rslora")}
        if settings.get("load_in_4bit"):
            order |= {name: settings[name] for name in ("load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")}
    if settings["datasets"]:
        order["mixture"] = _mixture_identity(Mixture.of_settings(settings))
    if isinstance(data, StreamedRows) and settings["datasets"]:
        names = ("path", "name", "split", "columns")
        files = [_files_identity(source.path) for source in settings["datasets"]]
        sources = [{name: getattr(source, name) for name in names} for source in settings["datasets"]]
        named = {"datasets": sources, "files": files, "dataset_text_field": settings["dataset_text_field"]}
        return named | {"encoding": _encoder_keys(data)} | order
    if isinstance(data, StreamedRows):
        names = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_text_field")
        named = {name: settings[name] for name in names} | {"files": _files_identity(settings["dataset_name"])}
        return named | {"encoding": _encoder_keys(data)} | order
    return {
        "documents": len(data.documents),
        "contents": digest(column_arrays(data.documents)),
        "rows": len(data.rows),
        "plan": digest(_plan_arrays(data)),
        "balanced": data.costs is not None,
        **order,
    }


_WHERE_SET = ("dataloader_drop_last", "model_init_kwargs", "rope_scaling")
"""Settings that identify a run only where they are set, so that checkpoints from before they counted still resume."""


def _encoder_keys(data: StreamedRows) -> list[str]:
    """Of each stream, how its records become tokens and labels."""
    source: Any = data.rows.source
    return [encoder_key(stream.encoder) for stream in (source.sources if isinstance(source, MixedStream) else [source])]


def _mixture_identity(mixture: Mixture) -> dict[str, Any]:
    """What decides which documents are drawn, besides the data sets; as JSON gives it back."""
    of_weights = {"stopping_strategy": mixture.stopping_strategy} if mixture.weights else {}
    shares = {name: list(values) for name in ("weights", "fractions") if (values := getattr(mixture, name))}
    return {**shares, **of_weights, "seed": mixture.seed, "test_split_size": mixture.test_size}


def sampled_identity(data: TrainingRows | StreamedRows, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one node's data and model from another's without reading all of them: the plan and a few rows, and
    where they are local, the ends of the model's files and of a stream's.
    """
    known: dict[str, Any] = {"model": _files_identity(settings["model_name_or_path"])}
    if isinstance(data, StreamedRows):
        paths = [source.path for source in settings["datasets"] or ()] or [settings["dataset_name"]]
        return known | {"data": [_files_identity(path) for path in paths]}
    for name, part in {"data": data, "evaluation data": data.evaluation}.items():
        if part is None:
            continue
        sampled = np.linspace(0, len(part.rows) - 1, _SAMPLED_ROWS).astype(int) if len(part.rows) else ()
        columns = (np.asarray(column) for row in sampled for _, column in sorted(part.rows[int(row)].items()))
        known |= {name: digest([*_plan_arrays(part), *columns]), f"rows of {name}": len(part.rows)}
    return known


_SAMPLED_ROWS = 8


def _plan_arrays(data: TrainingRows) -> list[NDArray[Any]]:
    packing = data.rows.packing
    plan = (packing.indices, packing.offsets, packing.starts, packing.stops)
    return [array for array in plan if array is not None]


def _files_identity(name: str) -> str | None:
    """Of a local file, folder or glob: a digest of all names and sizes, and of the first and last 64 KiB of each."""
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    found = folder.rglob("*") if path.is_dir() else map(Path, glob.glob(name, recursive=True))
    state, is_empty = xxhash.xxh3_128(), True
    for file in sorted(file for file in found if file.is_file()):
        size, is_empty = file.stat().st_size, False
        state.update(f"{file.relative_to(folder) if path.is_dir() else file.name} {size}\n".encode())
        with file.open("rb") as opened:
            state.update(opened.read(_ENDS_BYTES))
            opened.seek(max(size - _ENDS_BYTES, 0))
            state.update(opened.read(_ENDS_BYTES))
    return None if is_empty else state.hexdigest()


_ENDS_BYTES = 64 << 10
"""Of a file's start and of its end that are read to know it by."""


def column_arrays(documents: Dataset) -> Iterator[NDArray[Any]]:
    """The tokens and labels of all documents, and where each ends, chunk by chunk."""
    table = documents.with_format("arrow")
    for column in ("input_ids", "labels"):
        if column in documents.column_names:
            for start in range(0, len(documents), _HASHED_DOCUMENTS):
                lists = table[start : start + _HASHED_DOCUMENTS][column].combine_chunks()
                yield lists.value_lengths().to_numpy()
                yield lists.flatten().to_numpy()


_HASHED_DOCUMENTS = 10_000
"""Read at a time."""


def digest(arrays: Iterable[NDArray[Any]]) -> str:
    """xxh3 of their bytes, as int64 and one after the other."""
    state = xxhash.xxh3_128()
    for array in arrays:
        state.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return state.hexdigest()


def linear_cost(config: PretrainedConfig) -> float:
    """What a token costs besides attention, in units of ℓ² (longctx.packing.balance): linear layers / (L · q).

    The linear layers of a decoder with L layers of width h, query and key/value heads of q and k elements in all, an
    MLP of three matrices with i elements between them, and V words have L · (2 · h · q + 2 · h · k + 3 · h · i) + h · V
    parameters, embeddings not counted, as nothing is multiplied with them.
    """
    text, (heads, kv_heads), size = config.get_text_config(), num_heads(config), head_size(config)
    layer = text.hidden_size * (2 * heads * size + 2 * kv_heads * size + 3 * text.intermediate_size)
    parameters = text.num_hidden_layers * layer + text.hidden_size * text.vocab_size
    return parameters / (text.num_hidden_layers * heads * size)


def cache_folder() -> Path:
    """Where plans are kept: beside the data sets that `datasets` keeps (HF_DATASETS_CACHE)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "longctx"


def _plan(
    documents: Dataset, lengths: NDArray[np.int64], settings: Mapping[str, Any]
) -> tuple[PackedDataset, PackingReport]:
    """Rows by the plan that is kept on disk, or by a new one, which then is. A file that does not fit is replaced."""
    strategy = settings["packing_strategy"] if settings["packing"] else "none"
    capacity, overlong = settings["max_length"], settings["overlong"]
    # The tokenizer is part of the documents' fingerprint, wherever it made their tokens.
    key = cache_key(
        "plan", documents._fingerprint, capacity, strategy, overlong, settings["pad_to_multiple_of"], settings["seed"]
    )
    kept = load_plan(cache_folder(), key)
    if kept is not None and (kept[1].documents, kept[1].tokens) == (len(lengths), int(lengths.sum())):
        try:
            return PackedDataset(documents, kept[0]), kept[1]
        except ValueError:  # for other documents
            pass
    packing, report = plan_packing(lengths, capacity, strategy=strategy, overlong=overlong)
    try:
        save_plan(cache_folder(), key, packing, report)
    except OSError as error:
        logger.warning("the packing plan is not kept for later runs: %s", error)
    return PackedDataset(documents, packing), report
