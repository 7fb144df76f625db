"""Chats as nobody should write them: read as they are meant, or refused with the number of the record."""

from __future__ import annotations

import pytest
from datasets import Dataset
from tokenizers import normalizers
from transformers import CanineTokenizer

from longctx.data import DataError, load_records, tokenize_records
from longctx.data.tokenize import choose_encoder
from longctx.model.tiny import tiny_tokenizer
from longctx.untrusted import confined
from tests.data.chat_shapes import TOOLS, TURNS, assistant, calls, user
from tests.data.test_chats import CHATML, _said, _texts, _tokenizer, _with_bos_and_eos

pytestmark = pytest.mark.usefixtures("own_cache")

SHAREGPT = [{"from": "system", "value": "x y"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
NAMELESS = [{"function": {"arguments": {}}}]
REFUSED = [
    *(({"messages": [user("a"), assistant(value)]}, "'content' is") for value in (0, 1.5, False, {"text": "b"})),
    ({"messages": [user(3), assistant("b")]}, "'content' is int ('3'); expected a string"),
    ({"messages": [user("a"), assistant("b", reasoning_content=3)]}, "'reasoning_content' is int"),
    ({"messages": [user("a"), assistant("b", thinking=["c"])]}, "'thinking' is list"),
    ({"messages": [user("a"), assistant("b", tool_calls=NAMELESS)]}, "expected an object with a name and arguments"),
    ({"messages": [user("a"), assistant("b", tool_calls={"name": "f"})]}, "tool_calls"),
    ({"messages": [user("a"), {"role": "tool", "content": {"b": "c"}}]}, "does not know messages of several parts"),
    ({"conversations": SHAREGPT, "system": "other"}, "'system' is 'other', and the chat begins with another system"),
    ({"conversations": SHAREGPT[1:], "system": 7}, "'system' is int"),
]


@pytest.mark.parametrize(("record", "message"), REFUSED)
def test_values_of_other_types_are_refused(record, message) -> None:
    with pytest.raises(DataError, match=r"^record 0 ") as refused:
        _texts([record], "qwen2_5")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


CHAT = [user("a"), assistant("b")]
ALPACA = {"instruction": "a", "output": "b", "tools": TOOLS}


def called(arguments):
    return {"messages": [user("a"), assistant("", tool_calls=calls(arguments))]}


@pytest.mark.parametrize(
    ("template", "record", "expected"),
    [
        ("chatml", {"conversations": SHAREGPT, "system": "x y"}, {"conversations": SHAREGPT}),
        ("qwen2_5", ALPACA, {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": TOOLS}),
        *(("qwen2_5", called(none), called({})) for none in (None, "", "{}")),
        *(
            ("deepseekv3", {"messages": [CHAT[0], CHAT[1] | {"tool_calls": none}]}, {"messages": CHAT})
            for none in ("[]", "null")
        ),
    ],
)
def test_other_ways_to_say_the_same_give_the_same_tokens(template, record, expected) -> None:
    assert _texts([record], template) == _texts([expected], template)


def test_results_and_thoughts_that_a_template_leaves_out_are_said(caplog) -> None:
    parts = [{"type": "thinking", "thinking": "hidden"}, {"type": "text", "text": "b"}]
    said = _said([{"messages": [user("a"), assistant(parts)]}], caplog, "gemma3")
    assert "leaves out the text of 1 of the assistant's turns" in said
    chat = [user("a"), assistant("", tool_calls=calls({})), {"role": "tool", "content": '{"ü": "\n"}'}, assistant("b")]
    for template in ("qwen3", "gptoss", "llama3_1"):
        assert "results of tools" not in _said([{"messages": chat, "tools": TOOLS}], caplog, template)
    for content in ({"b": "hidden"}, [{"type": "text", "text": "hidden"}]):
        chat[2] = {"role": "tool", "content": content}
        assert "leaves out 1 of the results of tools" in _said([{"messages": chat}], caplog, "qwen3")


@pytest.mark.parametrize(
    ("template", "end"), [("chatml", "<|im_end|>\n"), ("llama3_1", "<|eot_id|>"), ("gemma4", "<turn|>\n")]
)
def test_a_chat_may_begin_with_an_answer(template, end) -> None:
    [[_, learnt]] = _texts([{"messages": TURNS[1:]}], template, assistant_only_loss=True)
    assert learnt == f"c d{end}f g{end}"


def test_an_answer_after_no_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="the chat begins with an answer, which the chat template does not write after"):
        _texts([{"messages": TURNS[1:]}], "mistral", assistant_only_loss=True)


def _learnt(tokenizer, record, **options) -> str:
    source, encoder = choose_encoder(Dataset.from_list([record], on_mixed_types="use_json"), tokenizer, **options)
    _, [labels], *_ = encoder.encode_noted(source[:], [0])
    return tokenizer.decode([token for token in labels if token != -100])


def test_of_several_templates_the_one_that_is_rendered_says_where_turns_are() -> None:
    """Transformers takes the template `tool_use` for records with tools."""
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    tokenizer = _tokenizer("chatml")
    for default, for_tools, learnt in (
        (CHATML, marked, ("c d<|im_end|>\n", "a bc d")),
        (marked, CHATML, ("a bc d", "c d<|im_end|>\n")),
    ):
        tokenizer.chat_template = {"default": default, "tool_use": for_tools}
        for tools, expected in zip(([], TOOLS), learnt, strict=True):
            record = {"messages": TURNS[:2], "tools": tools}
            assert _learnt(tokenizer, record, assistant_only_loss=True) == expected
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(DataError, match=r"^record 0 .* multiple chat templates with no default"):
        _learnt(tokenizer, {"messages": TURNS[:2]}, assistant_only_loss=True)


def test_turns_need_a_tokenizer_that_says_where_its_tokens_stand() -> None:
    tokenizer = CanineTokenizer(eos_token="\ue001")
    tokenizer.chat_template = CHATML.replace("m.content", "'<think></think>' + m.content")
    source, encoder = choose_encoder(Dataset.from_list([{"messages": TURNS[:2]}]), tokenizer)
    [ids], *_ = encoder.encode_noted(source[:], [0])
    assert len(ids) > len("a bc d")
    for record, options in (
        ({"messages": TURNS[:2]}, {"assistant_only_loss": True}),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0}]}, {}),
    ):
        with pytest.raises(DataError, match=r"^record 0 .*: the tokenizer is a slow one"):
            _learnt(tokenizer, record, **options)


@pytest.mark.parametrize("template", ["qwen2_5", "llama3_1", "gemma4", "glm4moe"])
def test_arguments_that_also_stand_in_a_question_are_written_as_they_are(template) -> None:
    call = {"type": "function", "function": {"name": "lift", "arguments": {"height": 3}}}
    chat = [user("before: {'height': 3}"), assistant("", tool_calls=[call]), assistant("b")]
    plain = [user("before"), *chat[1:]]
    [(text, _)], [(expected, _)] = (_texts([{"messages": each, "tools": TOOLS}], template) for each in (chat, plain))
    assert text.replace("before: {'height': 3}", "before") == expected


def test_a_template_that_leaves_out_arguments_is_refused() -> None:
    tokenizer = _tokenizer("chatml")
    tokenizer.chat_template = CHATML.replace("{{ call.function | tojson }}", "{{ call.function.name }}")
    _, encoder = choose_encoder(Dataset.from_list([{"messages": [user("a"), user("b")]}]), tokenizer)
    call = {"function": {"name": "lift", "arguments": {"height": 3}}}
    with pytest.raises(DataError, match="leaves out the arguments of the call of the tool 'lift'"):
        encoder.encode_noted({"messages": [[user("a"), assistant("", tool_calls=[call])]]}, [0])


def test_nulls_that_a_string_of_json_holds_stay(tmp_path) -> None:
    """In Arrow, an object has the keys of all others, with null for its missing ones; what is parsed has its own."""
    calls_as_text = [{"function": {"name": "lift", "arguments": '{"height": 3, "unit": null}'}}]
    records = [{"messages": [user("a"), assistant("", tool_calls=calls_as_text)]}]
    path = tmp_path / "a.parquet"
    Dataset.from_list(records).to_parquet(path)
    tokenizer = _tokenizer("chatml")
    text = tokenizer.decode(tokenize_records(load_records(str(path)), tokenizer)["input_ids"][0])
    assert '{"height": 3, "unit": null}' in text
    keywords = [{"x": 1, "date": None}, {"x": None, "date": "1 May"}]
    source = Dataset.from_list([{"messages": [user("a")], "chat_template_kwargs": words} for words in keywords])
    tokenizer.chat_template = "{{ messages[0].content }}{{ x is defined }}{{ date is defined }}"
    documents = tokenize_records(source, tokenizer)["input_ids"]
    assert [tokenizer.decode(ids) for ids in documents] == ["aTrueFalse", "aFalseTrue"]


@pytest.mark.parametrize("adds", [True, False])
def test_texts_of_a_tokenizer_whose_bos_is_its_eos(adds) -> None:
    eos = tiny_tokenizer().eos_token
    tokenizer = _with_bos_and_eos(adds, False, eos)
    texts = ["a", eos, "a" + eos * 2, eos * 2 + "a", ""]
    documents = tokenize_records(Dataset.from_dict({"text": texts}), tokenizer)["input_ids"]
    start = eos if adds else ""
    expected = [start + "a" + eos, eos, start + "a" + eos * 2, eos * 2 + "a" + eos, start + eos]
    assert [tokenizer.decode(ids) for ids in documents] == expected


def test_an_eos_token_that_explodes_comes_to_an_end(monkeypatch) -> None:
    monkeypatch.setattr(confined, "MEMORY_BYTES", 1 << 29)
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("b", "b" * 1000)] * 4)
    tokenizer._special_tokens_map["eos_token"] = "b"
    with pytest.raises(DataError, match=r"the tokenizer cannot encode its EOS token 'b': it (asked|ran) for more than"):
        tokenize_records(Dataset.from_dict({"text": ["a"]}), tokenizer)
