"""Tokens and labels of every kind of record, read from every kind of file, with several tokenizers and templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longctx.data import load_records, stream_records, tokenize_records, tokenize_stream
from longctx.data.kinds import PAIRS
from longctx.model.load import load_tokenizer
from longctx.run.preparation import prepare_data
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.golden.data_sets import own_folder
from tests.golden.digests import digest
from tests.jsonl import write_lines
from tests.model.test_tiny import MESSAGES

Records = list[dict[str, Any]]

# --------------------------------------------------------------------------------------------------
# Tokenizers and templates
# --------------------------------------------------------------------------------------------------

TOOLS = (
    "{%- if tools %}{{ '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- set text = m.content if m.content is string else (m.content or []) | map(attribute='text') | join %}"
    "{%- if m.role == 'assistant' %}{% generation %}"
    "{{- (m.reasoning_content + '</think>' if m.reasoning_content else '') + text }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endgeneration %}{%- else %}{{ (m.name + ': ' if m.name else '') + text + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}{%- endfor %}{{ suffix }}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with tools, calls of tools, thoughts, contents of several parts, and a variable of its own."""

MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>{% else %}"
    "{% generation %} {{ m.content }}<|endoftext|>{% endgeneration %}{% endif %}{% endfor %}"
)
"""In the way of Llama 2, beginning with the tokenizer's BOS token."""

LAST_ALONE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and (loop.last or m.weight) %}"
    "{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
"""Marks the last answer, and those with a weight."""

_SPECIAL = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<s>"]


WORDS = "hello the sky is blue 2 4 + = ? hi there sure yes be brief user assistant system"


def _merging() -> Tokenizer:
    """Bytes with a few merges, one of which joins a prompt's end to its answer. A BOS token begins every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "s"), ("is", "Ġ"), ("isĠ", "b"), ("l", "l"), ("e", "ll"), ("=", "4")]
    words = [*alphabet, *("".join(merge) for merge in merges), *_SPECIAL]
    made = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    bos = [("<s>", words.index("<s>"))]
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=bos)
    return made


def _of_words() -> Tokenizer:
    """Whole words in lower case; others are unknown."""
    words = ["[unk]", *WORDS.split()]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*words, *_SPECIAL])}, unk_token="[unk]"))
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def _of_pieces() -> Tokenizer:
    """Pieces with scores, in which a space begins a word, as in SentencePiece."""
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("▁is", -1.5), ("▁blue", -1.2), ("ue", -3.0)]
    pieces += [(character, -8.0 - place / 16) for place, character in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


MAKERS: dict[str, Callable[[], Tokenizer]] = {"merging": _merging, "words": _of_words, "pieces": _of_pieces}


def _tokenizers(folder: Path) -> dict[str, PreTrainedTokenizerBase]:
    """Return tiny's tokenizer, and others as they are read from disk."""
    found = {"tiny": load_tokenizer("tiny")}
    for name, make in MAKERS.items():
        made = make()
        made.add_special_tokens(_SPECIAL)
        options = {"eos_token": "<|endoftext|>", "chat_template": TOOLS}
        options |= {"bos_token": "<s>"} if name == "merging" else {"pad_token": "<|pad|>"}
        PreTrainedTokenizerFast(tokenizer_object=made, **options).save_pretrained(folder / name)
        found[name] = load_tokenizer(str(folder / name))
    return found


# --------------------------------------------------------------------------------------------------
# Records
# --------------------------------------------------------------------------------------------------

TEXTS = ["hello", "def f(x):\n    return 'ü€'\n", "the sky is blue " * 20, "", "ends<|endoftext|>", " \t1.50\r\n"]
CHATS: list[Records] = [MESSAGES, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]]
WEATHER = {
    "name": "weather",
    "description": "of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Oslo", "days": 1.5}}}
TOOL_CHAT = {
    "messages": [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "rain"},
        {"role": "assistant", "reasoning_content": "It said rain.", "content": "It rains."},
    ],
    "tools": [{"type": "function", "function": WEATHER}],
    "chat_template_kwargs": {"suffix": "!"},
}
PARTS = [{"type": "text", "text": "Weather"}, {"type": "text", "text": " in Oslo?"}]
PROMPTS = [("2+2=", "4"), ("the sky is", " blue"), ("", "nothing before")]
ANSWERS = [("2+2=", "4", "5"), ("the sky is ", "blue", "bright green"), ("say hello: ", "hello", "")]
TOKENS = [{"input_ids": [*range(3, 3 + length)]} for length in (2, 5, 17)]

ONLY_ASSISTANT = {"assistant_only_loss": True}
FROM_VALUE = [[{"from": m["role"], "value": m["content"]} for m in chat] for chat in CHATS]
SPLIT_CHATS = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS]
WEIGHTED = [{"messages": [CHATS[0][1], {**CHATS[0][2], "weight": weight}, *CHATS[0][3:]]} for weight in (0, 1)]
CHAT_PAIRS = [
    {"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [{"role": "assistant", "content": "no"}]} for chat in CHATS
]
IMPLICIT = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in CHAT_PAIRS]

CASES: dict[str, tuple[Records, dict[str, Any]]] = {
    "text": ([{"text": text, "source": 1} for text in TEXTS], {}),
    "text in another column": ([{"body": text, "text": "no"} for text in TEXTS[:3]], {"text_field": "body"}),
    "messages": ([{"messages": chat} for chat in CHATS], {}),
    "messages, assistant only": ([{"messages": chat} for chat in CHATS], ONLY_ASSISTANT),
    "messages in the older form": ([{"conversations": chat} for chat in FROM_VALUE], ONLY_ASSISTANT),
    "messages, Llama 2's template": ([{"messages": chat} for chat in CHATS], {"chat_template": MARKED}),
    "messages, Llama 2's template, assistant only": (
        [{"messages": chat} for chat in CHATS],
        {"chat_template": MARKED, **ONLY_ASSISTANT},
    ),
    "messages with weights": (WEIGHTED, {"chat_template": LAST_ALONE, **ONLY_ASSISTANT}),
    "tools": ([TOOL_CHAT], {"chat_template": TOOLS}),
    "tools, assistant only": ([TOOL_CHAT], {"chat_template": TOOLS, **ONLY_ASSISTANT}),
    "tools as JSON text": ([TOOL_CHAT | {"tools": json.dumps(TOOL_CHAT["tools"])}], {"chat_template": TOOLS}),
    "tools that the template leaves out": ([TOOL_CHAT], {}),
    "contents of several parts": (
        [{"messages": [{"role": "user", "content": PARTS}, TOOL_CHAT["messages"][-1]]}],
        {"chat_template": TOOLS},
    ),
    "prompt and completion": ([{"prompt": p, "completion": c} for p, c in PROMPTS], {}),
    "prompt and completion, all tokens": (
        [{"prompt": p, "completion": c} for p, c in PROMPTS],
        {"completion_only_loss": False},
    ),
    "chat of prompt and completion": (SPLIT_CHATS, {}),
    "chat of prompt and completion, all tokens": (SPLIT_CHATS, {"completion_only_loss": False}),
    "chat of prompt and completion, assistant's part": (
        [{"prompt": CHATS[0][:at], "completion": CHATS[0][at:]} for at in (2, 4)],
        ONLY_ASSISTANT,
    ),
    "tokens": (TOKENS, {}),
    "tokens with labels": ([row | {"labels": [-100, *row["input_ids"][1:]]} for row in TOKENS], {}),
    "tokens with the assistant's mask": (
        [row | {"assistant_masks": [token % 3 % 2 for token in row["input_ids"]]} for row in TOKENS],
        {},
    ),
    "tokens with both masks": (
        [
            row
            | {"assistant_masks": [token % 2 for token in row["input_ids"]]}
            | {"completion_mask": [int(token > 4) for token in row["input_ids"]]}
            for row in TOKENS
        ],
        {"completion_only_loss": True},
    ),
    "pairs": ([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in ANSWERS], {"text_field": PAIRS}),
    "pairs without prompts": ([{"chosen": p + c, "rejected": p + r} for p, c, r in ANSWERS[:2]], {"text_field": PAIRS}),
    "chat pairs": (CHAT_PAIRS, {"text_field": PAIRS}),
    "chat pairs without prompts": (IMPLICIT, {"text_field": PAIRS}),
    "chat pairs, Llama 2's template": (CHAT_PAIRS, {"text_field": PAIRS, "chat_template": MARKED}),
}
QUICK = (
    "text",
    "chat of prompt and completion, assistant's part",
    "tools, assistant only",
    "prompt and completion",
    "tokens with both masks",
    "chat pairs without prompts",
)

# --------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------


def _json(path: Path, records: Records, indent: int | None = None) -> str:
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=indent is None))
    return str(path)


def _parquet(path: Path, records: Records, compression: str) -> str:
    pq.write_table(pa.Table.from_pylist(records), path, compression=compression, row_group_size=2)
    return str(path)


def _arrow(path: Path, records: Records, make: Callable[..., Any]) -> str:
    table = pa.Table.from_pylist(records)
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return str(path)


def _folder(path: Path, records: Records) -> str:
    """Files in folders, whose paths give their order, with notes and hidden files beside them."""
    for name, part in (("b/0.jsonl", records[2:]), ("a1.jsonl", records[:1]), ("a2.jsonl", records[1:2])):
        write_lines(path / name, part)
    (path / "README.md").write_text("notes")
    (path / ".hidden.jsonl").write_text("x")
    return str(path)


def _saved(path: Path, records: Records) -> str:
    dataset = Dataset.from_list(records)
    DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(str(path))
    return str(path)


def _marked_lines(path: Path, records: Records) -> str:
    """With a byte order mark, blank lines, and line ends of Windows."""
    lines = "\r\n \r\n".join(map(json.dumps, records))
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\n\n")
    return str(path)


WRITERS: dict[str, Callable[[Path, Records], str]] = {
    "JSON lines": lambda path, records: write_lines(path / "data.jsonl", records),
    "JSON lines, marked": lambda path, records: _marked_lines(path / "data.jsonl", records),
    "JSON": lambda path, records: _json(path / "data.json", records),
    "JSON, indented": lambda path, records: _json(path / "data.json", records, 2),
    **{
        f"Parquet, {codec}": lambda path, records, codec=codec: _parquet(path / "data.parquet", records, codec)
        for codec in ("none", "snappy", "gzip", "zstd")
    },
    "Arrow stream": lambda path, records: _arrow(path / "data.arrow", records, pa.ipc.new_stream),
    "Arrow file": lambda path, records: _arrow(path / "data.arrow", records, pa.ipc.new_file),
    "folder": lambda path, records: _folder(path, records),
    "save_to_disk": lambda path, records: _saved(path, records),
    "compressed JSON lines": lambda path, records: str(
        Path(write_lines(path / "x", records)).rename(path / "a.jsonl.gz")
    ),
}


def _source_files(folder: Path) -> str:
    """A folder of sources and notes, each of which is one document."""
    files = {
        "b/z.py": "x = 1\n",
        "b/a.py": "# ü\r\ny = 2",
        "c.txt": "\ufefftext",
        "Makefile": "all:\n\techo",
        ".x": "no",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return str(folder)


# --------------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------------


def _documents(documents: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return how many documents and tokens there are, how many are learnt, digests, and what is learnt of the first."""
    ids = documents["input_ids"][:]
    labels = documents["labels"][:] if "labels" in documents.column_names else ids
    learnt = [[token for token in row if token != -100] for row in labels]
    return {
        "documents": len(ids),
        "tokens": sum(map(len, ids)),
        "learnt": sum(map(len, learnt)),
        "ids": digest(json.dumps(ids)),
        "labels": digest(json.dumps(labels)) if labels is not ids else None,
        "first": tokenizer.decode(learnt[0])[:60],
    }


def _tokenized(
    source: str | Dataset, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any], **where: Any
) -> Any:
    """Return the documents of a data set, and whether a stream of it has the same ones; or why it is refused."""
    read = where | {name: options[name] for name in ("text_field",) if name in options}
    try:
        records = source if isinstance(source, Dataset) else load_records(source, **read)
        found = _documents(tokenize_records(records, tokenizer, **options), tokenizer)
        if isinstance(source, Dataset) or "[" in where.get("split", ""):
            return found
        stream = tokenize_stream(stream_records(source, **read), tokenizer, **options)
        streamed = _documents(Dataset(pa.concat_tables(stream.tables())), tokenizer)
        stream.encoder.process.close()
        return found | {"streamed": "the same" if streamed == found else streamed}
    except ValueError as error:
        return {"refused": str(error).replace(str(source), "DATA").replace(str(Path.cwd()), "HERE")}


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    with own_folder() as folder:
        tokenizers = _tokenizers(folder)
        for number, (case, (records, options)) in enumerate(CASES.items()):
            if quick and case not in QUICK:
                continue
            path = write_lines(folder / str(number) / "data.jsonl", records)
            for name in ["tiny"] if quick else [*tokenizers]:
                yield f"{case}, tokenizer {name}", _tokenized(path, tokenizers[name], options)
            yield f"{case}, in memory", _tokenized(_in_memory(records), tokenizers["tiny"], options)
        yield from _of_files(folder, tokenizers["tiny"], quick)
        yield from _of_flags(folder, quick)


def _in_memory(records: Records) -> Dataset:
    return Dataset.from_list(records, on_mixed_types="use_json")


def _of_files(folder: Path, tokenizer: PreTrainedTokenizerBase, quick: bool) -> Iterator[tuple[str, Any]]:
    for case in ("text", "tools, assistant only", "messages, assistant only", "tokens with labels"):
        records, options = CASES[case]
        for number, (name, write) in enumerate(WRITERS.items()):
            if quick and (case != "text" or number % 4):
                continue
            here = folder / f"{case} {number}"
            here.mkdir()
            yield f"{case}, {name}", _tokenized(write(here, records), tokenizer, options)
    path = _source_files(folder / "sources")
    yield "a folder of sources", _tokenized(path, tokenizer, {})
    yield "a glob of sources", _tokenized(f"{path}/**/*.py", tokenizer, {})
    path = str(folder / "splits")
    for split, number in (("train", 9), ("test", 3)):
        write_lines(Path(path, f"{split}.jsonl"), [{"text": f"{split} {place}"} for place in range(number)])
    for split in ("train", "test", "train[2:5]+test[:50%]", "train[-25%:]"):
        yield f"split {split}", _tokenized(path, tokenizer, {}, split=split)


FLAGS: dict[str, tuple[str, Sequence[str]]] = {
    "messages, assistant only": ("messages", ["--assistant_only_loss", "True"]),
    "messages, a template in a file": (
        "messages",
        ["--chat_template_path", "TEMPLATE", "--assistant_only_loss", "True"],
    ),
    "messages, another tokenizer's template": ("messages", ["--chat_template_path", "TOKENIZER"]),
    "prompt and completion, all tokens": ("prompt and completion", ["--completion_only_loss", "False"]),
    "text in another column, the first records for evaluation": (
        "text in another column",
        ["--dataset_text_field", "body", "--dataset_test_split", "train[:2]", "--eval_strategy", "epoch"],
    ),
}


def _of_flags(folder: Path, quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield the documents that commands train on."""
    template = folder / "template.jinja"
    template.write_text(LAST_ALONE, encoding="utf-8")
    other = load_tokenizer("tiny")
    other.chat_template = TOOLS
    other.save_pretrained(folder / "other")
    named = {"TEMPLATE": str(template), "TOKENIZER": str(folder / "other")}
    for number, (name, (case, flags)) in enumerate([*FLAGS.items()][: 1 if quick else None]):
        path = write_lines(folder / f"flags {number}" / "data.jsonl", CASES[case][0])
        given = ["--model_name_or_path", "tiny", "--dataset_name", path, "--output_dir", str(folder / "run")]
        flags = parse_flags([*given, *(named.get(flag, flag) for flag in flags)])
        data = prepare_data(resolve(flags, read_profile({}), {}))
        found = _documents(data.documents, other)
        yield (
            f"flags, {name}",
            found | ({"evaluated": _documents(data.evaluation.documents, other)} if data.evaluation else {}),
        )


TRL_TEMPLATES = ("qwen3", "qwen3_5_think", "qwen2_5", "glm4moe", "llama3", "phi3", "gemma3")


def measured() -> Iterator[tuple[str, Any]]:
    """Yield what depends on the installed packages: templates of TRL's, and the sources of Python."""
    import trl

    tokenizer = load_tokenizer("tiny")
    tokenizer.bos_token = tokenizer.eos_token  # as their own tokenizers have one
    with own_folder():
        for name in TRL_TEMPLATES:
            template = Path(trl.__file__).parent.joinpath("chat_templates", f"{name}.jinja").read_text()
            for options in ({}, ONLY_ASSISTANT):
                for case in ("messages", "tools"):
                    found = _tokenized(_in_memory(CASES[case][0]), tokenizer, {"chat_template": template, **options})
                    yield f"{case}, TRL's {name}{', assistant only' if options else ''}", found
        yield "stdlib", _tokenized("stdlib", tokenizer, {}, split="train[:3%]")
