"""Messages as data sets hold them (OpenAI's, ShareGPT's, Alpaca's) -> the messages that a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from longctx.data.errors import DataError

_MEDIA_PARTS = frozenset(f"{before}{of}" for of in ("image", "video", "audio") for before in ("", "input_")) | {
    "image_url",
    "video_url",
    "audio_url",
}
"""Types of message parts that are not text, and keys that hold their contents."""

_MEDIA_OF_MESSAGES = _MEDIA_PARTS | {"images", "videos", "audios"}
"""Keys of a message that hold media, outside its content."""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "system": "system",
}
"""Values of `from`, and the roles that they stand for, as in LLaMA-Factory."""

CALLS = ("tool_calls", "function_call")
"""Keys of a message that hold its calls of tools: a list of calls, and one call in OpenAI's older form."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold the reasoning before its content."""

MASKS = dict.fromkeys(("weight", "loss_mask", "loss", "train", "training", "trainable"), True) | {"masked": False}
"""Keys of a message that say whether it is trained on, and whether a 1 (or true) says that it is."""


def check_text(value: object, column: str, where: str) -> None:
    """Refuse a value that is not a string."""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: '{column}' is {type(value).__name__} ({str(value)[:60]!r}); expected a string. "
            "Convert or remove the record."
        )


def check_chat(value: object, column: str, where: str) -> None:
    """Refuse a value that is not a list of messages with `role` (or, in ShareGPT's form, `from`)."""
    if not (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value)
    ):
        shown = repr(value)
        raise DataError(
            f"{where}: '{column}' is {shown[:80]}{'…' if len(shown) > 80 else ''}; expected a non-empty "
            'list of messages such as {"role": "user", "content": "…"}. Correct or remove the record.'
        )


def read_chat(value: object, column: str, where: str, *, is_struct: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a chat with `role`, `content`, and those other keys that hold something.

    ShareGPT's `from` and `value` become `role` and `content`, and a turn of `function_call` becomes a call of a tool.
    The arguments of calls, which OpenAI writes as a string of JSON, become objects.

    Args:
        is_struct: whether the messages come from an Arrow struct. There, every object has the keys of all objects, with
            null for those that it does not have.

    Raises:
        DataError: for anything but a list of messages, an unknown `from`, a message without content, and for images,
            video or audio.
    """
    check_chat(value, column, where)
    assert isinstance(value, list), "a chat"
    place = f"{where}: a message in '{column}'"
    return [_read_message(message, place) for message in (without_nulls(value) if is_struct else value)]


def _read_message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    if media := [key for key in _MEDIA_OF_MESSAGES if given.get(key)]:
        raise DataError(f"{where} has '{media[0]}', and longctx trains on text alone. Remove it, or the record.")
    message = {key: value for key, value in given.items() if not is_empty(value)}
    content = given.get("content")
    if "role" not in message:
        content = message.pop("value", given.get("value"))
        message |= _sharegpt_turn(message.pop("from", None), content, where)
        content = message.get("content", content)
    for part in content if isinstance(content, list) else [content]:
        if media_type := _media_in(part):
            raise DataError(
                f"{where} has a part of the type '{media_type}', and longctx trains on text alone. Remove the part, or "
                "the record."
            )
    check_text(message["role"], "role", where)
    if not isinstance(content, str | list | None) and message["role"] != "tool":
        check_text(content, "content", where)
    for key in REASONING:
        check_text(message.get(key, ""), key, where)
    if content is None and message["role"] != "tool" and not any(key in message for key in (*CALLS, *REASONING)):
        raise DataError(f"{where}, of the role {message['role']!r}, has no content. Correct or remove the record.")
    message["content"] = content or ""
    if not is_empty(calls := _from_json(message.pop("tool_calls", None))):
        if not isinstance(calls, list):
            raise DataError(
                f"{where} has tool_calls {str(calls)[:60]!r}; expected a list. Correct or remove the record."
            )
        message["tool_calls"] = [_read_call(call, where) for call in calls]
    if "function_call" in message:
        message["function_call"] = _read_call(_from_json(message["function_call"]), where)
    return message


def is_empty(value: object) -> bool:
    """Return whether an optional field holds nothing, which means the same as its absence."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def _sharegpt_turn(name: object, value: object, where: str) -> dict[str, Any]:
    role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise DataError(
            f"{where} is from {name!r}; expected one of {', '.join(_SHAREGPT_ROLES)}. Rename it, or remove the record."
        )
    if name != "function_call":
        return {"role": role}
    calls = _from_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and call.get("name") for call in calls):
        raise DataError(
            f"{where} is a function_call with the value {str(value)[:60]!r}; expected JSON such as "
            '{"name": "…", "arguments": {}}. Correct or remove the record.'
        )
    return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _read_call(call: object, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, an empty one for none, unless they are other text."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where} calls a tool with {str(call)[:60]!r}; expected an object with a name and arguments. Correct or "
            "remove the record."
        )
    arguments = function.get("arguments")
    arguments = {} if is_empty(arguments) else _from_json(arguments)
    return with_arguments(call, arguments) if isinstance(arguments, dict) else call


def with_arguments(call: dict[str, Any], arguments: object) -> dict[str, Any]:
    """Return a copy of a call with these arguments."""
    if not call.get("function"):
        return call | {"arguments": arguments}
    return call | {"function": call["function"] | {"arguments": arguments}}


def _from_json(value: Any) -> Any:
    """Return what a string of JSON holds; any other value, and a string that is no JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys that hold null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _media_in(part: object) -> str | None:
    """Return the media type of a part of a message, or None for text. Keys that hold None do not count."""
    if not isinstance(part, Mapping):
        return None
    names = [str(part.get("type")), *(key for key, value in part.items() if value is not None)]
    return next((name for name in names if name in _MEDIA_PARTS), None)


def is_learnt(message: Mapping[str, Any], where: str, obeyed: Collection[str] = ()) -> bool:
    """Return whether a message may be trained on: whether no mask of its own says otherwise.

    Args:
        obeyed: masks that the template's generation markers obey.

    Raises:
        DataError: for a mask that is neither 0 or 1 nor false or true.
    """
    learnt = True
    for name, yes in MASKS.items():
        if (value := message.get(name)) is None:
            continue
        if isinstance(value, str) or value not in (0, 1):
            raise DataError(
                f"{where}: a message has '{name}': {value!r}; expected 0 or 1, or false or true. Correct or remove it."
            )
        learnt = learnt and (name in obeyed or bool(value) == yes)
    return learnt


def alpaca_pair(record: Mapping[str, Any], where: str, *, as_chat: bool) -> dict[str, Any]:
    """Return the prompt and the completion of a record with `instruction`, `output`, and perhaps `input`, `system` and
    `history` (pairs of an instruction and an answer).

    Args:
        as_chat: whether they are messages, or text, in which a line break ends the instruction and the input.

    Raises:
        DataError: for fields of other types, and for text with `system` or `history`, for which it has no place.
    """
    for column in ("instruction", "input", "output", "system"):
        if record.get(column) is not None:
            check_text(record[column], column, where)
    asked = "\n".join(part for part in (record["instruction"], record.get("input")) if part)
    if not asked or record["output"] is None:
        empty = "'output' is null" if asked else "'instruction' and 'input' are empty"
        raise DataError(f"{where}: {empty}. Correct or remove the record.")
    system, history = record.get("system"), _from_json(record.get("history")) or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        for turn in history
    ):
        raise DataError(
            f"{where}: 'history' is {str(history)[:60]!r}; expected pairs of an instruction and an answer. Correct or "
            "remove the record."
        )
    if not as_chat:
        if system or history or not is_empty(record.get("tools")):
            raise DataError(
                f"{where}: 'system', 'history' and 'tools' need a chat template, and the tokenizer has none. Name one "
                "with --chat_template_path, or remove them."
            )
        return {"prompt": asked + "\n", "completion": record["output"]}
    prompt = [{"role": "system", "content": system}] if system else []
    for question, answer in history:
        prompt += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    prompt.append({"role": "user", "content": asked})
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": record["output"]}]}
