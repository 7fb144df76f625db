"""Conversations -> token ids and labels, through a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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

logger = logging.get_logger(__name__)


_RESERVED = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "add_generation_prompt",
    "continue_final_message",
    "documents",
}
"""Names that chat_template_kwargs of a record cannot set: they are not variables of the template."""


class ChatEncoder(Encoder):
    """Conversations: messages, or prompt and completion as messages."""

    tokenizer: PreTrainedTokenizerBase
    runs = "chat template or tokenizer"

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

    def encode(self, batch: dict[str, list[Any]], indices: Sequence[int]) -> tuple[list, list | None]:
        input_ids, labels = [], []
        for row, index in enumerate(indices):
            ids, label = self._encode_one({column: values[row] for column, values in batch.items()}, index)
            input_ids.append(ids)
            labels.append(label)
        return input_ids, labels if self.masked else None

    def _encode_one(self, record: dict[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        chats = []
        for column in kind_columns(self.kind):
            chats.append(read_chat(record[column], column, name_record(index)))
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

    def _template_options(self, record: dict[str, Any], index: int) -> dict[str, Any]:
        tools = record.get("tools")
        try:
            tools = json.loads(tools) if isinstance(tools, str) else tools
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{name_record(index)}: 'tools' is not JSON ({error}): {str(tools)[:60]!r}. Correct or remove it."
            ) from None
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
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, **options)
            _check_tools(chat, options["tools"], text, index)
            template = str(options["chat_template"] or self.tokenizer.chat_template)
            _check_weights(chat, template, index)
            _check_roles(chat, template, text, index)
            if not assistant_mask:
                return self.tokenizer(text, add_special_tokens=False, verbose=False)
            out = self.tokenizer.apply_chat_template(
                chat,
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


def _check_tools(chat: list[dict[str, Any]], tools: Any, text: str, index: int) -> None:
    """Refuse a template without a place for tool calls, which a model would not learn then."""
    calls = [call for message in chat for call in message.get("tool_calls") or ()]
    if left_out := [name for name in map(_function_name, calls) if name not in text]:
        raise DataError(
            f"{name_record(index)}: the chat template leaves out the call of the tool {left_out[0]!r}. Use a template "
            "that writes tool_calls (--chat_template_path), or remove the record."
        )
    if any(name not in text for name in map(_function_name, tools if isinstance(tools, list) else ())):
        logger.warning_once("The chat template leaves out the tools that records offer: the model does not see them.")


def _check_weights(chat: list[dict[str, Any]], template: str, index: int) -> None:
    """Refuse messages with the weight 0 of OpenAI's format unless the template reads it, for its generation markers."""
    if "weight" not in template and any(message.get("weight") == 0 for message in chat):
        raise DataError(
            f"{name_record(index)}: a message has the weight 0, so it is not to be trained on, and the chat template "
            "does not read weights. Use a template that does and --assistant_only_loss, or remove the weight."
        )


_USUAL_ROLES = {"human": "user", "gpt": "assistant"}
"""The roles of ShareGPT's format, and what templates call them."""


def _check_roles(chat: list[dict[str, Any]], template: str, text: str, index: int) -> None:
    """Refuse roles of ShareGPT's that the template does not name, and messages that it leaves out.

    It may cut an answer's reasoning off and write a tool's result in another way, so these two are not looked for.
    """
    position = 0
    for message in chat:
        role, content = message.get("role"), message.get("content")
        if role in _USUAL_ROLES and role not in template:
            raise DataError(
                f"{name_record(index)}: the chat template does not know the role '{role}'. Call it "
                f"'{_USUAL_ROLES[role]}', or use a template that knows it (--chat_template_path)."
            )
        if role in ("assistant", "tool") or not isinstance(content, str):
            continue
        found = text.find(content.strip(), position)  # messages mostly follow each other, so that this is linear
        position = text.find(content.strip()) if found < 0 else found
        if position < 0:
            raise DataError(
                f"{name_record(index)}: the chat template leaves out a message of the role '{role}': "
                f"{content[:60]!r}. Use a template that writes it (--chat_template_path), or remove the message."
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
