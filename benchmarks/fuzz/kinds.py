"""Kinds of files: how each is written, and read again."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class Kind(NamedTuple):
    """Of files."""

    write: Callable[[Path, random.Random], Path]
    """Makes a whole one in a folder, and returns the file to damage."""
    read: Callable[[Path, Path], str | None]
    """Reads (file, folder), and returns what is wrong with that, if it did not raise a ValueError."""


_WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "naïve", "🐈", "“quotes”", "\\", "\t", "漢字"]


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, 30)))


def _chat(draw: random.Random) -> list[dict[str, str]]:
    turns = draw.randint(1, 3)
    return [{"role": role, "content": _text(draw)} for _ in range(turns) for role in ("user", "assistant")]


def _record(kind: str, draw: random.Random) -> dict[str, Any]:
    if kind == "chat":
        return {"messages": _chat(draw)}
    if kind == "completion":
        return {"prompt": _text(draw), "completion": _text(draw)}
    if kind == "ids":
        ids = [draw.randrange(256) for _ in range(draw.randint(2, 60))]
        return {"input_ids": ids, "labels": [-100 if draw.random() < 0.3 else token for token in ids]}
    return {"text": _text(draw)}


def _write_json(folder: Path, draw: random.Random, *, kind: str, suffix: str = ".jsonl") -> Path:
    records = [_record(kind, draw) for _ in range(draw.randint(1, 12))]
    path = folder / f"data{suffix}"
    lines = [json.dumps(record, ensure_ascii=draw.random() < 0.5) for record in records]
    path.write_text("[" + ",\n".join(lines) + "]" if suffix == ".json" else "\n".join(lines) + "\n", encoding="utf-8")
    return path


def _write_table(folder: Path, draw: random.Random, *, suffix: str) -> Path:
    kind = draw.choice(("text", "ids"))
    table = pa.Table.from_pylist([_record(kind, draw) for _ in range(draw.randint(1, 12))])
    path = folder / f"data{suffix}"
    if suffix == ".parquet":
        compression = draw.choice(("none", "snappy", "zstd", "gzip"))
        pq.write_table(table, path, row_group_size=4, compression=compression)
        return path
    make = pa.ipc.new_file if draw.random() < 0.3 else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression=draw.choice((None, "lz4", "zstd")))
    with make(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


def _write_text(folder: Path, draw: random.Random) -> Path:
    path = folder / "data.txt"
    path.write_text("\n".join(_text(draw) for _ in range(draw.randint(1, 12))), encoding="utf-8")
    return path


def _write_saved(folder: Path, draw: random.Random) -> Path:
    """A folder of Dataset.save_to_disk; one of its files is damaged."""
    from datasets import Dataset

    data = folder / "data"
    Dataset.from_list([_record("text", draw) for _ in range(draw.randint(1, 12))]).save_to_disk(str(data))
    return draw.choice(sorted(data.iterdir()))


@cache
def usual_settings(**flags: str) -> dict[str, Any]:
    """Of a run on the built-in model."""
    from longctx.settings.launcher import read_profile
    from longctx.settings.read import parse_flags
    from longctx.settings.resolve import resolve

    given = {"model_name_or_path": "tiny", "dataset_name": "stdlib", "max_length": "64", "overlong": "split", **flags}
    arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
    return dict(
        resolve(parse_flags([*arguments, "--max_steps", "1", "--use_cpu", "True"]), read_profile({}), {}).settings
    )


@cache
def tiny() -> tuple[Any, Any]:
    from longctx.model.tiny import tiny_config, tiny_tokenizer

    return tiny_tokenizer(), tiny_config()


def _read_data(path: Path, folder: Path, *, template: str | None = None) -> str | None:
    """Prepare rows as a run does: of a stream, or by way of the cache."""
    from longctx.training.dataset import StreamedData, prepare_data_set

    tokenizer, config = tiny()
    name = folder / "data" if (folder / "data").is_dir() else path
    streaming = path.stat().st_size % 4 > 0
    settings = {**usual_settings(), "dataset_name": str(name), "chat_template_path": template}
    if streaming:
        settings |= {"dataset_streaming": True, "balance_packs": False}
    data = prepare_data_set(settings, tokenizer, config)
    rows = data.rows if isinstance(data, StreamedData) else map(data.rows.__getitem__, range(len(data.rows)))
    documents = tokens = 0
    for row in rows:
        tokens += len(row["input_ids"])
        documents += int((row["position_ids"] == 0).sum()) if "position_ids" in row else len(row["seq_lengths"])
    return _compare(path, tokens)


def _compare(path: Path, tokens: int) -> str | None:
    """With what an independent reader makes of the file."""
    expected = _expected_tokens(path)
    return None if expected is None or expected == tokens else f"{tokens} tokens, expected {expected}"


def _expected_tokens(path: Path) -> int | None:
    """Of the byte-level tokenizer; None for what it cannot tell."""
    tokenizer, _ = tiny()
    if path.suffix == ".txt":
        return len(tokenizer(path.read_bytes().decode("utf-8-sig") + tokenizer.eos_token)["input_ids"])
    if path.suffix == ".parquet":
        records = pq.read_table(path).to_pylist()
    elif path.suffix == ".arrow":
        if path.parent.name == "data":
            return None
        records = (_open_arrow(path)).to_pylist()
    elif path.suffix == ".jsonl":
        records = [json.loads(part) for part in path.read_bytes().decode("utf-8-sig").split("\n") if part.strip()]
        if isinstance(records[0], list):
            records = records[0]
    elif path.suffix == ".json" and path.parent.name != "data":
        records = json.loads(path.read_bytes().decode("utf-8-sig"))
        records = [records] if isinstance(records, dict) else records
    else:
        return None
    if "input_ids" in records[0]:
        return sum(len(record["input_ids"]) for record in records)
    if "prompt" in records[0] and "completion" in records[0]:
        texts = [record["prompt"] + record["completion"] for record in records]
    elif "text" in records[0] and not {"messages", "conversations"} & records[0].keys():
        texts = [record["text"] for record in records]
    else:
        return None  # chats, by the template
    ended = [text if text.endswith(tokenizer.eos_token) else text + tokenizer.eos_token for text in texts]
    return sum(len(tokenizer(text)["input_ids"]) for text in ended)


def _open_arrow(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        try:
            return pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(source).read_all()


def _write_template(folder: Path, draw: random.Random) -> Path:
    _write_json(folder, draw, kind="chat").rename(folder / "chat.jsonl")
    path = folder / "template.jinja"
    path.write_text(tiny()[0].chat_template)
    return path


def _read_template(path: Path, folder: Path) -> str | None:
    return _read_data(folder / "chat.jsonl", folder, template=str(path))


# Models


@cache
def model_folder() -> Path:
    """A whole one, with an index, beside which nothing is written."""
    from longctx.model.tiny import tiny_config, tiny_model, tiny_tokenizer

    folder = Path(tempfile.mkdtemp(dir=os.environ["FUZZ_FOLDER"]))
    config = tiny_config()
    config.update({"num_hidden_layers": 1, "layer_types": ["full_attention"], "hidden_size": 32, "head_dim": 8})
    config.update({"intermediate_size": 48})
    tiny_model(config=config).save_pretrained(folder, max_shard_size="30KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _write_model(folder: Path, draw: random.Random, *, pattern: str) -> Path:
    shutil.copytree(model_folder(), folder / "model")
    return draw.choice(sorted((folder / "model").glob(pattern)))


def _read_model(path: Path, folder: Path) -> str | None:
    """What a run reads of it, in its order."""
    from longctx.model.allow_list import check_model
    from longctx.model.load import load_config, load_model, load_tokenizer

    name = str(folder / "model")
    config = load_config(name)
    check_model(config)
    if not path.name.startswith(("config", "model")):
        load_tokenizer(name)
        return None
    model = load_model(name, config)
    missing = [key for key, value in model.state_dict().items() if value.device.type == "meta"]
    return f"{missing} were not read" if missing else None


def _write_pickle(folder: Path, draw: random.Random) -> Path:
    import torch

    from longctx.model.tiny import tiny_model

    _write_model(folder, draw, pattern="config.json")
    for path in (folder / "model").glob("model*.safetensors*"):
        path.unlink()
    weights = tiny_model(config=_config_of(folder / "model")).state_dict()
    torch.save(weights, folder / "model" / "pytorch_model.bin", _use_new_zipfile_serialization=draw.random() < 0.7)
    return folder / "model" / "pytorch_model.bin"


def _config_of(folder: Path) -> Any:
    from longctx.model.load import load_config

    return load_config(str(folder))


def _read_pickle(path: Path, folder: Path) -> str | None:
    from longctx.model.load import load_model

    load_model(str(folder / "model"), _config_of(folder / "model"))
    return None


# Checkpoints and our own files


def _write_checkpoint(folder: Path, draw: random.Random, *, target: str) -> Path:
    import torch

    from longctx.training.checkpoint.files import Manifest, describe_files, write_manifest
    from longctx.training.checkpoint.shards import ParameterShard
    from longctx.training.checkpoint.storage import INDEX, write_index, write_states

    piece = ParameterShard(
        name="w",
        shape=(4, 3),
        start=0,
        states={"weight": torch.rand(12), "exp_avg": torch.rand(12), "step": torch.ones(())},
    )
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir()
    ranges, kinds = write_states(checkpoint, [piece], 0)
    write_index(checkpoint, [ranges], kinds, {"w": [4, 3]})
    known = describe_files(checkpoint, [checkpoint / name for name in (*ranges, INDEX)])
    manifest = Manifest(
        step=3,
        layout={"sequences_per_step": 4},
        optimization={"optim": "adamw_torch"},
        parameters={"w": [4, 3]},
        data={"contents": "abc"},
        progress={"ranks": [{"loss": 1.5, "last_logged": 2, "total_loss": 4.5}]},
        files=known,
    )
    write_manifest(checkpoint, manifest)
    shutil.copy(checkpoint / "longctx.json", folder / "written.json")
    return checkpoint / (target or next(iter(ranges)))


def _read_checkpoint(path: Path, folder: Path) -> str | None:
    """As a run that resumes; states, whose change a digest tells, are read all the same."""
    import torch

    from longctx.training.checkpoint.files import check_files, check_same, read_manifest
    from longctx.training.checkpoint.shards import ParameterShard
    from longctx.training.checkpoint.storage import StateReader

    checkpoint = folder / "checkpoint-3"
    signed = path.suffix == ".json" and path.stat().st_size % 2 and _signed_anew(path)
    manifest = read_manifest(checkpoint)
    if path.suffix == ".safetensors":
        reader = StateReader(checkpoint, {"w": [4, 3]})
        kinds = ("weight", "exp_avg")
        reader.fill(ParameterShard(name="w", shape=(4, 3), start=0, states={kind: torch.zeros(12) for kind in kinds}))
    check_files(checkpoint, manifest)
    check_same(
        manifest, checkpoint, sequences_per_step=4, data={"contents": "abc"}, optimization={"optim": "adamw_torch"}
    )
    if path.suffix != ".json" or signed:
        return None
    changed = json.loads(path.read_text()) != json.loads((folder / "written.json").read_text())
    return "a manifest with other values was taken" if changed else None


def _signed_anew(path: Path) -> bool:
    """Whether the manifest could be given a digest that fits, so that what it says is looked at."""
    from longctx.training.checkpoint.files import _digest_of

    try:
        values = json.loads(path.read_text())
        values["xxh3"] = _digest_of({name: value for name, value in values.items() if name != "xxh3"})
        path.write_text(json.dumps(values))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False
    return True


def _write_plan(folder: Path, draw: random.Random) -> Path:
    import numpy as np

    from longctx.packing import plan_packing, save_plan

    lengths = np.array([draw.randint(1, 90) for _ in range(draw.randint(1, 40))])
    save_plan(folder, "key", *plan_packing(lengths, 64, strategy="bfd", overlong="split"))
    shutil.copy(folder / "plan-key.npz", folder / "written")
    return folder / "plan-key.npz"


def _read_plan(path: Path, folder: Path) -> str | None:
    from longctx.packing import load_plan

    kept = load_plan(folder, "key")
    if kept is None:
        raise ValueError(f"{path}: not used, and planned anew")
    shutil.copy(folder / "written", path)
    whole = load_plan(folder, "key")
    assert whole is not None, "was written so"
    same = all((a == b).all() for a, b in zip(_arrays(kept[0]), _arrays(whole[0]), strict=True))
    return None if same and kept[1] == whole[1] else "another plan"


def _arrays(packing: Any) -> list[Any]:
    return [a for a in (packing.indices, packing.offsets, packing.starts, packing.stops) if a is not None]


def _write_run(folder: Path, draw: random.Random) -> Path:
    path = folder / "run.yaml"
    path.write_text("model_name_or_path: tiny\ndataset_name: stdlib\nsp: 1\nmax_length: 64\nenv:\n  FUZZ: yes\n")
    return path


def _read_run(path: Path, folder: Path) -> str | None:
    from longctx.settings.read import parse_flags

    before = dict(os.environ)
    try:
        parse_flags(["--config", str(path)])
    except ValueError as error:
        if str(error).startswith("argument --"):  # a value is named by its flag
            raise ValueError(f"{path}: {error}") from error
        raise
    finally:
        os.environ.clear()
        os.environ.update(before)
    return None


def _write_deepspeed(folder: Path, draw: random.Random) -> Path:
    path = folder / "ds.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    values = {
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"params": {}},
    }
    path.write_text(json.dumps(values))
    return path


def _read_deepspeed(path: Path, folder: Path) -> str | None:
    from longctx.settings.launcher import read_profile

    read_profile({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)})
    return None


KINDS: dict[str, Kind] = {
    "jsonl, text": Kind(partial(_write_json, kind="text"), _read_data),
    "jsonl, chats": Kind(partial(_write_json, kind="chat"), _read_data),
    "jsonl, prompts": Kind(partial(_write_json, kind="completion"), _read_data),
    "jsonl, token ids": Kind(partial(_write_json, kind="ids"), _read_data),
    "json array": Kind(partial(_write_json, kind="text", suffix=".json"), _read_data),
    "text": Kind(_write_text, _read_data),
    "parquet": Kind(partial(_write_table, suffix=".parquet"), _read_data),
    "arrow": Kind(partial(_write_table, suffix=".arrow"), _read_data),
    "save_to_disk": Kind(_write_saved, _read_data),
    "chat template": Kind(_write_template, _read_template),
    "config.json": Kind(partial(_write_model, pattern="config.json"), _read_model),
    "index of weights": Kind(partial(_write_model, pattern="*.index.json"), _read_model),
    "safetensors": Kind(partial(_write_model, pattern="*.safetensors"), _read_model),
    "pytorch_model.bin": Kind(_write_pickle, _read_pickle),
    "tokenizer files": Kind(partial(_write_model, pattern="[tcs][oph]*.j*"), _read_model),
    "manifest": Kind(partial(_write_checkpoint, target="longctx.json"), _read_checkpoint),
    "states": Kind(partial(_write_checkpoint, target=""), _read_checkpoint),
    "packing plan": Kind(_write_plan, _read_plan),
    "--config": Kind(_write_run, _read_run),
    "deepspeed config": Kind(_write_deepspeed, _read_deepspeed),
}
