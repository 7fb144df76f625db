"""Chats as they lie on the hub: all forms of the same chat give the same tokens, and what a template loses is said."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import jinja2
import pytest
import trl
from datasets import Dataset
from transformers.utils.chat_template_utils import render_jinja_template

from longctx.data import DataError, document_lengths, load_records, stream_records, tokenize_records, tokenize_stream
from longctx.data.chat import ChatEncoder
from longctx.data.encoders import in_words
from longctx.data.errors import say
from longctx.data.tokenize import choose_encoder
from longctx.model.tiny import tiny_tokenizer
from longctx.packing import PackedDataset, PackedStream, plan_packing
from tests.data.test_data import _tokenize_error, _write_lines

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
TOOL = {
    "type": "function",
    "function": {
        "name": "lift",
        "description": "raise",
        "parameters": {"type": "object", "properties": {"height": {"type": "integer", "description": "of it"}}},
    },
}
TOOL_CHAT = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "lift", "content": "ok"},
    ANSWERED,
]


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
        for source in (path, _write_lines(tmp_path / "a.jsonl", mixed))
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


@pytest.mark.parametrize("template", ["qwen2_5", "chatml", "qwen3"])
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
    path = _write_lines(tmp_path / "a.jsonl", lines)
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
    source = load_records(_write_lines(tmp_path / "a.jsonl", [ALPACA]))
    document = tokenize_records(source, tokenizer)[0]
    assert tokenizer.decode(document["input_ids"]) == "Add.\n1 2\n3<|endoftext|>"
    assert tokenizer.decode([t for t in document["labels"] if t != -100]) == "3<|endoftext|>"
    stream = tokenize_stream(stream_records(str(tmp_path / "a.jsonl")), tokenizer)
    assert [row["input_ids"].tolist() for row in stream] == [document["input_ids"]]
    history = Dataset.from_list([ALPACA | {"history": [["a", "b"]]}])
    assert "'system' and 'history' need a chat template" in _tokenize_error(history, tokenizer)
    nothing = Dataset.from_list([{"instruction": "", "input": None, "output": "3"}])
    assert "'instruction' and 'input' are empty" in _tokenize_error(nothing, tokenizer)
    wrong = Dataset.from_list([ALPACA | {"history": ["a"]}])
    assert "expected pairs of an instruction and an answer" in _tokenize_error(wrong, tiny_tokenizer())


# ----------------------------------------------------------------------------------------------------
# Masks of messages
# ----------------------------------------------------------------------------------------------------

MASKS = [
    ({"weight": 0}, {"weight": 1}),
    ({"loss_mask": 0}, {"loss_mask": 1}),
    ({"loss": False}, {"loss": True}),
    ({"train": False}, {"train": True}),
    ({"training": False}, {"training": True}),
    ({"trainable": False}, {"trainable": True}),
    ({"masked": True}, {"masked": False}),
]
OPEN, END = "<|im_start|>", "<|im_end|>\n"


def _masked(no: dict, yes: dict) -> list[dict]:
    return [ASKED | yes, ANSWERED | no, {"role": "user", "content": "h"}, {"role": "assistant", "content": "i"} | yes]


@pytest.mark.parametrize("masks", MASKS, ids=lambda masks: next(iter(masks[0])))
def test_masks_of_messages_only_remove_turns(masks, tmp_path) -> None:
    record = {"messages": _masked(*masks)}
    last = f"{OPEN}user\nh{END}{OPEN}assistant\ni{END}"
    [(text, learnt)] = _texts([record], "chatml")
    assert learnt == text.replace(f"{OPEN}assistant\nc d{END}", "")
    [(_, learnt)] = _texts([record], "chatml", assistant_only_loss=True)
    assert learnt == f"i{END}"
    split = {"prompt": record["messages"][:1], "completion": record["messages"][1:]}
    [(_, learnt)] = _texts([split], "chatml")
    assert learnt == last
    [(_, learnt)] = _texts([split], "chatml", completion_only_loss=False)
    assert learnt == f"{OPEN}user\na b{END}" + last
    tokenizer = _tokenizer("chatml")
    path = _write_lines(tmp_path / "a.jsonl", [record])
    (streamed,) = tokenize_stream(stream_records(path), tokenizer)
    assert streamed["labels"].tolist() == tokenize_records(load_records(path), tokenizer)["labels"][0]


def test_masks_of_templates_that_change_earlier_turns() -> None:
    """Of Qwen3's template, TRL's training version writes each turn in the same way."""
    [(text, learnt)] = _texts([{"messages": _masked({"weight": 0}, {"weight": 1})}], "qwen3")
    assert "c d" in text
    assert "c d" not in learnt
    assert "h<|im_end|>" in learnt


def test_generation_markers_that_read_a_mask_decide() -> None:
    reads = (
        "{% for m in messages %}{% if m['weight'] == 1 %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{# of another train #}"
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = reads
    answers = [{"role": "assistant", "content": text, "weight": weight} for text, weight in (("b", 0), ("c", 1))]
    asked = {"role": "user", "content": "a", "weight": 1}
    records = Dataset.from_list([{"messages": [asked, *answers]}])
    document = tokenize_records(records, tokenizer, assistant_only_loss=True)[0]
    assert [tokenizer.decode([t for t in row if t != -100]) for row in document.values()] == ["abc", "ac"]
    off = [message | {"train": message["weight"] == 0} for message in [asked, *answers]]
    both = Dataset.from_list([{"messages": off}, {"messages": [asked | {"content": "xy"}]}])
    document = tokenize_records(both, tokenizer, assistant_only_loss=True)[0]
    assert set(document["labels"]) == {-100}


@pytest.mark.parametrize("value", [0.5, 2, "no", "0", [0]])
def test_other_masks_are_refused(value) -> None:
    record = {"messages": [ASKED, ANSWERED | {"weight": value}]}
    message = _tokenize_error(Dataset.from_list([record]), _tokenizer("chatml"))
    assert f"record 0 (counted from 0): a message has 'weight': {value!r}; expected 0 or 1" in message


# ----------------------------------------------------------------------------------------------------
# The assistant's turns
# ----------------------------------------------------------------------------------------------------

CHATS = {
    "turns": {"messages": [ASKED, ANSWERED, {"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]},
    "tools": {"messages": TOOL_CHAT, "tools": [TOOL]},
    "thoughts": {"messages": [ASKED, ANSWERED | {"reasoning_content": "r s"}]},
}
LEARNT_OF_THE_PROMPT = {"qwen2_5": "\n", "gptoss": "<|start|>assistant", "muse_glimmer": "<|start|>assistant"}
LEARNT_OF_THE_PROMPT |= dict.fromkeys(("qwen3_5_think", "qwen3_6", "qwen3_8"), "<think>\n")
LEARNT_OF_THE_PROMPT |= {"qwen3_5_nothink": "<think>\n\n</think>\n\n"}
LEARNT_OF_THE_PROMPT |= dict.fromkeys(
    (f"nemotron_3_{name}" for name in ("nano", "super", "ultra", "5_lightning")), "<think>\n"
)
"""What TRL's markers have of the generation prompt, before each answer."""

UNDERIVED = {
    ("deepseek_r1_distill", "*"): "the generation prompt begins a thought, which answers do not have",
    ("deepseekv3", "*"): "the generation prompt begins a thought, which answers do not have",
    ("phi3", "turns"): "an EOS token follows the last turn alone",
    ("phi3_5", "turns"): "an EOS token follows the last turn alone",
    ("gptoss", "turns"): "the last turn ends with another token",
    ("qwen3_5_nothink", "thoughts"): "the generation prompt has an empty thought",
    ("nemotron_3_nano", "turns"): "the generation prompt begins a thought with a line break",
    ("nemotron_3_nano", "tools"): "the generation prompt begins a thought with a line break",
    ("nemotron_3_super", "turns"): "the generation prompt begins a thought with a line break",
    ("nemotron_3_super", "tools"): "the generation prompt begins a thought with a line break",
    ("nemotron_3_ultra", "turns"): "the generation prompt begins a thought with a line break",
    ("nemotron_3_ultra", "tools"): "the generation prompt begins a thought with a line break",
    ("nemotron_3_5_lightning", "turns"): "the generation prompt begins a thought with a line break",
    ("nemotron_3_5_lightning", "tools"): "the generation prompt begins a thought with a line break",
    ("diffusion_gemma", "tools"): "a tool's result begins the next turn, and there is no generation prompt",
}
"""Chats of templates for which no mask can be derived, or another one."""


def _marked(template: str, chat) -> list[str]:
    rendered, spans = render_jinja_template(
        [chat["messages"]],
        tools=chat.get("tools"),
        chat_template=template,
        return_assistant_tokens_mask=True,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    return [rendered[0][start:stop] for start, stop in spans[0]]


@pytest.mark.parametrize(
    "name", sorted(path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja"))
)
def test_derived_masks_equal_trls_markers(name, monkeypatch) -> None:
    """As if the template had no markers."""
    template, tokenizer = _template(f"{name}_training"), _tokenizer(f"{name}_training")
    monkeypatch.setattr("longctx.data.chat._MARKERS", re.compile("no template has this"))
    prompt = LEARNT_OF_THE_PROMPT.get(name, "")
    for kind, chat in CHATS.items():
        try:
            expected = _marked(template, chat)
        except (jinja2.TemplateError, TypeError):
            continue  # it has no place for tools, or wants parts
        encoder = ChatEncoder(tokenizer, "messages", template, assistant_only=True, masks_prompt=False)
        batch = {column: [value] for column, value in chat.items()}
        if {(name, kind), (name, "*")} & UNDERIVED.keys():
            with contextlib.suppress(DataError):
                _, [labels], *_ = encoder.encode_noted(batch, [0])
                assert tokenizer.decode([token for token in labels if token != -100]) != "".join(expected)
            continue
        try:
            _, [labels], *_ = encoder.encode_noted(batch, [0])
        except DataError as error:
            if "leaves out" in str(error):  # it has no place for calls, or for text that is no part
                continue
            raise
        learnt = tokenizer.decode([token for token in labels if token != -100])
        assert learnt == "".join(part.removeprefix(prompt) for part in expected), kind


@pytest.mark.parametrize("template", ["llama3_1", "llama3_2", "gemma4", "mistral", "chatml"])
def test_templates_without_markers_learn_the_assistants_turns(template) -> None:
    [(text, learnt)] = _texts([CHATS["turns"]], template, assistant_only_loss=True)
    end = {"llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>", "gemma4": "<turn|>\n", "chatml": END}
    end = end.get(template, "<|endoftext|>")
    assert learnt == f"c d{end}f{end}"
    assert text.count(learnt.partition(end)[0]) == 1


def test_a_template_that_changes_earlier_turns_is_refused_with_the_reason() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{# another one #}" + _template("phi3")
    source = Dataset.from_list([CHATS["turns"]])
    message = _tokenize_error(source, tokenizer, assistant_only_loss=True)
    assert "the chat template writes 'endoftext|>' where the chat ends after message 1 (counted from 0)" in message
    assert "pass the template with --chat_template_path" in message
    one = tokenize_records(Dataset.from_list([{"messages": [ASKED, ANSWERED]}]), tokenizer, assistant_only_loss=True)
    assert tokenizer.decode([t for t in one["labels"][0] if t != -100]).startswith("c d<|end|>")


@pytest.mark.parametrize("template", ["chatml", "qwen3", "llama3_1"])
def test_overlong_turns_keeps_whole_turns(template, tmp_path) -> None:
    tokenizer = _tokenizer(template)
    session = [*TOOL_CHAT, {"role": "user", "content": "and " * 20}, {"role": "assistant", "content": "done " * 30}]
    records = [{"messages": CHATS["turns"]["messages"], "tools": None}, {"messages": session, "tools": [TOOL]}]
    documents = tokenize_records(Dataset.from_list(records), tokenizer, gives_turns=True)
    ends = documents["turn_ends"][1]
    ids = documents["input_ids"][1]
    assert ends == sorted(set(ends))
    assert (ends[-1], len(ends)) == (len(ids), len(session))
    assert tokenizer.decode(ids[: ends[3]]).rstrip("\n").endswith(("c d<|im_end|>", "c d<|eot_id|>"))
    for limit, kept in ((ends[3], ends[3]), (ends[4] - 1, ends[3]), (ends[4], ends[4]), (ends[0] - 1, 0)):
        packing, report = plan_packing(
            document_lengths(documents), limit, overlong="turns", turn_ends=documents["turn_ends"]
        )
        rows = [row["input_ids"].tolist() for row in PackedDataset(documents, packing)]
        assert kept == 0 or any(ids[:kept] in (row[-kept:], row[:kept]) for row in rows)
        short = len(documents["input_ids"][0])
        if short <= limit:
            assert (report.tokens_cut, report.tokens_dropped) == ((len(ids) - kept, 0) if kept else (0, len(ids)))
            assert (report.documents_dropped, report.tokens_kept) == (int(kept == 0), short + kept)


def test_overlong_turns_of_a_stream(tmp_path) -> None:
    tokenizer = _tokenizer("chatml")
    session = [message for turn in range(20) for message in (ASKED, ANSWERED | {"content": f"answer {turn}"})]
    path = _write_lines(tmp_path / "a.jsonl", [CHATS["turns"], {"messages": session}])
    whole = tokenize_records(load_records(path), tokenizer, gives_turns=True)
    stream = PackedStream(tokenize_stream(stream_records(path), tokenizer, gives_turns=True), 700, overlong="turns")
    (row,) = stream
    kept = max(end for end in whole["turn_ends"][1] if end <= 700)
    assert {*row["seq_lengths"].tolist()} == {len(whole["input_ids"][0]), kept}
    assert stream.report.tokens_cut == len(whole["input_ids"][1]) - kept


def test_overlong_turns_needs_conversations() -> None:
    source = Dataset.from_dict({"text": ["a"]})
    message = _tokenize_error(source, tiny_tokenizer(), gives_turns=True)
    assert "--overlong turns keeps whole turns of conversations, and the records are 'text'" in message


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
    record = {"messages": [ASKED | {"id": 3}, ANSWERED | {"id": 4, "weight": 1}]}
    assert "does not read the key 'id' of messages; 2 of them have it" in (said := _said([record], caplog))
    assert "weight" not in said
    path = _write_lines(tmp_path / "a.jsonl", [record | {"source": "x", "tags": ["y"]}])
    load_records(path)
    assert "Columns of the records that are not read (2): source, tags" in caplog.text
    assert "Columns of the records that are not read (2): lang, source" in _said(
        [{"messages": [ASKED, ANSWERED], "source": "x", "lang": "en"}], caplog
    )


def test_empty_thoughts_are_learnt_and_said(caplog) -> None:
    record = {"messages": [ASKED, ANSWERED]}
    length = len("<think>\n\n</think>\n\n")  # a token for each byte
    said = _said([record] * 3, caplog, "qwen3", assistant_only_loss=True)
    assert f"{3 * length} tokens of empty <think></think> blocks" in said
    [(_, learnt)] = _texts([record], "qwen3", assistant_only_loss=True)
    assert "<think>\n\n</think>\n\nc d" in learnt


def test_rows_of_which_nothing_is_learnt_are_kept_and_counted(caplog) -> None:
    records = [{"messages": [ASKED, ANSWERED]}, {"messages": [ASKED]}]
    tokenize_records(Dataset.from_list(records), _tokenizer("chatml"), assistant_only_loss=True)
    assert "No token is learnt of 1 of the documents" in caplog.text
    assert [learnt for _, learnt in _texts(records, "chatml", assistant_only_loss=True)] == [f"c d{END}", ""]


def test_notes_are_said_again_when_tokens_come_from_the_cache(tmp_path, caplog) -> None:
    path = _write_lines(tmp_path / "a.jsonl", [{"messages": [ASKED | {"id": 1}, ANSWERED]}])
    for _ in range(2):
        caplog.clear()
        documents = tokenize_records(load_records(path), _tokenizer("chatml"))
        assert "does not read the key 'id'" in caplog.text
        assert "notes" not in documents.column_names


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


def _with_bos_and_eos(bos: bool, eos: bool):
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    single = f"{'<s> ' if bos else ''}$A{' <|endoftext|>' if eos else ''}"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[("<s>", tokenizer.bos_token_id), ("<|endoftext|>", tokenizer.eos_token_id)],
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
