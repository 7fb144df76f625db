"""What a chat template gives depends on the record alone, and on the time at which the run began."""

from __future__ import annotations

from datetime import datetime

import pytest
from datasets import Dataset

from longctx.data import load_records, stream_records, tokenize_records, tokenize_stream
from longctx.data.chat import ChatEncoder
from longctx.data.kinds import PAIRS
from longctx.data.tokenize import encoder_key
from longctx.model.tiny import tiny_tokenizer
from tests.data.test_data import _error
from tests.jsonl import write_lines

pytestmark = pytest.mark.usefixtures("own_cache")

ASKED, ANSWERED = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
CHATS = [{"messages": ASKED + ANSWERED}] * 40
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHANCE = "{{ range(10**5) | random }}" * 2
MARKED = "{% generation %}" + PLAIN + "{% endgeneration %}"
BY_CHANCE = {
    "messages": (CHATS, CHANCE + PLAIN, {}),
    "tools, in a later record": (
        [*CHATS, {"messages": ASKED, "tools": [TOOL]}],
        "{% if tools %}" + CHANCE + "f{% endif %}" + PLAIN,
        {},
    ),
    "prompt": (
        [{"prompt": ASKED, "completion": ANSWERED}],
        PLAIN + "{% if add_generation_prompt %}" + CHANCE + "{% endif %}",
        {},
    ),
    "pairs": ([{"prompt": ASKED, "chosen": ANSWERED, "rejected": ASKED}], CHANCE + PLAIN, {"text_field": PAIRS}),
    "the assistant's tokens, of the same text": (
        CHATS,
        "{% if [true, false] | random %}" + PLAIN + MARKED + "{% else %}" + MARKED + PLAIN + "{% endif %}",
        {"assistant_only_loss": True},
    ),
}


@pytest.mark.parametrize("name", BY_CHANCE)
def test_a_template_that_leaves_something_to_chance_is_refused(name, tmp_path, tokenizer) -> None:
    """The first records of a stream are rendered before it is read."""
    records, template, options = BY_CHANCE[name]
    path, options = write_lines(tmp_path / "records.jsonl", records), options | {"chat_template": template}
    where = {"text_field": options["text_field"]} if "text_field" in options else {}

    def stream():
        documents = tokenize_stream(stream_records(path, **where), tokenizer, **options)
        return list(documents) if "later" in name else documents

    words = "the chat template gives something else each time it is applied"
    assert words in _error(tokenize_records, load_records(path, **where), tokenizer, **options)
    assert words in _error(stream)


DATE = "{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }}"  # Llama 3.2's
CLOCKS = {
    DATE: "31 Dec 2026",
    """{{ strftime_now('%d %b') }}{{ strftime_now( "%Y" ) }}""": "31 Dec2026",
    "{% set f = '%H:%M' %}{{ strftime_now(f) }}": "23:59",
}
MOMENT = datetime(2026, 12, 31, 23, 59, 58)


def _key(template, moment):
    encoder = ChatEncoder(tiny_tokenizer(), "messages", template, False, False)
    encoder.tell_time(moment)
    return encoder_key(encoder)


@pytest.mark.parametrize("template", CLOCKS)
def test_a_template_is_told_when_the_run_began(template, tokenizer) -> None:
    """Runs of one day share their tokens if the template writes the date alone."""
    records = Dataset.from_list([{"messages": ASKED}])
    documents = tokenize_records(records, tokenizer, chat_template=template + PLAIN, now=MOMENT)
    assert tokenizer.decode(documents[0]["input_ids"]) == CLOCKS[template] + "a"
    assert _key(template, MOMENT) != _key(template, datetime(2027, 1, 1))
    assert (_key(template, MOMENT) == _key(template, MOMENT.replace(hour=1))) == (":" not in CLOCKS[template])


def test_a_template_that_does_not_ask_for_the_time_has_the_key_that_it_had() -> None:
    assert _key(PLAIN, MOMENT) == encoder_key(ChatEncoder(tiny_tokenizer(), "messages", PLAIN, False, False))
