"""Shapes of public chat data sets, and what TRL, or LLaMA-Factory's conversion and TRL, make of them.

Nothing here uses longctx's code for chats.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import _tokenize as trl_tokenize
from trl.data_utils import common_prefix_length, maybe_convert_to_chatml

Message = dict[str, Any]


def user(content: Any, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def calls(*arguments: Any) -> list[Message]:
    """Return calls of the tool, one for each of these arguments."""
    return [{"type": "function", "function": {"name": "lift", "arguments": value}} for value in arguments]


SYSTEM = {"role": "system", "content": "x y"}
TURNS = [user("a b"), assistant("c d"), user("e"), assistant("f g")]
LIFTED = {"role": "tool", "name": "lift", "content": "ok"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lift",
        "description": "raise",
        "parameters": {"type": "object", "properties": {"height": {"type": "integer", "description": "of it"}}},
    },
}
TOOLS = [TOOL]


def with_calls(made: list[Message], content: Any = "", **more: Any) -> list[Message]:
    """Return a chat with calls of the tool, their results and an answer."""
    return [user("a b"), assistant(content, tool_calls=made), *[LIFTED] * len(made), assistant("c d", **more)]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A record as a data set holds it, and as a reader of its documentation understands it."""

    name: str
    record: dict[str, Any]
    meant: dict[str, Any] = field(default_factory=dict)
    """The same chat as TRL's documentation wants it, written by hand; empty if the record is that already."""
    unlearnt: bool = False
    """Whether a mask of its own takes the turn of `MASKED_TURNS` out of the loss."""


def llama_factory(record: dict[str, Any]) -> dict[str, Any]:
    """Convert a record of ShareGPT or Alpaca as LLaMA-Factory does, with its default names of columns and roles.

    After data/README.md of that project: a system message comes from the first turn or the column; queries of Alpaca
    are the instruction, and the input on the next line, after the pairs of the history. What its function_call holds
    becomes a call in OpenAI's form, because TRL has chats rendered by the tokenizer's template.
    """
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    if "instruction" in record:
        for query, response in record.get("history") or []:
            system += [user(query), assistant(response)]
        query = "\n".join(text for text in (record["instruction"], record.get("input")) if text)
        return {"prompt": [*system, user(query)], "completion": [assistant(record["output"])]}
    messages = []
    for turn in record["conversations"]:
        if turn["from"] == "function_call":
            call = json.loads(turn["value"])
            messages.append(assistant("", tool_calls=calls(call["arguments"])))
            continue
        role = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}[turn["from"]]
        messages.append({"role": role, "content": turn["value"]})
    tools = {"tools": json.loads(record["tools"])} if "tools" in record else {}
    return {"messages": system + messages} | tools


SHAREGPT = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]
SHAREGPT_CALL = [
    {"from": "human", "value": "a b"},
    {"from": "function_call", "value": '{"name": "lift", "arguments": {"height": 307}}'},
    {"from": "observation", "value": "ok"},
    {"from": "gpt", "value": "c d"},
]
ALPACA = {"instruction": "Add.", "output": "3"}
CALLED = {"messages": with_calls(calls({"height": 307})), "tools": TOOLS}


def _masked(**mask: Any) -> dict[str, Any]:
    return {"messages": [TURNS[0], TURNS[1] | mask, *TURNS[2:]]}


def _from_elsewhere(name: str, record: dict[str, Any]) -> Shape:
    return Shape(name=name, record=record, meant=llama_factory(record))


SHAPES = [
    Shape(name="two turns", record={"messages": TURNS[:2]}),
    Shape(name="a system message first", record={"messages": [SYSTEM, *TURNS[:2]]}),
    Shape(name="many turns", record={"messages": [*TURNS, user("h"), assistant("i j")]}),
    Shape(name="a system message in the middle", record={"messages": [*TURNS[:2], SYSTEM, *TURNS[2:]]}),
    Shape(name="a question last", record={"messages": TURNS[:3]}),
    Shape(name="call, arguments as an object", record=CALLED),
    Shape(
        name="call, arguments as a string",
        record={"messages": with_calls(calls('{"height": 307}')), "tools": TOOLS},
        meant=CALLED,
    ),
    Shape(
        name="call, `content` null",
        record={"messages": with_calls(calls({"height": 307}), None), "tools": TOOLS},
        meant=CALLED,
    ),
    Shape(
        name="two calls at once",
        record={"messages": with_calls(calls({"height": 307}, {"height": 408})), "tools": TOOLS},
    ),
    Shape(
        name="`tool_calls` empty or null",
        record={"messages": [TURNS[0], TURNS[1] | {"tool_calls": []}, TURNS[2], TURNS[3] | {"tool_calls": None}]},
        meant={"messages": TURNS},
    ),
    Shape(
        name="`function_call`, OpenAI's older form",
        record={
            "messages": [
                user("a b"),
                assistant(None, function_call={"name": "lift", "arguments": '{"height": 307}'}),
                {"role": "function", "name": "lift", "content": "ok"},
                assistant("c d"),
            ]
        },
    ),
    Shape(name="`reasoning_content`", record={"messages": [*TURNS[:3], assistant("f g", reasoning_content="r s")]}),
    Shape(name="`thinking`", record={"messages": [*TURNS[:3], assistant("f g", thinking="r s")]}),
    Shape(
        name="`<think>` in the content", record={"messages": [*TURNS[:3], assistant("<think>\nr s\n</think>\n\nf g")]}
    ),
    Shape(
        name="content in parts",
        record={"messages": [user([{"type": "text", "text": "a b"}]), assistant([{"type": "text", "text": "c d"}])]},
    ),
    Shape(name="`weight`", record=_masked(weight=0), unlearnt=True),
    Shape(name="`loss_mask`", record=_masked(loss_mask=0), unlearnt=True),
    Shape(name="`train`", record=_masked(train=False), unlearnt=True),
    Shape(name="`masked`", record=_masked(masked=True), unlearnt=True),
    _from_elsewhere("ShareGPT", {"conversations": SHAREGPT}),
    _from_elsewhere("ShareGPT, column `system`", {"conversations": SHAREGPT, "system": "x y"}),
    _from_elsewhere("ShareGPT, call of a tool", {"conversations": SHAREGPT_CALL, "tools": json.dumps(TOOLS)}),
    _from_elsewhere("Alpaca, no `input`", ALPACA | {"input": ""}),
    _from_elsewhere("Alpaca, `input`", ALPACA | {"input": "1 2"}),
    _from_elsewhere(
        "Alpaca, `system` and `history`", ALPACA | {"input": "1 2", "system": "x y", "history": [["a b", "c d"]]}
    ),
    Shape(name="`prompt` and `completion`", record={"prompt": TURNS[:1], "completion": TURNS[1:2]}),
    Shape(name="`completion` of several turns", record={"prompt": TURNS[:1], "completion": TURNS[1:]}),
    Shape(
        name="`chat_template_kwargs`",
        record={"messages": TURNS[:2], "chat_template_kwargs": {"enable_thinking": False}},
    ),
    Shape(
        name="keys and columns that nothing reads",
        record={"messages": [user("a b", id=3), assistant("c d", id=4)], "source": "forum"},
    ),
]

# ----------------------------------------------------------------------------------------------------
# TRL
# ----------------------------------------------------------------------------------------------------

Learnt = tuple[list[int], list[int]]
"""The tokens of a record, and its labels."""

LLAMA_TURN = re.compile(r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(?P<answer>.*?<\|eot_id\|>)", re.DOTALL)
TURNS_BY_HAND = {
    "llama3_1": LLAMA_TURN,
    "llama3_2": LLAMA_TURN,
    "gemma4": re.compile(r"<\|turn>model\n(?P<answer>.*?<turn\|>\n)", re.DOTALL),
    "mistral": re.compile(r"\[/INST\](?P<answer>[^[]*?<\|endoftext\|>)"),
}
"""An assistant's turn of templates without generation markers, after their text: what the model writes, until it stops.

The EOS token of the tests stands for Mistral's.
"""
RESULTS_OF_GEMMA_4 = re.compile(r"(?<=<\|tool_response>).*<tool_response\|>", re.DOTALL)
"""Results of tools, which stand within the model's turn. The first token of them is the one with which it stops."""

MASKED_TURNS = {
    "llama3_1": "<|start_header_id|>assistant<|end_header_id|>\n\nc d<|eot_id|>",
    "llama3_2": "<|start_header_id|>assistant<|end_header_id|>\n\nc d<|eot_id|>",
    "gemma3": "<start_of_turn>model\nc d<end_of_turn>\n",
    "gemma4": "<|turn>model\nc d<turn|>\n",
    "gptoss": "<|start|>assistant<|channel|>final<|message|>c d<|end|>",
    "mistral": "c d<|endoftext|>",
    "phi3": "<|assistant|>\nc d<|end|>\n",
    "glm4moe": "<|assistant|>\n<think></think>\nc d<|user|>",
    "deepseekv3": "<｜Assistant｜>c d<｜end▁of▁sentence｜>",
    "qwen2_5": "<|im_start|>assistant\nc d<|im_end|>\n",
    "qwen3": "<|im_start|>assistant\n<think>\n\n</think>\n\nc d<|im_end|>\n",
    "qwen3_5_think": "<|im_start|>assistant\n<think>\n\n</think>\n\nc d<|im_end|>\n",
    "nemotron_3_nano": "<|im_start|>assistant\n<think></think>c d<|im_end|>\n",
}
"""The turn that the masks of `SHAPES` take out of the loss, as TRL's training template, or the template, writes it."""

MASKED_TURNS_OF_ALL_TOKENS = {
    "glm4moe": "<|assistant|>\n<think></think>\nc d",
    "qwen3": "<|im_start|>assistant\nc d<|im_end|>\n",
    "qwen3_5_think": "<|im_start|>assistant\nc d<|im_end|>\n",
}
"""The turn as the template writes it, where TRL's training template writes another one."""


def trl_by_hand(shape: Shape, template: str, tokenizer: Any, loss: str) -> Learnt:
    """Return what TRL learns of a record once a person has made of it what TRL wants."""
    record = shape.meant or shape.record
    if template == "deepseekv3" and loss != "assistant":
        record = _with_text_arguments(record)
    return trl(record, template, tokenizer, loss, unlearnt=shape.unlearnt)


def trl(record: dict[str, Any], template: str, tokenizer: Any, loss: str, *, unlearnt: bool = False) -> Learnt:
    """Return what TRL's SFTTrainer learns of a record, as `datasets` gives it.

    Its rules: a template with generation markers for the loss on answers, the completion after the tokens that the
    prompt and the whole have in common, and both masks together. Where TRL has no markers, turns are found by hand.

    Args:
        unlearnt: whether the turn of `MASKED_TURNS` is taken out of the loss, also by hand.
    """
    [record] = Dataset.from_list([record], on_mixed_types="use_json")
    record = maybe_convert_to_chatml(record)
    assistant_only, completion_only = loss == "assistant", loss != "all"
    by_hand = assistant_only and template in TURNS_BY_HAND
    marked = get_training_chat_template(tokenizer) if assistant_only and not by_hand else None
    tools = record.get("tools")
    options = {
        "chat_template": marked,
        "tools": json.loads(tools) if isinstance(tools, str) else tools,
        **record.get("chat_template_kwargs", {}),
    }
    chat = record["prompt"] + record["completion"] if "prompt" in record else record["messages"]
    out = trl_tokenize(tokenizer, chat, return_assistant_tokens_mask=assistant_only and not by_hand, **options)
    ids, text = out["input_ids"], tokenizer.decode(out["input_ids"])
    learnt = np.asarray(out.get("assistant_masks", [1] * len(ids)), dtype=bool)
    if by_hand:
        learnt &= _within([match.span("answer") for match in TURNS_BY_HAND[template].finditer(text)], text, tokenizer)
        learnt &= ~_within([match.span() for match in RESULTS_OF_GEMMA_4.finditer(text)], text, tokenizer)
    if "prompt" in record and completion_only:
        prompt = trl_tokenize(tokenizer, record["prompt"], add_generation_prompt=True, **options)["input_ids"]
        learnt[: common_prefix_length(prompt, ids)] = False
    if unlearnt:
        turn = MASKED_TURNS[template] if assistant_only else (MASKED_TURNS | MASKED_TURNS_OF_ALL_TOKENS)[template]
        assert text.count(turn) == 1, (template, text)
        learnt &= ~_within([(text.index(turn), text.index(turn) + len(turn))], text, tokenizer)
    return list(ids), np.where(learnt, ids, -100).tolist()


def _with_text_arguments(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the arguments of calls as text, to which DeepSeek-V3's own template joins others."""
    record = json.loads(json.dumps(record))
    for message in record.get("messages", []):
        for call in message.get("tool_calls") or []:
            if isinstance(call["function"]["arguments"], dict):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return record


def _within(spans: list[tuple[int, int]], text: str, tokenizer: Any) -> np.ndarray:
    """Return which tokens lie within one of these spans of characters."""
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return np.asarray([any(start <= first < stop for start, stop in spans) for first, _ in places])
