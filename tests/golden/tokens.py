"""Tokens and labels of every kind of record, with two tokenizers and several templates, as data sets and as streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longctx.data import load_records, stream_records, tokenize_records, tokenize_stream
from longctx.data.kinds import PAIRS
from longctx.model.load import load_tokenizer
from tests.golden.data_sets import own_folder
from tests.golden.digests import digest
from tests.jsonl import write_lines
from tests.model.test_tiny import MESSAGES

Records = list[dict[str, Any]]

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


def _merging_from_disk(folder: Path) -> PreTrainedTokenizerBase:
    made = _merging()
    made.add_special_tokens(_SPECIAL)
    options = {"eos_token": "<|endoftext|>", "chat_template": TOOLS, "bos_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **options).save_pretrained(folder)
    return load_tokenizer(str(folder))


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


def _tokenized(path: str, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> Any:
    """Return the documents of a file, and whether a stream of it has the same ones; or why it is refused."""
    read = {name: options[name] for name in ("text_field",) if name in options}
    try:
        found = _documents(tokenize_records(load_records(path, **read), tokenizer, **options), tokenizer)
        stream = tokenize_stream(stream_records(path, **read), tokenizer, **options)
        streamed = _documents(Dataset(pa.concat_tables(stream.tables())), tokenizer)
        stream.encoder.process.close()
        return found | {"streamed": "the same" if streamed == found else streamed}
    except ValueError as error:
        return {"refused": str(error).replace(path, "DATA")}


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    with own_folder() as folder:
        tokenizers = {"tiny": load_tokenizer("tiny"), "merging": _merging_from_disk(folder / "merging")}
        for number, (case, (records, options)) in enumerate(CASES.items()):
            path = write_lines(folder / str(number) / "data.jsonl", records)
            for name, tokenizer in tokenizers.items():
                yield f"{case}, tokenizer {name}", _tokenized(path, tokenizer, options)
