"""A rendered chat has everything that its messages hold, or it is refused, or what is missing is counted and said."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from longctx.data.errors import DataError
from longctx.data.messages import CALLS, MASKS, REASONING, with_arguments

_USUAL_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_USUAL_ROLES |= {"function_call": "assistant", "observation": "tool"}
"""Roles of ShareGPT's and similar formats, in lower case, and the roles of templates that they stand for."""

_ROLES = ("system", "developer", "user", "assistant", "tool")

_READ_HERE = frozenset({"role", "content", *CALLS, *REASONING, *MASKS})
"""Keys of a message whose use does not depend on the template, or is checked in the rendered text."""

_MOST_KEYS = 32
"""Unread keys that are named, of one message."""


def with_marked_calls(chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a copy of the conversation in which every call has a unique name and a unique argument.

    Only unique ones show that a call was rendered: a tool's name and the arguments can also occur in a question.

    Returns:
        The copy, and by each name and argument what the template leaves out if it does not write it.
    """
    marks: dict[str, str] = {}

    def mark(call: dict[str, Any]) -> dict[str, Any]:
        if not (name := _function_name(call)):
            return call
        new, argument = f"longctx_call_{len(marks)}_", f"longctx_argument_{len(marks)}_"
        marks[new] = f"the call of the tool {name!r}"
        call = call | ({"function": call["function"] | {"name": new}} if call.get("function") else {"name": new})
        if isinstance(arguments := _arguments(call), dict):
            marks[argument] = f"the arguments of the call of the tool {name!r}"
            call = with_arguments(call, arguments | {argument: "1"})
        return call

    return _map_calls(chat, mark), marks


def with_text_arguments(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the conversation in which calls have their arguments as strings of JSON.

    Some templates, such as DeepSeek-V3's, write them as they are.
    """

    def written(call: Mapping[str, Any]) -> Any:
        arguments = _arguments(call)
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments

    return _map_calls(chat, lambda call: with_arguments(call, written(call)))


def shows_python(marks: Mapping[str, str], text: str) -> bool:
    """Return whether a template has written the arguments of a marked call as Python does, and not as JSON."""
    return any(f"'{mark}': '1'" in text for mark in marks)


def _map_calls(chat: list[dict[str, Any]], change: Any) -> list[dict[str, Any]]:
    changed = []
    for message in chat:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [change(call) for call in message["tool_calls"]]
        if "function_call" in message:
            message["function_call"] = change(message["function_call"])
        changed.append(message)
    return changed


def _arguments(call: Mapping[str, Any]) -> Any:
    return (call.get("function") or call).get("arguments")


def check_calls(marks: Mapping[str, str], shown: str, where: str) -> None:
    """Refuse a template that leaves out calls of tools, because the model would not learn them.

    Args:
        marks: from `with_marked_calls`.
        shown: the rendered text of the marked conversation.
    """
    if missing := [what for mark, what in marks.items() if mark not in shown]:
        raise DataError(
            f"{where}: the chat template leaves out {missing[0]}. Use a template "
            "that writes tool_calls (--chat_template_path), or remove the record."
        )


def check_messages(chat: list[dict[str, Any]], template: str, text: str, where: str) -> None:
    """Refuse roles that the template does not know, and messages that it does not render.

    Answers and tools' results are not searched for, because templates may cut off the reasoning of an answer and
    reformat a result; `left_out` counts them.
    """
    position = 0
    for message in chat:
        role, content = message["role"], message["content"]
        usual = None if role in _ROLES else _USUAL_ROLES.get(str(role).lower(), str(role).lower())
        if usual in _ROLES and str(role) not in template:
            raise DataError(
                f"{where}: the chat template does not know the role '{role}'. Call it '{usual}', or use a "
                "template that knows it (--chat_template_path)."
            )
        if isinstance(content, list | dict) and str(content) in text:
            raise DataError(
                f"{where}: the chat template does not know messages of several parts, and would write "
                f"{str(content)[:60]!r} into the text. Write the content as a string, or use another template "
                "(--chat_template_path)."
            )
        if role in ("assistant", "tool"):
            continue
        for said in filter(None, map(str.strip, texts_of(content))):
            found = text.find(said, position)  # messages mostly follow each other, so that this is linear
            position = text.find(said) if found < 0 else found
            if position < 0:
                raise DataError(
                    f"{where}: the chat template leaves out a message of the role '{role}': "
                    f"{said[:60]!r}. Use a template that writes it (--chat_template_path), or remove the message."
                )


def check_within(message: dict[str, Any], turn: str, where: str) -> None:
    """Refuse a turn that does not hold the text of its message: a template may write it elsewhere."""
    said = [text.rpartition("</think>")[2].strip() for text in texts_of(message["content"])]
    if not all(text in turn for text in said):
        raise DataError(
            f"{where}: the chat template writes a message of the role '{message['role']}' into another turn, so that "
            "turns cannot be told apart. Use another template (--chat_template_path), or remove the mask."
        )


def texts_of(content: Any) -> Iterator[str]:
    """Yield the texts of a content, of its parts, and of what parts of other types hold, such as thoughts."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        text = content.get("text")
        others = [part for key, part in content.items() if key != "type"]
        yield from texts_of(text if isinstance(text, str) else others)
    elif isinstance(content, list):
        for part in content:
            yield from texts_of(part)


def left_out(chat: list[dict[str, Any]], tools: Any, template: str, text: str) -> Counter[str]:
    """Return what the text of a conversation lacks, in sentences with `{n}` for their number."""
    notes: Counter[str] = Counter()
    for message in chat:
        for key in sorted(message.keys() - _READ_HERE)[:_MOST_KEYS]:
            if not re.search(rf"\b{re.escape(key)}\b", template):
                notes[f"The chat template does not read the key {key!r} of messages; {{n}} of them have it."] += 1
        if message["role"] == "tool":
            notes["The chat template leaves out {n} of the results of tools: the model does not see them."] += any(
                said.strip() not in text and json.dumps(said.strip(), ensure_ascii=False)[1:-1] not in text
                for said in texts_of(message["content"])
            )
        if message["role"] != "assistant":
            continue
        thoughts = [message[key] for key in REASONING if isinstance(message.get(key), str)]
        answers = []
        for said in texts_of(message["content"]):
            thought, _, answer = said.rpartition("</think>")
            thoughts.append(thought.rpartition("<think>")[2])
            answers.append(answer)
        notes[
            "The chat template leaves out the reasoning of {n} of the assistant's turns, so that the model does not "
            "learn it. Others, such as TRL's training templates, write it (--chat_template_path)."
        ] += any(thought.strip() not in text for thought in thoughts)
        notes[
            "The chat template leaves out the text of {n} of the assistant's turns, such as text beside calls of "
            "tools, so that the model does not learn it. Another template may write it (--chat_template_path)."
        ] += any(answer.strip() not in text for answer in answers)
    notes["The chat template leaves out the tools that {n} of the records offer: the model does not see them."] += any(
        name not in text for name in map(_function_name, tools if isinstance(tools, list) else ())
    )
    return notes


def _function_name(tool: Any) -> str:
    function = tool.get("function") or tool if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""
