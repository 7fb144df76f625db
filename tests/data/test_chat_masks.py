"""Which turns of a chat are learnt: masks of messages, the assistant's turns, and whole turns of long sessions."""

from __future__ import annotations

import contextlib
import re

import jinja2
import pytest
from datasets import Dataset
from transformers.utils.chat_template_utils import render_jinja_template

from longctx.data import DataError, document_lengths, load_records, stream_records, tokenize_records, tokenize_stream
from longctx.data.chat import ChatEncoder
from longctx.model.tiny import tiny_tokenizer
from longctx.packing import PackedDataset, PackedStream, plan_packing
from tests.data.test_chats import (
    ANSWERED,
    ASKED,
    CHATS,
    END,
    FOLDER,
    OPEN,
    TOOL,
    TOOL_CHAT,
    _template,
    _texts,
    _tokenizer,
)
from tests.data.test_data import _tokenize_error
from tests.jsonl import write_lines

pytestmark = pytest.mark.usefixtures("own_cache")

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
    path = write_lines(tmp_path / "a.jsonl", [record])
    (streamed,) = tokenize_stream(stream_records(path), tokenizer)
    assert streamed["labels"].tolist() == tokenize_records(load_records(path), tokenizer)["labels"][0]


@pytest.mark.long
def test_what_looks_like_a_mask_changes_no_token(tmp_path) -> None:
    """A record with a mask, or an argument with the name of one, leaves the text of the others as it is."""
    call = {"type": "function", "function": {"name": "lift", "arguments": {"weight": 3}}}
    others = [[ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}], [ASKED | {"weight": 0}, ANSWERED]]
    tokenizer = _tokenizer("qwen3")
    expected = tokenize_records(Dataset.from_list([CHATS["turns"]]), tokenizer)["input_ids"][0]
    for number, other in enumerate(others):
        path = write_lines(tmp_path / f"{number}.jsonl", [CHATS["turns"], {"messages": other}])
        loaded = tokenize_records(load_records(path), tokenizer)
        streamed = list(tokenize_stream(stream_records(path), tokenizer))
        assert loaded["input_ids"][0] == expected
        assert [row["input_ids"].tolist() for row in streamed] == loaded["input_ids"][:]
        assert [row["labels"].tolist() for row in streamed] == loaded["labels"][:]


def test_a_mask_of_a_message_that_is_written_elsewhere_is_refused() -> None:
    """Gemma 3's template writes the system message into the user's turn."""
    system = {"role": "system", "content": "x y", "weight": 0}
    source = Dataset.from_list([{"messages": [system, ASKED | {"weight": 1}, ANSWERED | {"weight": 1}]}])
    message = _tokenize_error(source, _tokenizer("gemma3"))
    assert "writes a message of the role 'system' into another turn, so that turns cannot be told apart" in message


def test_turns_that_cannot_be_separated_are_one() -> None:
    """With Gemma 3 a system message and the question; with Qwen2.5 two results of tools in a row."""
    system = {"role": "system", "content": "x y"}
    tokenizer = _tokenizer("gemma3")
    document = tokenize_records(
        Dataset.from_list([{"messages": [system, ASKED, ANSWERED]}]), tokenizer, gives_turns=True
    )
    first, last = document["turn_ends"][0]
    assert tokenizer.decode(document["input_ids"][0][:first]).endswith("a b<end_of_turn>\n")
    assert last == len(document["input_ids"][0])
    calls = [TOOL_CHAT[1]["tool_calls"][0]] * 2
    chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *TOOL_CHAT[2:3] * 2, ANSWERED]
    document = tokenize_records(
        Dataset.from_list([{"messages": chat, "tools": [TOOL]}]), _tokenizer("qwen2_5"), gives_turns=True
    )
    assert len(document["turn_ends"][0]) == 4


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

NEMOTRON_3 = tuple(f"nemotron_3_{name}" for name in ("nano", "super", "ultra", "5_lightning"))
LEARNT_OF_THE_PROMPT = {"qwen2_5": "\n", "gptoss": "<|start|>assistant", "muse_glimmer": "<|start|>assistant"}
LEARNT_OF_THE_PROMPT |= dict.fromkeys(("qwen3_5_think", "qwen3_6", "qwen3_8", *NEMOTRON_3), "<think>\n")
LEARNT_OF_THE_PROMPT |= {"qwen3_5_nothink": "<think>\n\n</think>\n\n"}
"""What TRL's markers have of the generation prompt, before each answer."""

UNDERIVED = {
    ("deepseek_r1_distill", "*"): "the generation prompt begins a thought, which answers do not have",
    ("deepseekv3", "*"): "the generation prompt begins a thought, which answers do not have",
    ("phi3", "turns"): "an EOS token follows the last turn alone",
    ("phi3_5", "turns"): "an EOS token follows the last turn alone",
    ("gptoss", "turns"): "the last turn ends with another token",
    ("qwen3_5_nothink", "thoughts"): "the generation prompt has an empty thought",
    ("diffusion_gemma", "tools"): "a tool's result begins the next turn, and there is no generation prompt",
    **{
        (name, kind): "the generation prompt begins a thought with a line break"
        for name in NEMOTRON_3
        for kind in ("turns", "tools")
    },
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
    path = write_lines(tmp_path / "a.jsonl", [CHATS["turns"], {"messages": session}])
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
