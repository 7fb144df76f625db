"""Conversations -> token ids and labels, through a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from longctx.data.columns import IGNORE_INDEX
from longctx.data.encoders import Encoder, mask_prompt
from longctx.data.errors import DataError, name_record
from longctx.data.kinds import kind_columns, read_chat
from longctx.untrusted.confined import Bounds, OutOfBounds, confined
from longctx.upstream.transformers_internals import tell_templates_time

logger = logging.get_logger(__name__)


_RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "add_generation_prompt",
    "continue_final_message",
    "documents",
}
"""Names that chat_template_kwargs of a record cannot set: they are not variables of the template."""

FIRST_RECORDS = 8
"""The first eight records of a data set, and every eighth one after them, are rendered twice.

Of short chats, which take longest to render, rendering all of them twice would cost a third more time.
"""


class ChatEncoder(Encoder):
    """Conversations: messages, or prompt and completion as messages."""

    tokenizer: PreTrainedTokenizerBase
    runs = "chat template or tokenizer"
    now: datetime | None = None
    """What a template is told if it asks for the time; None if it does not ask."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kind: str,
        chat_template: str | None,
        assistant_only: bool,
        masks_prompt: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.kind = kind
        self.chat_template = chat_template
        self.assistant_only = assistant_only
        self.masks_prompt = masks_prompt
        self.masked = assistant_only or masks_prompt
        self.has_nulls_of_structs = False
        """Whether records come from Arrow structs. There, every record has the keys of all records, with null for its
        missing ones."""

    def tell_time(self, now: datetime) -> None:
        """Let the template take this for the present. What it can show of the time becomes part of the options."""
        template = str(self.chat_template or self.tokenizer.chat_template)
        if "strftime_now" in template:
            self.now, self.times = now, _times_shown(template, now)

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        if self.now is not None:
            tell_templates_time(self.now)
        input_ids, labels = [], []
        for row, index in enumerate(indices):
            ids, label = self._encode_one({column: values[row] for column, values in batch.items()}, index)
            input_ids.append(ids)
            labels.append(label)
        return input_ids, labels if self.masked else None

    def _encode_one(self, record: dict[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        chats = []
        for column in kind_columns(self.kind):
            chats.append(self._read(record[column], column, index))
        options = self._template_options(record, index)
        out = self._apply([message for chat in chats for message in chat], index, options, self.assistant_only)
        ids = np.asarray(out["input_ids"], dtype=np.int64)
        labels = ids
        if self.masks_prompt:
            prompt = self._apply(chats[0], index, {**options, "add_generation_prompt": True}, False)
            labels = mask_prompt(ids, np.asarray(prompt["input_ids"], dtype=np.int64))
        if self.assistant_only:
            mask = np.asarray(out["assistant_masks"], dtype=bool)
            if not mask.any():
                raise DataError(
                    f"{name_record(index)}: assistant_only_loss=True, but none of its {len(ids)} tokens are the "
                    "assistant's. Remove the record, or check the {% generation %} markers of the template."
                )
            labels = np.where(mask, labels, IGNORE_INDEX)
        return ids, labels

    def _read(self, value: object, column: str, index: int) -> list[dict[str, Any]]:
        """Return the messages of a chat, without the null arguments that Arrow adds to calls of tools."""
        chat = read_chat(value, column, name_record(index))
        if not self.has_nulls_of_structs:
            return chat
        calls = ("tool_calls", "function_call")
        return [m | {name: _without_nulls(m[name]) for name in calls if m.get(name) is not None} for m in chat]

    def _template_options(self, record: dict[str, Any], index: int) -> dict[str, Any]:
        tools = record.get("tools")
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{name_record(index)}: 'tools' is not JSON ({error}): {str(tools)[:60]!r}. Correct or remove it."
            ) from None
        if self.has_nulls_of_structs:
            tools = _without_nulls(tools)
        keywords = record.get("chat_template_kwargs") or {}
        if not isinstance(keywords, dict):
            raise DataError(
                f"{name_record(index)}: 'chat_template_kwargs' is {str(keywords)[:60]!r}; expected an object of names "
                "and values. Correct or remove it."
            )
        if reserved := sorted(keywords.keys() & _RESERVED):
            raise DataError(
                f"{name_record(index)}: 'chat_template_kwargs' sets {reserved[0]}, which would replace the template or "
                "cut tokens off. Leave only the variables of the template there."
            )
        return {"chat_template": self.chat_template, "tools": tools, **keywords}

    def _apply(self, chat: list, index: int, options: dict[str, Any], assistant_mask: bool) -> Mapping[str, Any]:
        """Render a conversation, and tokenise the text.

        The assistant's tokens are known to `apply_chat_template` alone, which renders once more for them.
        """
        from jinja2 import TemplateError

        try:
            text = self._render(chat, index, tokenize=False, **options)
            marked, calls = _with_marked_calls(chat)
            shown = self.tokenizer.apply_chat_template(marked, tokenize=False, **options) if calls else text
            _check_tools(calls, shown, options["tools"], text, index)
            template = str(options["chat_template"] or self.tokenizer.chat_template)
            _check_weights(chat, template if self.assistant_only else "", index)
            _check_roles(chat, template, text, index)
            if not assistant_mask:
                return self.tokenizer(text, add_special_tokens=False, verbose=False)
            out = self._render(
                chat,
                index,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=assistant_mask,
                tokenizer_kwargs={"verbose": False},
                **options,
            )
        except DataError:
            raise
        except (
            TemplateError,
            ArithmeticError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            RecursionError,
        ) as e:
            raise DataError(
                f"{name_record(index)}: the chat template rejects its messages ({e}). Correct or remove it."
            ) from e
        assert isinstance(out, Mapping), f"apply_chat_template(return_dict=True) gave {type(out).__name__}"
        return out

    def _render(self, chat: list, index: int, **options: Any) -> Any:
        """Apply the chat template. Some records are rendered twice: the text may depend on them alone."""
        render = partial(self.tokenizer.apply_chat_template, chat, **options)
        rendered = render()
        if (index < FIRST_RECORDS or index % FIRST_RECORDS == 0) and render() != rendered:
            raise DataError(
                f"{name_record(index)}: the chat template gives something else each time it is applied, so that ranks, "
                "or a resumed run, would train on different data. Use a template (--chat_template_path) that leaves "
                "nothing to chance: without the filter 'random', for example."
            )
        return rendered


def _times_shown(template: str, now: datetime) -> list[str]:
    """Return what a template writes of the time. If that is the date alone, runs of one day share their tokens."""
    formats = re.findall(r"strftime_now\(\s*(['\"])((?:(?!\1).)*)\1\s*\)", template)
    others = len(re.findall(r"strftime_now(?!\s+is\s+(?:not\s+)?defined)", template)) > len(formats)
    return [now.isoformat()] if others else [now.strftime(text) for _, text in formats]


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys that hold null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _with_marked_calls(chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a copy of the conversation in which every call has a unique name, and the tools' names by these names.

    Only unique names show that a call was rendered: a tool's own name can also occur in a question or in the list of
    tools.
    """
    names: dict[str, str] = {}

    def mark(call: Any) -> Any:
        if not (name := _function_name(call)):
            return call
        new = f"longctx_call_{len(names)}_"
        names[new] = name
        return call | {"function": call["function"] | {"name": new}} if call.get("function") else call | {"name": new}

    marked = []
    for message in chat:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [mark(call) for call in calls]
        if call := message.get("function_call"):
            message["function_call"] = mark(call)
        marked.append(message)
    return marked, names


def _check_tools(calls: dict[str, str], shown: str, tools: Any, text: str, index: int) -> None:
    """Refuse a template that leaves out tool calls, because the model would not learn them.

    Args:
        calls: the tools' names by the unique names of their calls, from `_with_marked_calls`.
        shown: the rendered text with the unique names.
    """
    if left_out := [name for mark, name in calls.items() if mark not in shown]:
        raise DataError(
            f"{name_record(index)}: the chat template leaves out the call of the tool {left_out[0]!r}. Use a template "
            "that writes tool_calls (--chat_template_path), or remove the record."
        )
    if any(name not in text for name in map(_function_name, tools if isinstance(tools, list) else ())):
        logger.warning_once("The chat template leaves out the tools that records offer: the model does not see them.")


_MARKS = ("weight", "loss", "train", "training")
"""Fields that say whether a message is trained on: OpenAI's, ms-swift's, and the usual names of axolotl's."""


def _check_weights(chat: list[dict[str, Any]], markers: str, index: int) -> None:
    """Refuse messages with a field that excludes them from training, unless the template reads the field.

    Args:
        markers: the template, whose generation markers decide what is trained on; empty if all tokens are.
    """
    markers = re.sub(r"\{#.*?#\}", "", markers, flags=re.DOTALL)
    for message in chat:
        for mark in _MARKS:
            value = message.get(mark)
            if value is None or value == 1 or (value == 0 and re.search(rf"\b{mark}\b", markers)):
                continue
            raise DataError(
                f"{name_record(index)}: a message has '{mark}': {value!r}, which would be ignored. To leave it out of "
                "the loss, use --assistant_only_loss and a template whose generation markers read the field. "
                "Otherwise remove the field."
            )


_USUAL_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_USUAL_ROLES |= {"function_call": "assistant", "observation": "tool"}
"""Roles of ShareGPT's and similar formats, in lower case, and the roles of templates that they stand for."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


def _check_roles(chat: list[dict[str, Any]], template: str, text: str, index: int) -> None:
    """Refuse roles of other formats that the template does not name, and messages that it does not render.

    Answers and tools' results are not searched for, because templates may cut off the reasoning of an answer and
    reformat a result.
    """
    position = 0
    for message in chat:
        role, content = message.get("role"), message.get("content")
        usual = None if role in _ROLES else _USUAL_ROLES.get(str(role).lower(), str(role).lower())
        if usual in _ROLES and str(role) not in template:
            raise DataError(
                f"{name_record(index)}: the chat template does not know the role '{role}'. Call it '{usual}', or use a "
                "template that knows it (--chat_template_path)."
            )
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        if parts and str(content) in text:
            raise DataError(
                f"{name_record(index)}: the chat template does not know messages of several parts, and would write "
                f"{str(content)[:60]!r} into the text. Write the content as a string, or use another template "
                "(--chat_template_path)."
            )
        said = content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""
        if role == "assistant" and message.get("tool_calls") and said not in text:
            logger.warning_once("The chat template leaves out the text of answers beside their tool calls.")
        if role in ("assistant", "tool"):
            continue
        texts = [content] if isinstance(content, str) else [part.get("text") for part in parts]
        for said in (written.strip() for written in texts if isinstance(written, str)):
            found = text.find(said, position)  # messages mostly follow each other, so that this is linear
            position = text.find(said) if found < 0 else found
            if position < 0:
                raise DataError(
                    f"{name_record(index)}: the chat template leaves out a message of the role '{role}': "
                    f"{said[:60]!r}. Use a template that writes it (--chat_template_path), or remove the message."
                )


def _function_name(tool: Any) -> str:
    function = tool.get("function") or tool if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def training_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, assistant_only: bool
) -> str | None:
    """Return the template to render with, with generation markers if needed; None for the tokenizer's own."""
    template = chat_template or tokenizer.chat_template
    if not template:
        raise DataError(
            "the tokenizer has no chat template, and the records are conversations. Use a chat model's "
            "tokenizer, or pass a template with --chat_template_path."
        )
    if not assistant_only:
        return chat_template
    text = template.get("default", "") if isinstance(template, dict) else template
    if re.search(r"\{%-?\s*generation\s*-?%\}", text) is None:
        chat_template = _known_training_template(tokenizer, chat_template)
    _warn_if_stop_token_is_masked(tokenizer, chat_template)
    return chat_template


def _known_training_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    """TRL's version, with generation markers, of a template that has none."""
    from trl.chat_template_utils import get_training_chat_template

    given = tokenizer.chat_template
    try:
        tokenizer.chat_template = chat_template or given
        template = get_training_chat_template(tokenizer)
        assert template is not None, "a template without markers needs patching"
        return template
    except ValueError:
        pass
    finally:
        tokenizer.chat_template = given
    raise DataError(
        "assistant_only_loss=True needs a chat template with {% generation %} markers; this one has none and "
        "TRL knows no training version of it. Put the assistant's turn (with its end-of-turn token) between "
        "{% generation %} and {% endgeneration %} and pass the template with --chat_template_path."
    )


def _warn_if_stop_token_is_masked(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    try:
        is_trained = confined(
            lambda: is_chat_template_stop_token_trained(tokenizer, chat_template=chat_template), Bounds.of_text(0)
        )
    except OutOfBounds as error:
        raise DataError(
            f"the chat template cannot be rendered: {error}. Use another one (--chat_template_path)."
        ) from error
    if not is_trained:
        logger.warning(
            "The chat template leaves the assistant's end-of-turn token out of the loss: the model may not "
            "learn to stop. Move the token into {% generation %} … {% endgeneration %}, or use every token."
        )
