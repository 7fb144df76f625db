"""Chats as they lie on the hub: all forms of the same chat give the same tokens, and what a template loses is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trl
from datasets import Dataset

from longctx.data import load_records, stream_records, tokenize_records, tokenize_stream
from longctx.data.encoders import in_words
from longctx.data.errors import say
from longctx.data.tokenize import choose_encoder
from longctx.model.tiny import tiny_tokenizer
from tests.data.chat_shapes import TOOL
from tests.data.test_data import _tokenize_error
from tests.few import few
from tests.jsonl import write_lines

pytestmark = pytest.mark.usefixtures("own_cache")

FOLDER = Path(trl.__file__).parent / "chat_templates"
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
ASKED, ANSWERED = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}
CALL = {"type": "function", "function": {"name": "lift", "arguments": {"height": 3}}}
TOOL_CHAT = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "lift", "content": "ok"},
    ANSWERED,
]

CHATS = {
    "turns": {"messages": [ASKED, ANSWERED, {"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]},
    "tools": {"messages": TOOL_CHAT, "tools": [TOOL]},
    "thoughts": {"messages": [ASKED, ANSWERED | {"reasoning_content": "r s"}]},
}
OPEN, END = "<|im_start|>", "<|im_end|>\n"


def _template(name: str) -> str:
    return {"chatml": CHATML, "mistral": MISTRAL}.get(name) or (FOLDER / f"{name}.jinja").read_text()


def _tokenizer(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = _template(template)
    tokenizer._special_tokens_map["bos_token"] = tokenizer.eos_token  # as those of these models have one
    return tokenizer


def _texts(records, template: str, **options) -> list[tuple[str, str]]:
    """Return the text of each record, and the part of it that is learnt."""
    tokenizer = _tokenizer(template)
    source, encoder = choose_encoder(Dataset.from_list(records, on_mixed_types="use_json"), tokenizer, **options)
    input_ids, labels, notes, _ = encoder.encode_noted(source[:], range(len(source)))
    for note in in_words(notes):
        say(note)
    return [
        (tokenizer.decode(ids), tokenizer.decode([token for token in row if token != -100]))
        for ids, row in zip(input_ids, labels or input_ids, strict=True)
    ]


def _said(records, caplog, template: str = "chatml", **options) -> str:
    caplog.clear()
    _texts(records, template, **options)
    return caplog.text


# ----------------------------------------------------------------------------------------------------
# The same chat in other forms
# ----------------------------------------------------------------------------------------------------

_EMPTY = {"tool_calls": [], "function_call": None, "name": None, "reasoning_content": "", "weight": None}
EMPTY_FIELDS = [
    {"messages": [ASKED, ANSWERED | {"tool_calls": []}]},
    {"messages": [ASKED, ANSWERED | {"tool_calls": None}]},
    {"messages": [ASKED | _EMPTY, ANSWERED | _EMPTY], "tools": [], "chat_template_kwargs": None},
    {"messages": [ASKED, ANSWERED], "tools": None, "chat_template_kwargs": {}},
]
TEMPLATES = ["deepseekv3", "llama3_2", "gptoss", "qwen2_5", "qwen3", "gemma4", "chatml"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_empty_fields_mean_the_same_as_absent_ones(template, tmp_path) -> None:
    """DeepSeek-V3's template trains an empty call for an empty list; Llama 3.2's and gpt-oss's refuse it.

    In Arrow, every message has the keys of all messages.
    """
    [expected] = _texts([{"messages": [ASKED, ANSWERED]}], template)
    assert _texts(EMPTY_FIELDS, template) == [expected] * 4
    mixed = [{"messages": [ASKED, ANSWERED], "tools": None}, {"messages": TOOL_CHAT, "tools": [TOOL]}]
    tokenizer = _tokenizer(template)
    path = tmp_path / "a.parquet"
    Dataset.from_list(mixed).to_parquet(path)
    from_arrow, from_json = (
        tokenize_records(load_records(str(source)), tokenizer)["input_ids"][:]
        for source in (path, write_lines(tmp_path / "a.jsonl", mixed))
    )
    assert from_arrow == from_json
    assert tokenizer.decode(from_json[0]) == expected[0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_arguments_as_a_string_of_json_are_parsed_once(template) -> None:
    as_text = [dict(message) for message in TOOL_CHAT]
    as_text[1] = as_text[1] | {"tool_calls": [CALL | {"function": {"name": "lift", "arguments": '{"height": 3}'}}]}
    without_content = [dict(message) for message in TOOL_CHAT]
    without_content[1] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    forms = [{"messages": chat, "tools": [TOOL]} for chat in (TOOL_CHAT, as_text, without_content)]
    found = _texts(forms, template)
    assert found[0] == found[1] == found[2]
    assert '\\"' not in found[0][0]
    assert "{'" not in found[0][0].replace("{'type'", "")


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "1 +"}}
    [(text, _)] = _texts([{"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}], "chatml")
    assert '{"name": "f", "arguments": "1 +"}' in text


SHAREGPT = [
    {"from": "system", "value": "x y"},
    {"from": "human", "value": "a b"},
    {"from": "function_call", "value": '{"name": "lift", "arguments": {"height": 3}}'},
    {"from": "observation", "value": "ok"},
    {"from": "gpt", "value": "c d"},
]
AS_MESSAGES = [
    {"role": "system", "content": "x y"},
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "ok"},
    ANSWERED,
]


@pytest.mark.parametrize("template", few(["qwen2_5", "chatml", "qwen3"], 1))
@pytest.mark.parametrize("options", [{}, {"assistant_only_loss": True}])
def test_sharegpt_equals_the_same_chat_in_messages(template, options) -> None:
    for records in (
        [{"conversations": SHAREGPT, "tools": json.dumps([TOOL])}],
        [{"conversations": SHAREGPT[1:], "system": "x y", "tools": [TOOL]}],
    ):
        expected = _texts([{"messages": AS_MESSAGES, "tools": [TOOL]}], template, **options)
        assert _texts(records, template, **options) == expected
    other = [{"from": "user", "value": "a b"}, {"from": "assistant", "value": "c d"}]
    assert _texts([{"conversations": other}], template) == _texts([{"messages": [ASKED, ANSWERED]}], template)


def test_unknown_roles_of_sharegpt_are_refused_with_their_place(tmp_path) -> None:
    lines = [{"conversations": [{"from": name, "value": "a"}]} for name in ("human", "narrator")]
    path = write_lines(tmp_path / "a.jsonl", lines)
    message = _tokenize_error(load_records(path), tiny_tokenizer())
    assert "a message in 'conversations' is from 'narrator'; expected one of human, user, gpt" in message
    call = [{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "lift(3)"}]}]
    assert "is a function_call with the value 'lift(3)'" in _tokenize_error(Dataset.from_list(call), tiny_tokenizer())


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}


def test_alpaca_equals_the_conversational_prompt_and_completion() -> None:
    asked, answer = {"role": "user", "content": "Add.\n1 2"}, [{"role": "assistant", "content": "3"}]
    assert _texts([ALPACA], "qwen2_5") == _texts([{"prompt": [asked], "completion": answer}], "qwen2_5")
    before = [["q", "r"], ["s", "t"]]
    turns = [
        {"role": role, "content": text}
        for pair in before
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    system = [{"role": "system", "content": "be"}]
    records = [ALPACA | {"system": "be", "history": before, "input": ""}]
    expected = [{"prompt": [*system, *turns, asked | {"content": "Add."}], "completion": answer}]
    for options in ({}, {"completion_only_loss": False}, {"assistant_only_loss": True}):
        assert _texts(records, "qwen2_5", **options) == _texts(expected, "qwen2_5", **options)


def test_alpaca_is_text_where_there_is_no_template(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    source = load_records(write_lines(tmp_path / "a.jsonl", [ALPACA]))
    document = tokenize_records(source, tokenizer)[0]
    assert tokenizer.decode(document["input_ids"]) == "Add.\n1 2\n3<|endoftext|>"
    assert tokenizer.decode([t for t in document["labels"] if t != -100]) == "3<|endoftext|>"
    stream = tokenize_stream(stream_records(str(tmp_path / "a.jsonl")), tokenizer)
    assert [row["input_ids"].tolist() for row in stream] == [document["input_ids"]]
    history = Dataset.from_list([ALPACA | {"history": [["a", "b"]]}])
    assert "'system', 'history' and 'tools' need a chat template" in _tokenize_error(history, tokenizer)
    nothing = Dataset.from_list([{"instruction": "", "input": None, "output": "3"}])
    assert "'instruction' and 'input' are empty" in _tokenize_error(nothing, tokenizer)
    wrong = Dataset.from_list([ALPACA | {"history": ["a"]}])
    assert "expected pairs of an instruction and an answer" in _tokenize_error(wrong, tiny_tokenizer())


# ----------------------------------------------------------------------------------------------------
# What is said
# ----------------------------------------------------------------------------------------------------


def test_reasoning_and_text_that_a_template_leaves_out_is_said(caplog) -> None:
    thoughts = [{"messages": [ASKED, ANSWERED | {key: "because"}]} for key in ("reasoning_content", "thinking")]
    assert "leaves out the reasoning of 2 of the assistant's turns" in _said(thoughts, caplog)
    assert "reasoning" not in _said(thoughts[:1], caplog, "qwen3")
    inline = [ASKED, ANSWERED | {"content": "<think>because</think>c"}, *CHATS["turns"]["messages"][2:]]
    assert "leaves out the reasoning of 1 of the assistant's turns" in _said([{"messages": inline}], caplog, "qwen3")
    beside = [dict(message) for message in TOOL_CHAT]
    beside[1]["content"] = "I lift it"
    said = _said([{"messages": beside, "tools": [TOOL]}], caplog, "llama3_2")
    assert "leaves out the text of 1 of the assistant's turns" in said


def test_keys_and_columns_that_nothing_reads_are_named(caplog, tmp_path) -> None:
    """Keys each time, also when the tokens come from the cache."""
    record = {"messages": [ASKED | {"id": 3}, ANSWERED | {"id": 4, "weight": 1}], "source": "x", "tags": ["y"]}
    path = write_lines(tmp_path / "a.jsonl", [record])
    load_records(path)
    assert "Columns of the records that are not read (2): source, tags" in caplog.text
    for _ in range(2):
        caplog.clear()
        documents = tokenize_records(load_records(path), _tokenizer("chatml"))
        assert "does not read the key 'id' of messages; 2 of them have it" in caplog.text
        assert "weight" not in caplog.text
        assert "notes" not in documents.column_names
    said = _said([{"messages": [ASKED, ANSWERED], "source": "x", "lang": "en"}], caplog)
    assert "Columns of the records that are not read (2): lang, source" in said


def test_empty_thoughts_are_learnt_and_said(caplog) -> None:
    record = {"messages": [ASKED, ANSWERED]}
    length = len("<think>\n\n</think>\n\n")  # a token for each byte
    said = _said([record] * 3, caplog, "qwen3", assistant_only_loss=True)
    assert f"{3 * length} tokens of empty <think></think> blocks" in said
    [(_, learnt)] = _texts([record], "qwen3", assistant_only_loss=True)
    assert "<think>\n\n</think>\n\nc d" in learnt
    thought = [ASKED, ANSWERED | {"content": "<think>r</think>c d"}]  # its thought hides no empty one of another answer
    said = _said([{"messages": thought + record["messages"]}], caplog, "qwen3", assistant_only_loss=True)
    assert f"{length} tokens of empty <think></think> blocks" in said


def test_rows_of_which_nothing_is_learnt_are_kept_and_counted(caplog) -> None:
    records = [{"messages": [ASKED, ANSWERED]}, {"messages": [ASKED]}]
    tokenize_records(Dataset.from_list(records), _tokenizer("chatml"), assistant_only_loss=True)
    assert "No token is learnt of 1 of the documents" in caplog.text
    assert [learnt for _, learnt in _texts(records, "chatml", assistant_only_loss=True)] == [f"c d{END}", ""]


@pytest.mark.parametrize("template", ["glm4moe", "chatml", "llama3_1", "gptoss"])
def test_a_template_in_which_no_token_ends_a_turn_is_said(template, caplog) -> None:
    """GLM-4.5's leaves that to the next message; TRL's training version of it does not."""
    tokenizer = _tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>", "<|return|>", "<|end|>", "<|user|>"]})
    for options in ({}, {"assistant_only_loss": True}):
        caplog.clear()
        tokenize_records(Dataset.from_list([{"messages": [ASKED, ANSWERED]}]), tokenizer, **options)
        is_said = "No special token ends the assistant's turn in the chat template" in caplog.text
        assert is_said == (template == "glm4moe" and not options)


# ----------------------------------------------------------------------------------------------------
# BOS and EOS
# ----------------------------------------------------------------------------------------------------


def _with_bos_and_eos(bos: bool, eos: bool, token: str = "<s>"):
    """A tokenizer with this BOS token, which adds it or its EOS token to texts."""
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": token})
    ends = {token: tokenizer.bos_token_id, "<|endoftext|>": tokenizer.eos_token_id}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token if bos else ''} $A {'<|endoftext|>' if eos else ''}".strip(), special_tokens=[*ends.items()]
    )
    return tokenizer


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_texts_have_bos_and_eos_once(bos, eos, caplog) -> None:
    tokenizer = _with_bos_and_eos(bos, eos)
    texts = ["t5 t6", "<s>t5 t6", "t5 t6<|endoftext|>", "<s>t5 t6<|endoftext|>"]
    documents = tokenize_records(Dataset.from_dict({"text": texts}), tokenizer)["input_ids"][:]
    pairs = [{"prompt": "<s>q", "completion": "r<|endoftext|>"}, {"prompt": "q", "completion": "r"}]
    answers = tokenize_records(Dataset.from_list(pairs), tokenizer)
    first = "<s>" if bos else ""
    expected = [first + "t5 t6<|endoftext|>", "<s>t5 t6<|endoftext|>"] * 2
    assert [tokenizer.decode(ids) for ids in documents] == expected
    for row, start in zip(answers, ("<s>", first), strict=True):
        assert tokenizer.decode(row["input_ids"]) == f"{start}qr<|endoftext|>"
        assert tokenizer.decode([t for t in row["labels"] if t != -100]) == "r<|endoftext|>"
    assert ("The BOS token '<s>' already begins 2 of the texts" in caplog.text) == bos
    assert "The EOS token '<|endoftext|>' already ends 2 of the texts" in caplog.text


def test_an_eos_that_is_no_token_is_said(caplog) -> None:
    for eos in ("zz", "z"):
        tokenizer = tiny_tokenizer()
        tokenizer._special_tokens_map["eos_token"] = eos
        for records in ([{"text": "a"}], [{"messages": [ASKED, ANSWERED]}]):
            caplog.clear()
            tokenize_records(Dataset.from_list(records), tokenizer)
            assert f"The EOS token '{eos}' is no special token" in caplog.text
