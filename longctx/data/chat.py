"""Conversations -> token ids and labels, through a chat template."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from longctx.data.columns import IGNORE_INDEX
from longctx.data.encoders import Encoder, mask_prompt
from longctx.data.errors import DataError, name_record, say
from longctx.data.kinds import ALPACA, kind_columns
from longctx.data.messages import MASKS, alpaca_pair, check_text, is_empty, is_learnt, read_chat, without_nulls
from longctx.data.rendered import (
    check_calls,
    check_messages,
    check_within,
    left_out,
    shows_python,
    texts_of,
    with_marked_calls,
    with_text_arguments,
)
from longctx.data.token_ids import token_ids
from longctx.untrusted.confined import Bounds, OutOfBounds, confined
from longctx.upstream.transformers_internals import tell_templates_time

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

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


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
        self.structs: list[str] = []
        """Columns of Arrow structs. There, every record has the keys of all records, with null for its missing ones."""

    def tell_time(self, now: datetime) -> None:
        """Let the template take this for the present. What it can show of the time becomes part of the options."""
        given = self.chat_template or self.tokenizer.chat_template
        template = "".join(given.values()) if isinstance(given, dict) else str(given)
        if "strftime_now" in template:
            self.now, self.times = now, _times_shown(template, now)

    def encode(self, batch: dict[str, list[Any]], indices: Any) -> tuple[list, list | None]:
        if self.now is not None:
            tell_templates_time(self.now)
        input_ids, labels = [], []
        for row, index in enumerate(indices):
            try:
                ids, label = self._encode_one({column: values[row] for column, values in batch.items()}, index)
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
            input_ids.append(ids)
            labels.append(label)
        return input_ids, labels if self.masked else None

    def _encode_one(self, record: dict[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        where, columns = name_record(index), kind_columns(self.kind)
        options = self._template_options(record, index)
        if self.kind == ALPACA:
            record, columns = alpaca_pair(record, where, as_chat=True), ("prompt", "completion")
        chats = [self._read(record[column], column, index) for column in columns]
        if not is_empty(record.get("system")) and self.kind == "conversations":
            if chats[0][0]["role"] != "system":
                check_text(record["system"], "system", where)
                chats[0].insert(0, {"role": "system", "content": record["system"]})
            elif chats[0][0]["content"] != record["system"]:
                raise DataError(
                    f"{where}: 'system' is {str(record['system'])[:60]!r}, and the chat begins with another system "
                    "message. Keep one of them."
                )
        chat, text = self._write([message for part in chats for message in part], index, options)
        if self.gives_prompts:
            self.notes.clear()  # they are of the documents
            prompt = self._prompt(chat[: len(chats[0]) if len(chats) > 1 else _last_assistant(chat)], index, options)
            return prompt, prompt
        obeyed = self._masks_of_markers(options["chat_template"])
        not_learnt = [place for place, message in enumerate(chat) if not is_learnt(message, where, obeyed)]
        assert self.masked or not not_learnt, "documents of messages with masks have labels"
        derives = self.assistant_only and not _MARKERS.search(options["chat_template"])
        finds_turns, is_fast = derives or bool(not_learnt) or self.gives_turns, self.tokenizer.is_fast
        if finds_turns and not is_fast:
            raise DataError(
                f"{where}: the tokenizer is a slow one, which does not say where in the text its tokens stand, so that "
                "turns cannot be told apart. Use a fast one (tokenizer.json)."
            )
        thoughts = [match.span() for match in _EMPTY_THOUGHT.finditer(text)] if is_fast else []
        if not (finds_turns or thoughts):
            (ids,), offsets = token_ids(self.tokenizer, [text], add_special_tokens=False), np.zeros((0, 2), np.int64)
        else:
            out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids, offsets = np.asarray(out["input_ids"], np.int64), np.asarray(out["offset_mapping"]).reshape(-1, 2)
        end = cache(partial(self._end, chat, text=text, index=index, options=options))
        learnt = np.ones(len(ids), dtype=bool)
        if self.masks_prompt:
            learnt &= mask_prompt(ids, self._prompt(chat[: len(chats[0])], index, options)) != IGNORE_INDEX
        if derives:
            turns = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
            spans = [(end(place, prompted=True), end(place + 1)) for place in turns]
            learnt &= _within(spans, offsets)
        elif self.assistant_only:
            learnt &= self._marked(chat, index, options)
        spans = [(end(place), end(place + 1)) for place in not_learnt]
        for place, (start, stop) in zip(not_learnt, spans, strict=True):
            check_within(chat[place], text[start:stop], where)
        learnt &= ~_within(spans, offsets)
        said = (text for message in chat for text in texts_of(message["content"]))
        if thoughts and not any(map(_EMPTY_THOUGHT.search, said)):
            self.notes[
                "{n} tokens of empty <think></think> blocks, which the chat template writes before answers without "
                "reasoning, are trained on, as in TRL."
            ] += int((learnt & _within(thoughts, offsets)).sum())
        if self.gives_turns:
            ends = [*self._separable(chat, text, end), len(text)]
            self.turn_ends.append(np.searchsorted(offsets[:, 1], ends, side="right"))
        return ids, np.where(learnt, ids, IGNORE_INDEX)

    @staticmethod
    def _separable(chat: list[dict[str, Any]], text: str, end: Callable[[int], int]) -> Iterator[int]:
        """Yield the ends of turns, but for the last, after which the text of all messages before is whole."""
        start = 0
        for stop in range(1, len(chat)):
            with suppress(DataError):  # with the next turn, it is one
                check_within(chat[stop - 1], text[start : end(stop)], "")
                start = end(stop)
                yield start

    def _read(self, value: object, column: str, index: int) -> list[dict[str, Any]]:
        return read_chat(value, column, name_record(index), is_struct=column in self.structs)

    def _template_options(self, record: dict[str, Any], index: int) -> dict[str, Any]:
        tools, keywords = (
            without_nulls(record.get(column)) if column in self.structs else record.get(column)
            for column in ("tools", "chat_template_kwargs")
        )
        try:
            tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{name_record(index)}: 'tools' is not JSON ({error}): {str(tools)[:60]!r}. Correct or remove it."
            ) from None
        keywords = keywords or {}
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
        template = self.tokenizer.get_chat_template(self.chat_template, tools or None)  # of several, that for tools
        return {"chat_template": template, "tools": tools or None, **keywords}

    def _write(self, chat: list[dict[str, Any]], index: int, options: dict[str, Any]) -> tuple[list[dict], str]:
        """Return a conversation as the template takes its calls, and its text, of which nothing is missing unsaid."""
        marked, calls = with_marked_calls(chat)
        if calls:
            try:
                shown = self._apply(marked, options)
            except (TypeError, AttributeError, TemplateError):  # it takes arguments for a text
                shown = None
            if shown is None or shows_python(calls, shown):
                chat = with_text_arguments(chat)
                shown = self._apply(with_text_arguments(marked), options)
            check_calls(calls, shown, name_record(index))
        text = self._render(chat, index, options)
        check_messages(chat, options["chat_template"], text, name_record(index))
        self.notes += left_out(chat, options["tools"], options["chat_template"], text)
        return chat, text

    def _prompt(self, chat: list[dict[str, Any]], index: int, options: dict[str, Any]) -> np.ndarray:
        """Return the tokens after which the model answers these messages."""
        asked = self._render(chat, index, options | {"add_generation_prompt": True})
        return token_ids(self.tokenizer, [asked], add_special_tokens=False)[0]

    def _render(self, chat: list[dict[str, Any]], index: int, options: dict[str, Any]) -> str:
        """Apply the chat template. Some records are rendered twice: the text may depend on them alone."""
        rendered = self._apply(chat, options)
        self._check_again(rendered, index, lambda: self._apply(chat, options))
        return rendered

    def _apply(self, chat: list[dict[str, Any]], options: dict[str, Any]) -> str:
        return self.tokenizer.apply_chat_template(chat, tokenize=False, **options)  # type: ignore[return-value]

    def _check_again(self, rendered: Any, index: int, render: Any) -> None:
        if (index < FIRST_RECORDS or index % FIRST_RECORDS == 0) and render() != rendered:
            raise DataError(
                f"{name_record(index)}: the chat template gives something else each time it is applied, so that ranks, "
                "or a resumed run, would train on different data. Use a template (--chat_template_path) that leaves "
                "nothing to chance: without the filter 'random', for example."
            )

    def _marked(self, chat: list[dict[str, Any]], index: int, options: dict[str, Any]) -> NDArray[np.bool_]:
        """Return which tokens stand between the template's generation markers, [tokens]."""

        def mask() -> list[int]:
            out = self.tokenizer.apply_chat_template(
                chat,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
                **options,
            )
            return out["assistant_masks"]  # type: ignore[index, return-value]

        marked = mask()
        self._check_again(marked, index, mask)
        return np.asarray(marked, dtype=bool)

    def _masks_of_markers(self, template: str) -> list[str]:
        """Return the masks of messages that decide where the template writes its generation markers."""
        code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
        if not (self.assistant_only and _MARKERS.search(code)):
            return []
        return [name for name in MASKS if re.search(rf"\.{name}\b|['\"]{name}['\"]", code)]

    def _end(
        self,
        chat: list[dict[str, Any]],
        stop: int,
        text: str,
        index: int,
        options: dict[str, Any],
        *,
        prompted: bool = False,
    ) -> int:
        """Return where the text of the first messages ends, which that of the whole conversation must begin with.

        Args:
            stop: number of these messages.
            prompted: whether the generation prompt follows them, which the model does not write.

        Raises:
            DataError: for a template that writes a turn differently if others follow, or after another prompt.
        """
        if stop:
            before = self._apply(chat[:stop], options | {"add_generation_prompt": prompted})
        else:
            before = self._first_prompt(chat[:1], index, options) if prompted else ""
        if not text.startswith(before):
            same = next(at for at, character in enumerate(before) if text[at : at + 1] != character)
            raise DataError(
                f"{name_record(index)}: the chat template writes {before[same : same + 30]!r} where "
                f"{'an answer is asked for' if prompted else 'the chat ends'} after message {stop - 1} (counted from "
                f"0), and {text[same : same + 30]!r} in the whole chat, so that turns cannot be told apart. Put the "
                "assistant's turn, with its end-of-turn token, between {% generation %} and {% endgeneration %}, write "
                "each turn in the same way wherever it stands, and pass the template with --chat_template_path."
            )
        return len(before)

    def _first_prompt(self, answer: list[dict[str, Any]], index: int, options: dict[str, Any]) -> str:
        """Return the text before an answer with which a chat begins: it ends with the generation prompt."""
        text = self._apply(answer, options)
        prompt = self._apply(answer, dict(options, add_generation_prompt=True)).removeprefix(text)
        before, found, _ = text.partition(prompt) if prompt else ("", "", "")
        if not found:
            raise DataError(
                f"{name_record(index)}: the chat begins with an answer, which the chat template does not write after "
                "its generation prompt, so that its tokens cannot be told apart. Put a user's message before it, or "
                "remove it."
            )
        return before + found

    def warn_if_nothing_ends_a_turn(self) -> None:
        """Say if the model does not learn to stop: if no special token that is learnt ends the assistant's turn."""
        probe = copy(self)
        probe.kind, probe.masks_prompt, probe.gives_turns, probe.notes = "messages", False, False, Counter()
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "longctx_answer"}]

        def endings() -> tuple[bool, bool]:
            ids, labels = probe.encode({"messages": [chat]}, [FIRST_RECORDS + 1])
            text, added = self._apply(chat, {"chat_template": self.chat_template}), self.tokenizer.get_added_vocab()
            answered = text[: text.rindex("longctx_answer") + len("longctx_answer")]
            stop = len(token_ids(self.tokenizer, [answered], add_special_tokens=False)[0])
            ends = np.isin(ids[0][stop:], [*added.values(), self.tokenizer.eos_token_id])
            learnt = labels[0][stop:] != IGNORE_INDEX if labels else ends
            return bool(ends.any()), bool((ends & learnt).any())

        try:
            has_end, learns_it = confined(endings, Bounds.of_text(0))
        except OutOfBounds as error:
            raise DataError(
                f"the chat template cannot be rendered: {error}. Use another one (--chat_template_path)."
            ) from error
        except Exception:  # a template may reject this chat and no other
            return
        if not has_end:
            say(
                "No special token ends the assistant's turn in the chat template: the model may not learn to stop "
                "where a chat ends with an answer. Use a template that writes one (--chat_template_path)."
            )
        elif not learns_it:
            say(
                "The chat template leaves the assistant's end-of-turn token out of the loss: the model may not "
                "learn to stop. Move the token into {% generation %} … {% endgeneration %}, or use every token."
            )


def _last_assistant(chat: list[dict[str, Any]]) -> int:
    """Return the place of the assistant's last message; the end if there is none."""
    return max((place for place, message in enumerate(chat) if message["role"] == "assistant"), default=len(chat))


def _within(spans: list[tuple[int, int]], offsets: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return which tokens have a character in one of these spans, [tokens].

    Args:
        offsets: first character of each token, and the end, [tokens, 2].
    """
    inside = np.zeros(len(offsets), dtype=bool)
    for start, stop in spans:
        inside |= (offsets[:, 1] > start) & (offsets[:, 0] < stop)
    return inside if spans else np.zeros(1, dtype=bool)


def _times_shown(template: str, now: datetime) -> list[str]:
    """Return what a template writes of the time. If that is the date alone, runs of one day share their tokens."""
    formats = re.findall(r"strftime_now\(\s*(['\"])((?:(?!\1).)*)\1\s*\)", template)
    others = len(re.findall(r"strftime_now(?!\s+is\s+(?:not\s+)?defined)", template)) > len(formats)
    return [now.isoformat()] if others else [now.strftime(text) for _, text in formats]


def turns_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, needs_turns: bool) -> str | None:
    """Return the template to render with; None for the tokenizer's own.

    Where turns must be told apart and the template has no generation markers, that is TRL's training version of it, if
    TRL has one.
    """
    template = chat_template or tokenizer.chat_template
    if not template:
        raise DataError(
            "the tokenizer has no chat template, and the records are conversations. Use a chat model's "
            "tokenizer, or pass a template with --chat_template_path."
        )
    text = template.get("default", "") if isinstance(template, Mapping) else template
    if not needs_turns or _MARKERS.search(text):
        return chat_template
    from trl.chat_template_utils import get_training_chat_template

    given = tokenizer.chat_template
    try:
        tokenizer.chat_template = chat_template or given
        return get_training_chat_template(tokenizer)
    except (ValueError, KeyError):  # it knows none, or there is no default one among several
        return chat_template
    finally:
        tokenizer.chat_template = given
