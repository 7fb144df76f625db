"""Damaged files of every kind that is read: what was read is right, or an error names the file.

    python -m benchmarks.fuzz                            # 10,000 files, 5 to 15 minutes on two cores
    python -m benchmarks.fuzz --files 200 --kinds jsonl parquet --seed 1

A whole file of each kind is made, then damaged by a few random changes: bits flipped, bytes cut off, doubled or moved,
strings put in that parsers stumble over, and in JSON values, keys and nesting. It is read by the code that a run reads
it with, in a process with bounds on memory and time. Data is prepared to the last row; a file that is accepted has to
give as many tokens, or documents, as an independent reader finds in it, and a checkpoint's manifest what was written.

`refused` is the typed error (ValueError) with the name of the file or its folder, `unnamed` the same without; the
columns from there on are failures.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from .packing import device, line

SECONDS = 600
"""For one file, however busy the machine."""
MEMORY_BYTES = 8 << 30
"""Of one process, for any number of files."""
OUTCOMES = ("read", "refused", "unnamed", "wrong", "other error", "crash", "time-out")
FAILURES = OUTCOMES[2:]


class Kind(NamedTuple):
    """Of files."""

    write: Callable[[Path, random.Random], Path]
    """Makes a whole one in a folder, and returns the file to damage."""
    read: Callable[[Path, Path], str | None]
    """Reads (file, folder), and returns what is wrong with that, if it did not raise a ValueError."""


# Damage


def damage(data: bytes, draw: random.Random) -> bytes:
    """A few changes to a file's contents."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        in_json = _change_json if data[:1] in (b"{", b"[") else _flip
        data = draw.choice((_flip, _cut, _splice, _insert, _insert, *[in_json] * 5))(data, draw)
    return data


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 10)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randint(0, len(data))]


def _splice(data: bytes, draw: random.Random) -> bytes:
    """A part left out, doubled, or moved."""
    start, stop = sorted(draw.randint(0, len(data)) for _ in range(2))
    at = draw.randint(0, len(data))
    part = data[start:stop]
    return draw.choice((data[:start] + data[stop:], data[:at] + part + data[at:], data[:stop] + part + data[stop:]))


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randint(0, len(data))
    return data[:at] + draw.choice(_STUMBLING_BLOCKS) + data[at + draw.choice((0, 0, 1, 8)) :]


_STUMBLING_BLOCKS = [
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\r\n",
    b"\n\n",
    b"\xff" * 8,
    b"\x00" * 64,
    b"\xff\xff\xff\x7f",
    b'"',
    b"}",
    b"]",
    b"[",
    b"\\ud800",
    b"\\u0000",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1",
    b"9" * 30,
    b"9" * 5000,
    b"[" * 100_000,
    b'{"a":' * 10_000,
    b"null",
    b"true",
    b"{{",
    b"{%",
    b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    b"{{ 'a' * 99999999999 }}",
    b"{{ ''.__class__.__mro__ }}",
    b"!!python/object/apply:os.getpid []",
    b"&a [*a, *a]",
    b"../../x",
]


def _change_json(data: bytes, draw: random.Random) -> bytes:
    """In JSON, or in one of its lines, another value, key or nesting somewhere; other data as it is."""
    lines = data.split(b"\n")
    number = draw.randrange(len(lines))
    for at, source in ((None, data), (number, lines[number])):
        try:
            document = json.loads(source)
        except (ValueError, RecursionError):
            continue
        text = json.dumps(_changed(document, draw), ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        if draw.random() < 0.1:
            text = text.replace(b'":', b'":' + b" " * 10, 1)
        return text if at is None else b"\n".join([*lines[:at], text, *lines[at + 1 :]])
    return data


def _changed(node: Any, draw: random.Random) -> Any:
    """With one change below."""
    if isinstance(node, dict) and node and draw.random() < 0.9:
        key = draw.choice(sorted(node))
        change = draw.random()
        if change < 0.1:
            return {name: value for name, value in node.items() if name != key}
        if change < 0.2:
            return {draw.choice(_NAMES) if name == key else name: value for name, value in node.items()}
        if change < 0.3:
            return node | {draw.choice(_NAMES): _value(draw)}
        return node | {key: _changed(node[key], draw)}
    if isinstance(node, list) and node and draw.random() < 0.9:
        at = draw.randrange(len(node))
        return [*node[:at], *draw.choice(([], [_changed(node[at], draw)], [node[at]] * 2)), *node[at + 1 :]]
    return _value(draw)


_NAMES = [
    "",
    "text",
    "messages",
    "input_ids",
    "labels",
    "position_ids",
    "attention_mask",
    "auto_map",
    "\ud800",
    "_type",
]


def _value(draw: random.Random) -> Any:
    return draw.choice(
        [
            None,
            True,
            0,
            -1,
            1,
            -100,
            300,
            2**31,
            -(2**63),
            10**30,
            10**400,
            0.5,
            -1e300,
            float("nan"),
            float("inf"),
            "",
            "x",
            "\ud800",
            "\x00",
            "../../x",
            "/dev/zero",
            "x" * 10_000,
            [],
            {},
            [[]],
            [1, "a", None],
            {"": 0},
            json.loads("[" * 500 + "]" * 500),
        ]
    )


# Data


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
def _settings(**flags: str) -> dict[str, Any]:
    """Of a run on the built-in model."""
    from longctx.settings.flags import parse_flags
    from longctx.settings.profile import read_profile
    from longctx.settings.resolve import resolve

    given = {"model_name_or_path": "tiny", "dataset_name": "stdlib", "max_length": "64", "overlong": "split", **flags}
    arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
    return dict(
        resolve(parse_flags([*arguments, "--max_steps", "1", "--use_cpu", "True"]), read_profile({}), {}).settings
    )


@cache
def _tiny() -> tuple[Any, Any]:
    from longctx.model.tiny import tiny_config, tiny_tokenizer

    return tiny_tokenizer(), tiny_config()


def _read_data(path: Path, folder: Path, *, template: str | None = None) -> str | None:
    """Prepare rows as a run does: of a stream, or by way of the cache."""
    from longctx.training.dataset import StreamedData, prepare_data_set

    tokenizer, config = _tiny()
    name = folder / "data" if (folder / "data").is_dir() else path
    streaming = path.stat().st_size % 4 > 0
    settings = {**_settings(), "dataset_name": str(name), "chat_template_path": template}
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
    tokenizer, _ = _tiny()
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
    path.write_text(_tiny()[0].chat_template)
    return path


def _read_template(path: Path, folder: Path) -> str | None:
    return _read_data(folder / "chat.jsonl", folder, template=str(path))


# Models


@cache
def _model_folder() -> Path:
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
    shutil.copytree(_model_folder(), folder / "model")
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
    from longctx.training.checkpoint.states import write_states

    piece = ParameterShard(
        name="w",
        shape=(4, 3),
        start=0,
        states={"weight": torch.rand(12), "exp_avg": torch.rand(12), "step": torch.ones(())},
    )
    checkpoint = folder / "checkpoint-3"
    checkpoint.mkdir()
    files = write_states(checkpoint, [piece], 0)
    known = describe_files(checkpoint, files)
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
    return checkpoint / target if target else files[0]


def _read_checkpoint(path: Path, folder: Path) -> str | None:
    """As a run that resumes; states, whose change a digest tells, are read all the same."""
    import torch

    from longctx.training.checkpoint.files import check_files, check_same, read_manifest
    from longctx.training.checkpoint.shards import ParameterShard
    from longctx.training.checkpoint.states import StateReader

    checkpoint = folder / "checkpoint-3"
    signed = path.suffix == ".json" and path.stat().st_size % 2 and _signed_anew(path)
    manifest = read_manifest(checkpoint)
    if path.suffix == ".safetensors":
        reader = StateReader(checkpoint)
        kinds = dict.fromkeys([*reader.kinds(scalars=False), "weight"])
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
    from longctx.settings.flags import parse_flags

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
    from longctx.settings.profile import read_profile

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


# Running


def try_file(name: str, number: int, seed: int) -> tuple[str, str]:
    """Make, damage and read one file; returns the outcome and what there is to say of it."""
    kind, draw = KINDS[name], random.Random(f"{seed} {name} {number}")
    with tempfile.TemporaryDirectory(dir=os.environ["FUZZ_FOLDER"]) as folder:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(folder, "cache")
        path = kind.write(Path(folder), draw)
        path.write_bytes(damage(path.read_bytes(), draw))
        if keep := os.environ.get("FUZZ_KEEP"):
            shutil.copy(path, keep)
        try:
            complaint = kind.read(path, Path(folder))
        except ValueError as error:
            message = str(error)
            return ("refused" if folder in message else "unnamed"), f"{type(error).__name__}: {message}"
        except Exception as error:
            return "other error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        return ("wrong", complaint) if complaint else ("read", "")


def _work(names: Sequence[str], numbers: Sequence[int], seed: int, output: int) -> None:
    """In a process of its own: a line for each file, before and after."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    for name, number in zip(names, numbers, strict=True):
        signal.alarm(SECONDS)
        outcome, message = try_file(name, number, seed)
        os.write(output, (json.dumps([outcome, ascii(message[:600])]) + "\n").encode())
    signal.alarm(0)


def run(names: Sequence[str], numbers: Sequence[int], seed: int, processes: int) -> Iterator[tuple[str, int, str, str]]:
    """(kind, number, outcome, message) of each file; a process that ends is replaced, and its last file noted."""
    running: dict[int, tuple[int, deque[int]]] = {}

    def start(share: deque[int]) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                _work([names[at] for at in share], [numbers[at] for at in share], seed, writing)
            finally:
                os._exit(0)
        os.close(writing)
        running[reading] = process, share

    for share in (deque(range(first, len(names), processes)) for first in range(processes)):
        if share:
            start(share)
    while running:
        for reading in cast(list[int], wait(list(running))):
            process, share = running[reading]
            if lines := os.read(reading, 1 << 20).splitlines():  # whole ones, as they are short
                for text in lines:
                    at = share.popleft()
                    yield names[at], numbers[at], *json.loads(text)
                continue
            os.close(reading)
            del running[reading]
            status = os.waitpid(process, 0)[1]
            if share:
                timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                at = share.popleft()
                yield names[at], numbers[at], "time-out" if timed_out else "crash", f"exit status {status}"
            if share:
                start(share)


def report(kinds: Sequence[str], files: int, seed: int, processes: int) -> Iterator[str]:
    """The table; each failure goes to stderr."""
    share, rest = divmod(files, len(kinds))
    names = [kind for at, kind in enumerate(kinds) for _ in range(share + (at < rest))]
    numbers = [number for at in range(len(kinds)) for number in range(share + (at < rest))]
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for name, number, outcome, message in run(names, numbers, seed, processes):
        counts[name][outcome] += 1
        if outcome in FAILURES:
            print(f"{outcome}: {name} {number}: {message}", file=sys.stderr, flush=True)
    yield line(["kind", "files", *OUTCOMES])
    yield line(["---"] * (len(OUTCOMES) + 2))
    for kind, found in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        yield line([kind, f"{found.total():,}", *(f"{found[outcome]:,}" for outcome in OUTCOMES)])


def _warm_up() -> None:
    """What every process needs, imported once."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    import datasets

    from longctx.model import load  # noqa: F401
    from longctx.training import dataset  # noqa: F401
    from longctx.training.checkpoint import read_manifest  # noqa: F401

    datasets.disable_progress_bars()
    _settings()
    _tiny()
    _model_folder()


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a file did neither: give the right tokens, or the typed error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=10_000, help="Over all kinds. Default: 10000.")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0, help="Of the damage. Default: 0.")
    parser.add_argument("--processes", type=int, default=2, help="At a time. Default: 2.")
    parser.add_argument("--output", type=Path, help="Also write the table here.")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    head = ["# Damaged files", "", f"`{' '.join(['python -m benchmarks.fuzz', *given])}`  "]
    head += [f"{datetime.now(UTC):%Y-%m-%d}, {device()}", "", *(__doc__ or "").split("\n\n", 2)[2].split("\n")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(FUZZ_FOLDER=folder, HF_HUB_OFFLINE="1")
        _warm_up()
        lines = [*head, *report(options.kinds, options.files, options.seed, options.processes)]
    print("\n".join(lines), flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    total = lines[-1].split("|")[1:-1]
    return int(any(cell.strip() != "0" for cell in total[4:]))


if __name__ == "__main__":
    sys.exit(main())
