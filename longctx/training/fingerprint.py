"""Digests of the data and the model, which decide what each step trains on.

A run is resumed only on the data and the model that it started with, and nodes train together only on the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PretrainedConfig
from trl import SFTConfig

from longctx.data import Mixture
from longctx.data.contents import content_digests, digest_of, file_state
from longctx.data.kinds import PAIRS
from longctx.data.records import local_files
from longctx.model.files import files_read, has_saved_buffers
from longctx.ranks.agreement import check_agreement, gather_objects, on_all_ranks
from longctx.settings.dpo import LOSS_FLAGS, uses_reference
from longctx.training.dataset import StreamedData, TrainingData
from longctx.upstream.transformers_internals import commit_of


@dataclass(frozen=True, kw_only=True)
class FilesIdentity:
    """Digests of the files that are read besides tokenised documents."""

    model: str | None = None
    """Identity of the model; None if checkpoints contain all of it and there are no nodes to compare."""
    is_base: bool = False
    """Whether the model has untrained weights or buffers, which checkpoints do not restore, or is the reference."""
    streams: tuple[str | None, ...] = ()
    """Digest of each streamed data set's files; None for one on the hub."""


def files_identity(settings: Mapping[str, Any], model_config: PretrainedConfig, *, with_model: bool) -> FilesIdentity:
    """Digest the files of the model and of streams, or take their digests from the cache.

    Args:
        settings: every flag's value.
        with_model: whether to digest the model although checkpoints contain all of it.

    Raises:
        ValueError: if a file cannot be read.
    """
    is_base = settings["use_peft"] or has_saved_buffers(model_config) or needs_reference(settings)
    return FilesIdentity(
        model=model_identity(settings["model_name_or_path"], model_config) if with_model or is_base else None,
        is_base=is_base,
        streams=tuple(map(_data_files_identity, _streams(settings))),
    )


def _streams(settings: Mapping[str, Any]) -> list[str]:
    if not settings["dataset_streaming"]:
        return []
    return [source.path for source in settings["datasets"] or ()] or [settings["dataset_name"]]


def _states_of_files(settings: Mapping[str, Any], model_config: PretrainedConfig) -> list[Any]:
    """Return what is equal on two nodes only if they see the same files, or files of the same contents."""
    name = settings["model_name_or_path"]
    files = files_read(Path(name)) if Path(name).is_dir() else []
    files += [file for stream in _streams(settings) for file in local_files(stream) or ()]
    return [commit_of(model_config), *(file_state(file)._replace(device=0) for file in files)]


def compare_files(
    settings: Mapping[str, Any], model_config: PretrainedConfig, data: TrainingData | StreamedData, args: SFTConfig
) -> FilesIdentity:
    """Digest the files of the model and of streams, and compare what several nodes train on.

    One rank reads for all nodes that share the storage: they see the same inodes, sizes and times.

    Raises:
        ValueError: for a file that cannot be read, and for nodes that differ.
    """
    first = args.process_index - args.local_process_index
    is_first = args.process_index == first
    seen = gather_objects(on_all_ranks(lambda: _states_of_files(settings, model_config) if is_first else None))
    several_nodes = sum(states is not None for states in seen) > 1
    reader = seen.index(seen[first])

    def read() -> FilesIdentity | None:
        if args.process_index != reader:
            return None
        return files_identity(settings, model_config, with_model=several_nodes)

    files = gather_objects(on_all_ranks(read))[reader]
    assert files is not None, "it has read them"
    if several_nodes:
        of_nodes = gather_objects(on_all_ranks(lambda: node_identity(data, files) if is_first else {}))
        check_agreement(of_nodes[first])
    return files


def model_identity(name: str, model_config: PretrainedConfig) -> str:
    """Return what identifies a model: for a folder, the digest of the names and contents of the files that are read.

    A model of the hub is identified by its commit, which determines the contents of every file (by SHA-1 and, for
    weights, SHA-256); the hub's cache is trusted. The built-in model is identified by its name.

    Raises:
        ValueError: if a file cannot be read.
    """
    if Path(name).is_dir():
        return _digest_of_files(files_read(Path(name)), Path(name))
    return f"{name} {commit_of(model_config)}".strip()


def _data_files_identity(name: str) -> str | None:
    files = local_files(name)
    folder = Path(name).expanduser()
    return None if files is None else _digest_of_files(files, folder if folder.is_dir() else None)


def _digest_of_files(files: list[Path], folder: Path | None) -> str:
    names = [file.name if folder is None else file.relative_to(folder).as_posix() for file in files]
    return digest_of(names, content_digests(files))


def data_identity(
    data: TrainingData | StreamedData,
    settings: Mapping[str, Any],
    model_config: PretrainedConfig,
    files: FilesIdentity,
) -> dict[str, Any]:
    """Return, by name, what decides each step's tokens and the model.

    A stream, which cannot be read in advance, is identified by its files and by how it is packed. If the run evaluates,
    the evaluation data is included, since it decides which step is the best.
    """
    order = {name: settings[name] for name in ("max_length", "packing", "overlong", "train_sampling_strategy")}
    order |= {name: settings[name] for name in ("dataloader_drop_last", "dtype")}
    order["seed"] = settings["seed"] if settings["data_seed"] is None else settings["data_seed"]
    order["model_config"] = _config_values(model_config)
    if files.is_base:
        order["base_model"] = files.model
    if settings["use_peft"]:
        order |= {name: settings.get(name) for name in _ADAPTER_FLAGS}
        if settings.get("load_in_4bit"):
            order |= {name: settings[name] for name in ("bnb_4bit_quant_type", "use_bnb_nested_quant")}
    order |= {
        name: settings[name] for name in (*LOSS_FLAGS, "share_prompts") if name in settings and is_preference(settings)
    }
    if settings["datasets"]:
        order["mixture"] = _mixture_identity(Mixture.of_settings(settings))
    if data.evaluation is not None:
        order["evaluation"] = _evaluation_digest(data.evaluation)
    if isinstance(data, StreamedData):
        return _stream_identity(data, settings, files) | order
    return {
        "documents": len(data.documents),
        "contents": digest(column_arrays(data.documents)),
        "rows": len(data.rows),
        "plan": digest(_plan_arrays(data)),
        "balanced": data.costs is not None,
        **order,
    }


def _evaluation_digest(part: TrainingData) -> str:
    """Return a digest of the documents and their cuts, and not of their packs, which do not change metrics."""
    packing, cuts = part.rows.packing, []
    if packing.starts is not None and packing.stops is not None:
        order = np.lexsort((packing.starts, packing.indices))
        cuts = [array[order] for array in (packing.indices, packing.starts, packing.stops)]
    return digest([*column_arrays(part.documents), *cuts])


def is_preference(settings: Mapping[str, Any]) -> bool:
    """Return whether the run trains on pairs of answers."""
    return settings["dataset_text_field"] == PAIRS


def needs_reference(settings: Mapping[str, Any]) -> bool:
    """Return whether the run computes log-probabilities of a reference model."""
    return is_preference(settings) and uses_reference(settings)


def reference_identity(
    settings: Mapping[str, Any], model_config: PretrainedConfig, files: FilesIdentity
) -> dict[str, Any]:
    """Return, by name, what decides the log-probabilities of a reference model, besides the tokens."""
    names = ("dtype", "bf16", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
    return {"model": files.model, "config": _config_values(model_config)} | {n: settings.get(n) for n in names}


_ADAPTER_FLAGS = ("use_peft", "lora_alpha", "use_rslora", "load_in_4bit")
"""Flags that change an adapter's results; names and shapes of its weights are compared separately."""


def _config_values(model_config: PretrainedConfig) -> dict[str, Any]:
    """Return the configuration's values that describe the model, as JSON gives them back."""
    values = json.loads(json.dumps(model_config.to_dict(), default=str))
    return {name: value for name, value in values.items() if name not in _NOT_OF_THE_MODEL}


_NOT_OF_THE_MODEL = ("_name_or_path", "architectures", "dtype", "transformers_version")
"""Keys of a configuration that say where it comes from and how the weights were stored."""


def _stream_identity(data: StreamedData, settings: Mapping[str, Any], files: FilesIdentity) -> dict[str, Any]:
    source: Any = data.rows.source
    encoding = [stream.key for stream in getattr(source, "sources", [source])]
    known = {"files": list(files.streams), "encoding": encoding}
    if settings["datasets"]:
        names = ("path", "name", "split", "columns")
        return known | {"datasets": [{name: getattr(of, name) for name in names} for of in settings["datasets"]]}
    names = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_text_field")
    return known | {name: settings[name] for name in names}


def _mixture_identity(mixture: Mixture) -> dict[str, Any]:
    """Return what decides, besides the data sets, which documents are drawn, as JSON gives it back."""
    of_weights = {"stopping_strategy": mixture.stopping_strategy} if mixture.weights else {}
    shares = {name: list(values) for name in ("weights", "fractions") if (values := getattr(mixture, name))}
    return {**shares, **of_weights, "seed": mixture.seed, "test_split_size": mixture.test_size}


def node_identity(data: TrainingData | StreamedData, files: FilesIdentity) -> dict[str, Any]:
    """Return what must be the same on all nodes, whatever their files are called: tokens, plans and model."""
    known: dict[str, Any] = {"model": files.model}
    if isinstance(data, StreamedData):
        return known | {"data": list(files.streams)}
    for name, part in {"data": data, "evaluation data": data.evaluation}.items():
        if part is not None:
            arrays = [*_plan_arrays(part), *column_arrays(part.documents)]
            known |= {name: digest(arrays), f"rows of {name}": len(part.rows)}
    return known


def _plan_arrays(data: TrainingData) -> list[NDArray[Any]]:
    packing = data.rows.packing
    plan = (packing.indices, packing.offsets, packing.starts, packing.stops)
    return [array for array in plan if array is not None]


def column_arrays(documents: Dataset) -> Iterator[NDArray[Any]]:
    """Yield the lengths of all documents, their tokens and their labels, chunk by chunk."""
    table = documents.with_format("arrow")
    for column in ("input_ids", "labels"):
        if column in documents.column_names:
            for start in range(0, len(documents), _HASHED_DOCUMENTS):
                lists = table[start : start + _HASHED_DOCUMENTS][column].combine_chunks()
                yield lists.value_lengths().to_numpy()
                yield lists.flatten().to_numpy()


_HASHED_DOCUMENTS = 10_000
"""Documents that are hashed at a time."""


def digest(arrays: Iterable[NDArray[Any]]) -> str:
    """Return the xxh3 of the sizes and int64 values of arrays, in order."""
    state = xxhash.xxh3_128()
    for array in arrays:
        state.update(np.int64(array.size).tobytes())
        state.update(np.ascontiguousarray(array, dtype=np.int64).data)
    return state.hexdigest()
