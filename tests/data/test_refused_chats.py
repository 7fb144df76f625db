"""Chats that are refused because the rendered text would lose a part of their messages."""

from __future__ import annotations

import pytest
from datasets import Dataset

from longctx.data import tokenize_records
from tests.data.test_data import _tokenize_error

pytestmark = pytest.mark.usefixtures("own_cache")

TEXT_AND_IMAGE = [{"type": "text", "text": "ab", "image": None}, {"type": "image", "text": None, "image": "a.png"}]
OF_PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("part", "type_"),
    [
        (TEXT_AND_IMAGE[1], "image"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "input_audio"),
        ({"video": "a.mp4"}, "video"),
    ],
)
def test_messages_with_images_video_or_audio_are_refused(part, type_, tokenizer) -> None:
    """The template would write a placeholder without an image. Parts that are text are accepted."""
    chat = [{"messages": [{"role": "user", "content": [TEXT_AND_IMAGE[0], part]}]}]
    message = _tokenize_error(Dataset.from_list(chat), tokenizer, chat_template=OF_PARTS)
    assert f"record 0 (counted from 0): a message in 'messages' has a part of the type '{type_}'" in message
    alone = Dataset.from_list([{"messages": [{"role": "user", "content": TEXT_AND_IMAGE[1]}]}])
    assert "has a part of the type 'image'" in _tokenize_error(alone, tokenizer)
    beside = Dataset.from_list([{"messages": [{"role": "user", "content": "a", "images": ["a.png"]}]}])
    assert "a message in 'messages' has 'images'" in _tokenize_error(beside, tokenizer)
    text = [{"messages": [{"role": "user", "content": TEXT_AND_IMAGE[:1]}]}]
    tokenized = tokenize_records(Dataset.from_list(text), tokenizer, chat_template=OF_PARTS)
    assert tokenizer.decode(tokenized[0]["input_ids"]) == "ab"


OF_KNOWN_ROLES = (
    "{% for m in messages %}{% if m['role'] in ['user', 'assistant'] %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
)


def test_a_message_that_the_template_leaves_out_is_refused(tokenizer) -> None:
    """Answers and tools' results are exceptions: many templates cut off the reasoning of an answer."""

    def chat_with(role: str, content: str) -> Dataset:
        messages = [{"role": "user", "content": " ab "}, {"role": role, "content": content}]
        return Dataset.from_list([{"messages": [*messages, {"role": "user", "content": "a"}]}])

    message = _tokenize_error(chat_with("developer", "cd"), tokenizer, chat_template=OF_KNOWN_ROLES)
    assert "record 0 (counted from 0): the chat template leaves out a message of the role 'developer': 'cd'" in message
    for role in ("assistant", "tool"):
        tokenize_records(chat_with(role, "cd"), tokenizer, chat_template=OF_KNOWN_ROLES.replace(", 'assistant'", ""))


def test_parts_that_the_template_takes_for_a_string_are_refused(tokenizer) -> None:
    """Llama 3's template trims the content, which turns a list into its representation in Python."""
    chat = [
        {"role": role, "content": [{"type": "text", "text": text}]} for role, text in (("user", "a"), ("user", "b"))
    ]
    trims = "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}"
    message = _tokenize_error(Dataset.from_list([{"messages": chat}]), tokenizer, chat_template=trims)
    assert "does not know messages of several parts, and would write \"[{'type': 'text'" in message


def test_calls_have_no_arguments_of_other_calls(tokenizer) -> None:
    """In Arrow, every call has the arguments of all calls, with null for those that it was made without."""
    template = "{% for m in messages %}{{ (m['tool_calls'] or []) | tojson }}{{ m['content'] }}{% endfor %}"

    def chat(arguments: dict[str, object]) -> list[dict[str, object]]:
        return [{"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": arguments}]}]

    records = Dataset.from_list([{"messages": chat({"x": 1})}, {"messages": chat({"y": "b"})}])
    documents = tokenize_records(records, tokenizer, chat_template=template)
    texts = [tokenizer.decode(ids) for ids in documents["input_ids"][:]]
    assert ['"x": 1' in text for text in texts] == ['"y"' not in text for text in texts] == [True, False]
    assert not any("null" in text for text in texts)


@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
def test_a_call_that_the_template_leaves_out_is_refused(field, tokenizer) -> None:
    """The name of the tool also occurs in the question."""
    call = {"name": "get_weather", "arguments": "{}"}
    answer = {"role": "assistant", "content": "", field: call if field == "function_call" else [{"function": call}]}
    records = Dataset.from_list([{"messages": [{"role": "user", "content": "Use get_weather"}, answer]}])
    assert "leaves out the call of the tool 'get_weather'" in _tokenize_error(records, tokenizer)


def test_roles_of_other_formats_are_refused_unless_the_template_knows_them(tokenizer) -> None:
    """If a template renders any role, the model would be trained on role names that it never sees in use."""
    other = Dataset.from_list([{"messages": [{"role": "User", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    assert "does not know the role 'User'. Call it 'user'" in _tokenize_error(other, tokenizer)
    human = Dataset.from_list([{"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]}])
    assert "does not know the role 'human'. Call it 'user'" in _tokenize_error(human, tokenizer)
    knows = "{% for m in messages %}{{ {'human': 'H', 'gpt': 'G'}[m['role']] + m['content'] }}{% endfor %}"
    document = tokenize_records(human, tokenizer, chat_template=knows)[0]
    assert tokenizer.decode(document["input_ids"]) == "HaGb"
