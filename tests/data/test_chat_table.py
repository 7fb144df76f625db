"""Chats of many shapes through many templates, beside TRL and LLaMA-Factory: the tables of docs/reference/chats.md.

`python -m tests.data.test_chat_table` writes that page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest
from datasets import Dataset

from longctx.data import DataError
from longctx.data.chat import turns_template
from longctx.data.tokenize import choose_encoder
from tests.data.chat_shapes import MASKED_TURNS, SHAPES, TURNS_BY_HAND, Learnt, Shape, trl, trl_by_hand
from tests.data.test_chats import _tokenizer
from tests.few import few

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "chats.md"
START, END = "<!-- tables of tests.data.test_chat_table -->", "<!-- end of the tables -->"
TEMPLATES = {
    "llama3_1": "Llama 3.1",
    "llama3_2": "Llama 3.2",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "gptoss": "gpt-oss",
    "mistral": "Mistral",
    "phi3": "Phi-3",
    "glm4moe": "GLM-4.5",
    "deepseekv3": "DeepSeek-V3",
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_5_think": "Qwen3.5",
    "nemotron_3_nano": "Nemotron 3",
}
LOSSES: dict[str, dict[str, bool]] = {
    "default": {},
    "all": {"completion_only_loss": False},
    "assistant": {"assistant_only_loss": True},
}
"""Options, by the loss: on all tokens of a chat and on completions, on all tokens, and on the assistant's turns."""

REASONS = {
    r"leaves out a message of the role .*: '(.*?)'\.": "The template leaves a message out, and TRL trains without it.",
    "leaves out the call of the tool ()": "The template leaves a call of a tool out, and TRL trains without it.",
    r"does not know messages of several parts, and would write \"(.*?)\" into": (
        "The template writes the parts into the text as Python shows them, and TRL trains on that."
    ),
    "cannot be told apart()": (
        "The template writes a turn in another way once others follow, so that the turn that the mask names cannot be "
        "found in the text. TRL ignores the mask."
    ),
}
"""Why a chat that TRL trains on is refused: the message of longctx, with what TRL loses or shows, and the reason."""


def _attempt(make: Callable[..., Learnt], *args: Any) -> Learnt | Exception:
    try:
        return make(*args)
    except AssertionError:
        raise
    except Exception as error:  # templates, and TRL, raise what they like
        return error


def _ours(record: dict[str, Any], tokenizer: Any, loss: str) -> Learnt:
    source, encoder = choose_encoder(Dataset.from_list([record], on_mixed_types="use_json"), tokenizer, **LOSSES[loss])
    [ids], labels, *_ = encoder.encode_noted(source[:], [0])
    return ids.tolist(), (labels[0] if labels else ids).tolist()


def outcome(shape: Shape, template: str) -> str:
    """Return the word for a cell of the table, after a comparison of the tokens and labels with every loss."""
    tokenizer, words = _tokenizer(template), set()
    for loss in LOSSES:
        if loss == "all" and "prompt" not in (shape.meant or shape.record):
            continue
        found = _attempt(_ours, shape.record, tokenizer, loss)
        expected = _attempt(trl_by_hand, shape, template, tokenizer, loss)
        as_it_is = _attempt(trl, shape.record, template, tokenizer, loss)
        if isinstance(found, DataError):
            words.add("rejected" if isinstance(expected, Exception) else _reason(found, as_it_is, tokenizer))
        else:
            assert not isinstance(found, Exception), found
            words.add("different" if found != expected else "equal" if found == as_it_is else "mended")
    return "mended" if words == {"equal", "mended"} else " / ".join(sorted(words))


def _reason(error: DataError, trained: Learnt | Exception, tokenizer: Any) -> str:
    assert str(error).startswith("record 0 (counted from 0): ")
    for number, pattern in enumerate(REASONS, 1):
        if (match := re.search(pattern, str(error))) is None:
            continue
        if not isinstance(trained, Exception):
            text = tokenizer.decode(trained[0])
            shows = "several parts" in pattern
            assert not match[1] or (match[1] in text) == shows, (error, text)
            assert "call" not in pattern or not ("307" in text and "408" in text), text
        return f"refused ({number})"
    raise AssertionError(f"no reason is given for: {error}")


def _turns(template: str) -> str:
    """Return where the assistant's turns of a template are taken from, in words."""
    tokenizer = _tokenizer(template)
    if turns_template(tokenizer, None, needs_turns=True) is not None:
        return "TRL's training template"
    return "the template's markers" if re.search(r"\{%-?\s*generation", tokenizer.chat_template) else "derived"


def page() -> str:
    """Return the page of the documentation."""
    table = {shape.name: {template: outcome(shape, template) for template in TEMPLATES} for shape in SHAPES}
    words = [word.partition(" (")[0] for row in table.values() for cell in row.values() for word in cell.split(" / ")]
    counts = {word: words.count(word) for word in ("equal", "mended", "rejected", "refused", "different")}
    text = f"""\
# Chats in public data sets

{START}

longctx is compared with TRL and LLaMA-Factory on {len(SHAPES)} shapes of chats and {len(TEMPLATES)} chat templates.
`python -m tests.data.test_chat_table` compares all tokens and labels, with and without `--assistant_only_loss`, and
writes this page.

## Where the assistant's turns come from

[Bring your data](../howto/data.md#which-turns-are-trained-on) explains the ways to find a turn. TRL cannot mask the
templates whose turns longctx derives, so for these the expected mask is written by hand.

| template | turns | turns with masks of their own |
| --- | --- | --- |
{_lines([name, _turns(template), _found(table["`weight`"][template])] for template, name in TEMPLATES.items())}

## Shapes and templates

- **equal** ({counts["equal"]} cells): the tokens and labels are TRL's. Reasoning that the template leaves out is left
  out here too, and longctx says so.
- **mended** ({counts["mended"]}): TRL rejects the record as it stands, or trains on something else than it says. The
  tokens and labels are those that TRL gives once the record is rewritten by hand, or converted by the rules of
  LLaMA-Factory.
- **rejected** ({counts["rejected"]}): the template rejects such chats, in TRL as well.
- **refused** ({counts["refused"]}): TRL trains, but not on what the record says. The reasons follow the table.
- **different** ({counts["different"]}): the tokens or labels are neither TRL's nor LLaMA-Factory's.

A cell with two words counts for both: the first holds under `--assistant_only_loss`, the second without it.

{_lines([["shape", *TEMPLATES.values()], ["---"] * (1 + len(TEMPLATES))])}
{_lines([name, *row.values()] for name, row in table.items())}

Reasons for refusals:

"""
    reasons = [f"{number}. {reason}" for number, reason in enumerate(REASONS.values(), 1)]
    return text + "\n".join(fill(reason, 120, subsequent_indent="   ") for reason in reasons) + f"\n\n{END}\n"


def _lines(rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _found(word: str) -> str:
    return word.replace("equal", "found").replace("mended", "found")


def _rows(first: str) -> list[list[str]]:
    """Return the cells of the page's table whose first column has this name."""
    table = PAGE.read_text(encoding="utf-8").partition(f"| {first} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.long
@pytest.mark.parametrize("template", few(TEMPLATES, ["llama3_2"]))
def test_tokens_and_masks_of_chats_are_those_of_the_page(template) -> None:
    place = list(TEMPLATES).index(template)
    expected = {row[0]: row[1 + place] for row in _rows("shape")}
    assert {shape.name: outcome(shape, template) for shape in SHAPES} == expected
    assert _rows("template")[place] == [TEMPLATES[template], _turns(template), _found(expected["`weight`"])]


def test_no_cell_differs_and_each_refusal_has_its_reason() -> None:
    cells = {
        (row[0], template): word for row in _rows("shape") for template, word in zip(TEMPLATES, row[1:], strict=True)
    }
    assert len(cells) == len(SHAPES) * len(TEMPLATES) >= 25 * 12
    assert not [key for key, word in cells.items() if "different" in word]
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for word in ("equal", "mended", "rejected", "refused", "different"):
        assert f"**{word}** ({sum(word in cell for cell in cells.values())}" in text
    assert all(f"{number}. {reason}" in text for number, reason in enumerate(REASONS.values(), 1))
    assert TURNS_BY_HAND.keys() < MASKED_TURNS.keys() == TEMPLATES.keys()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
