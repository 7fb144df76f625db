"""Tokens and labels, compared with TRL, and errors while tokenising."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset

from longctx.data import load_records, tokenize_records
from longctx.model.tiny import tiny_model, tiny_tokenizer
from tests.data.test_chats import CHATS as SHAPES
from tests.data.test_chats import _template
from tests.data.test_data import CHATS, PAIRS, TEXTS, VOCAB_SIZE, _tokenize_error
from tests.few import few
from tests.jsonl import write_lines

pytestmark = pytest.mark.usefixtures("own_cache")


# ----------------------------------------------------------------------------------------------------
# Tokens and labels, compared with TRL
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl_prepare(tokenizer, tmp_path_factory):
    """TRL's own preparation: records, options -> rows of input_ids and labels."""
    from trl import SFTConfig, SFTTrainer

    folder = str(tmp_path_factory.mktemp("trl"))

    def prepare(records: list[dict[str, Any]], **options: Any) -> list[dict[str, list[int]]]:
        args = SFTConfig(folder, use_cpu=True, report_to="none", max_length=None, bf16=False, **options)
        trainer = SFTTrainer(tiny_model(), args, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
        return [{key: row[key] for key in ("input_ids", "labels")} for row in trainer.train_dataset]

    return prepare


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "text": ([{"text": text} for text in [*TEXTS, "ends<|endoftext|>", ""]], {}),
    "messages": ([{"messages": chat} for chat in CHATS], {}),
    "messages, assistant only": ([{"messages": chat} for chat in CHATS], {"assistant_only_loss": True}),
    "from/value": (
        [{"conversations": [{"from": m["role"], "value": m["content"]} for m in chat]} for chat in CHATS],
        {},
    ),
    "prompt+completion": ([{"prompt": p, "completion": c} for p, c in PAIRS], {}),
    "prompt+completion, all tokens": (
        [{"prompt": p, "completion": c} for p, c in PAIRS],
        {"completion_only_loss": False},
    ),
    "chat prompt+completion": ([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS], {}),
    "chat prompt+completion, assistant only": (
        [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in CHATS],
        {"assistant_only_loss": True, "completion_only_loss": False},
    ),
    "chat prompt+completion, assistant's part of the completion": (
        [{"prompt": CHATS[0][:2], "completion": CHATS[0][2:]}, {"prompt": CHATS[0][:4], "completion": CHATS[0][4:]}],
        {"assistant_only_loss": True},
    ),
    "input_ids": ([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], {}),
    "input_ids and labels": ([{"input_ids": [1, 2, 3], "labels": [-100, 2, -100]}], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_tokens_and_labels_as_trl(name, tmp_path, tokenizer, trl_prepare) -> None:
    records, options = CASES[name]
    expected = trl_prepare(records, **options)
    path = write_lines(tmp_path / "records.jsonl", records)
    for source in (load_records(path), Dataset.from_list(records)):
        documents = tokenize_records(source, tokenizer, vocab_size=VOCAB_SIZE, **options)
        assert documents["input_ids"][:] == [row["input_ids"] for row in expected]
        labels = documents["labels"][:] if "labels" in documents.column_names else documents["input_ids"][:]
        assert labels == [row["labels"] for row in expected]
        masked = any(-100 in row["labels"] for row in expected)
        assert ("labels" in documents.column_names) == (masked or "labels" in records[0])
        for column in documents.column_names:
            assert documents.features[column] == datasets.List(datasets.Value("int32"))


@pytest.mark.long
def test_a_record_of_several_kinds_is_of_the_first_one(tokenizer) -> None:
    record = {"input_ids": [1, 2], "prompt": "a", "completion": "b", "messages": CHATS[1], "text": "c"}
    for kind in (["input_ids"], ["prompt", "completion"], ["messages"], ["text"]):
        of_all = Dataset.from_list([record])
        alone = Dataset.from_list([{column: record.pop(column) for column in kind}])
        found, expected = (tokenize_records(source, tokenizer)["input_ids"][:] for source in (of_all, alone))
        assert found == expected, kind


def test_known_template_without_markers_gets_trls_training_version(tokenizer, trl_prepare, monkeypatch) -> None:
    from trl.chat_template_utils import qwen3_chat_template

    monkeypatch.setattr(tokenizer, "chat_template", qwen3_chat_template)
    records = [{"messages": chat} for chat in CHATS]
    expected = trl_prepare(records, assistant_only_loss=True)
    documents = tokenize_records(Dataset.from_list(records), tokenizer, assistant_only_loss=True)
    assert documents["labels"][:] == [row["labels"] for row in expected]
    assert tokenizer.chat_template == qwen3_chat_template
    given = tiny_tokenizer()
    again = tokenize_records(
        Dataset.from_list(records), given, assistant_only_loss=True, chat_template=qwen3_chat_template
    )
    assert again["labels"][:] == documents["labels"][:]


MARKED = (  # in the way of Mistral's, which TRL does not have
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}"
    "{% generation %} {{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)
TEMPLATES = {  # TRL's file, and the chats that it refuses, or leaves the calls out of
    "qwen3": (),
    "qwen3_5_think": (),
    "qwen2_5": (),
    "glm4moe": (),
    "gptoss": (),
    "llama3": ("tools",),
    "phi3": ("tools",),
    "gemma3": ("tools",),
    "marked": ("tools",),
}


def _give_template(name: str, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", MARKED if name == "marked" else _template(name))
    monkeypatch.setitem(tokenizer._special_tokens_map, "bos_token", tokenizer.eos_token)  # as their own have one


@pytest.mark.parametrize("assistant_only", [True, False])
@pytest.mark.parametrize("template", few(TEMPLATES, ["marked"]))
def test_real_templates_give_trls_tokens_and_labels(template, assistant_only, tokenizer, trl_prepare, monkeypatch):
    _give_template(template, tokenizer, monkeypatch)
    for name in SHAPES.keys() - set(TEMPLATES[template]):
        chat = SHAPES[name]
        expected = trl_prepare([chat], assistant_only_loss=assistant_only)
        source = Dataset.from_list([chat], on_mixed_types="use_json")
        documents = tokenize_records(source, tokenizer, assistant_only_loss=assistant_only)
        assert documents["input_ids"][:] == [row["input_ids"] for row in expected], name
        labels = documents["labels" if assistant_only else "input_ids"][:]
        assert labels == [row["labels"] for row in expected], name
        text = tokenizer.decode([token for token in labels[0] if token != -100])
        assert chat["messages"][-1]["content"] in text
        assert (chat["messages"][0]["content"] in text) != assistant_only


@pytest.mark.parametrize("template", [name for name, refused in TEMPLATES.items() if "tools" in refused])
def test_templates_without_a_place_for_tool_calls_are_refused(template, tokenizer, monkeypatch) -> None:
    """TRL trains on what such a template leaves: an empty answer."""
    _give_template(template, tokenizer, monkeypatch)
    source = Dataset.from_list([SHAPES["tools"]], on_mixed_types="use_json")
    error = _tokenize_error(source, tokenizer)
    assert "leaves out the call of the tool 'lift'" in error or "roles must alternate user/assistant" in error


def test_chat_template_option_and_tools(tokenizer) -> None:
    template = "{{ tools | length if tools else 0 }}{{ suffix }}{{ messages[0]['content'] }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [
        {"messages": CHATS[1], "tools": tools, "chat_template_kwargs": None},
        {"messages": CHATS[1], "tools": None, "chat_template_kwargs": {"suffix": "!"}},
    ]
    source = Dataset.from_list(records, on_mixed_types="use_json")
    documents = tokenize_records(source, tokenizer, chat_template=template)
    assert [tokenizer.decode(ids) for ids in documents["input_ids"]] == ["1hi", "0!hi"]


def test_pretokenized_masks_become_labels(tokenizer) -> None:
    source = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "assistant_masks": [[0, 1, 0], [1, 1]]})
    assert tokenize_records(source, tokenizer)["labels"][:] == [[-100, 2, -100], [4, 5]]
    source = source.add_column("completion_mask", [[0, 1, 1], [0, 1]])
    assert "set --completion_only_loss" in _tokenize_error(source, tokenizer)
    documents = tokenize_records(source, tokenizer, completion_only_loss=True)
    assert documents["labels"][:] == [[-100, 2, -100], [-100, 5]]
    masks = [[False, True, False], [True, True]]
    source = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "assistant_masks": masks})
    assert tokenize_records(source, tokenizer)["labels"][:] == [[-100, 2, -100], [4, 5]]


def test_selected_and_sliced_records_keep_their_masks(tokenizer) -> None:
    rows = [{"input_ids": list(range(n)), "labels": [-100, *range(1, n)]} for n in range(2, 40)]
    source = Dataset.from_list(rows)
    for part, expected in ((source.select([30, 3, 3, 17]), [30, 3, 3, 17]), (source.select(range(5, 9)), range(5, 9))):
        documents = tokenize_records(part, tokenizer)
        assert documents["input_ids"][:] == [rows[i]["input_ids"] for i in expected]
        assert documents["labels"][:] == [rows[i]["labels"] for i in expected]


def test_second_tokenization_comes_from_the_cache(tmp_path, monkeypatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    first = tokenize_records(load_records(path), tiny_tokenizer())
    calls = []
    original = datasets.arrow_writer.ArrowWriter.finalize
    monkeypatch.setattr(
        datasets.arrow_writer.ArrowWriter, "finalize", lambda self, *a, **k: calls.append(1) or original(self, *a, **k)
    )
    second = tokenize_records(load_records(path), tiny_tokenizer())
    assert second._fingerprint == first._fingerprint
    assert second.cache_files == first.cache_files
    assert not calls, "nothing may be written the second time"
    other = tiny_tokenizer()
    other.eos_token = "<|im_end|>"
    assert tokenize_records(load_records(path), other)["input_ids"][0][-1] == other.eos_token_id
    assert calls


@pytest.mark.long
def test_several_processes_give_the_same(tmp_path, tokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": p, "completion": c} for p, c in PAIRS * 4])
    one = tokenize_records(load_records(path), tokenizer)
    datasets.config.HF_DATASETS_CACHE = str(tmp_path / "other")
    two = tokenize_records(load_records(path), tokenizer, num_proc=2)
    assert two[:] == one[:]
    bad = Dataset.from_dict({"input_ids": [[1, 2]] * 5 + [[9999]]})
    assert "record 5 " in _tokenize_error(bad, tokenizer, vocab_size=VOCAB_SIZE, num_proc=2)


# ----------------------------------------------------------------------------------------------------
# Errors while tokenising
# ----------------------------------------------------------------------------------------------------


def _unsigned(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]},
            "record 1 (counted from 0): 'labels' has 1 entries and 'input_ids' has 2",
        ),
        ({"input_ids": [[1, 2], [3, 272]]}, "record 1 (counted from 0): 'input_ids' holds the token id 272"),
        ({"input_ids": [[1, -1]]}, "holds the token id -1, and the vocabulary has the ids 0 to 271"),
        ({"input_ids": [[1, 2]], "labels": [[1, 999]]}, "'labels' holds the token id 999"),
        ({"input_ids": [[1, 2]], "labels": [[1, -1]]}, "'labels' holds the token id -1"),
        ({"input_ids": [[1, 2], None]}, "record 1 (counted from 0): 'input_ids' is null"),
        ({"input_ids": [[1, 2], [3, None]]}, "record 1 (counted from 0): 'input_ids' is null or holds a null"),
        ({"input_ids": [[1.5, 2.0]]}, "expected lists of integers"),
        ({"input_ids": [[1, 2]], "labels": [[-100, -100]]}, "every label is -100"),
        ({"input_ids": [[1, 2], [3, 4]], "labels": [[1, -100], [3, -100]]}, "the first token of a document"),
        ({"input_ids": [[1], [3]]}, "one token only"),
        ({"text": ["a", None]}, "record 1 (counted from 0): 'text' is NoneType"),
        ({"text": [1, 2]}, "column 'text' has the type int64; expected strings"),
        ({"messages": ["a"]}, "column 'messages' has the type string; expected lists of messages"),
        ({"prompt": ["a"], "completion": [None]}, "column 'completion' has the type null"),
        ({"prompt": ["a", "b"], "completion": ["c", None]}, "record 1 (counted from 0): 'completion'"),
        ({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}, "'chosen' and 'rejected' answers are preferences"),
        ({"prompt": ["a"], "completion": ["b"], "label": [True]}, "'label' says which completions are desirable (KTO)"),
        ({"prompt": ["a"], "completion": ["b"], "system": ["c"]}, "the column 'system' is not read"),
        ({"messages": [CHATS[0]], "system": ["c"]}, "the column 'system' is not read"),
        ({"text": ["a"], "image": ["a.png"]}, "the column 'image' holds images, video or audio"),
        ({"messages": [CHATS[0]], "video": ["a.mp4"]}, "the column 'video' holds images, video or audio"),
        ({"input_ids": [[1, 2]], "loss_weights": [[0.0, 1.0]]}, "the column 'loss_weights' would say which tokens"),
        ({"input_ids": [[1, 2]], "pixel_values": [[0.5]]}, "the column 'pixel_values' holds images"),
        ({"prompt": ["a"], "completion": ["b"], "audios": [["a.wav"]]}, "the column 'audios' holds images, video or"),
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "the column 'loss_mask' would say which tokens count"),
        ({"input_ids": [[1, 2]], "labels": [[False, True]]}, "column 'labels' has the type list<item: bool>"),
        ({"input_ids": [[1, 2]], "labels": [[1.0, 2.7]]}, "column 'labels' has the type list<item: double>"),
        ({"input_ids": [[1, 2]], "labels": [1]}, "column 'labels' has the type int64; expected lists of integers"),
        ({"input_ids": [[1, 2]], "labels": [[[1], [2]]]}, "column 'labels' has the type list<item: list<item: int64>>"),
        ({"input_ids": [[1, 2]], "attention_mask": ["11"]}, "column 'attention_mask' has the type string"),
        ({"input_ids": [[1, 2]], "labels": [_unsigned(1, 2**64 - 100)]}, f"'labels' holds the token id {2**64 - 100}"),
        ({"input_ids": [_unsigned(1, 2**64 - 3)]}, f"'input_ids' holds the token id {2**64 - 3}"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, -7]]}, "'attention_mask' holds -7; expected 0 or 1"),
        ({"input_ids": [[1, 2]], "assistant_masks": [[1, -1]]}, "'assistant_masks' holds -1; expected 0 or 1"),
        (
            {"input_ids": [[1], [1, 2]], "labels": [[1], [1, 2]], "completion_mask": [[1], [0, 99]]},
            "record 1 (counted from 0): 'completion_mask' holds 99; expected 0 or 1",
        ),
        ({"messages": [CHATS[0]], "label": [False]}, "says which completions are desirable (KTO)"),
        ({"messages": [CHATS[0]], "rejected_response": ["b"]}, "makes a record of 'messages' a preference"),
        ({"text": []}, "0 records"),
    ],
)
def test_bad_records(columns, expected, tokenizer) -> None:
    assert expected in _tokenize_error(Dataset.from_dict(columns), tokenizer, vocab_size=VOCAB_SIZE)


def test_ids_beyond_the_vocabulary_of_text(tokenizer) -> None:
    message = _tokenize_error(Dataset.from_dict({"text": ["a"]}), tokenizer, vocab_size=200)
    assert "holds the token id 256" in message
    assert "0 to 199" in message


def test_options_that_do_not_apply(tokenizer) -> None:
    text, chat = Dataset.from_dict({"text": TEXTS}), Dataset.from_list([{"messages": CHATS[0]}])
    assert "needs conversations" in _tokenize_error(text, tokenizer, assistant_only_loss=True)
    assert "'prompt' and 'completion'" in _tokenize_error(text, tokenizer, completion_only_loss=True)
    assert "--assistant_only_loss" in _tokenize_error(chat, tokenizer, completion_only_loss=True)
    ids = Dataset.from_dict({"input_ids": [[1, 2]]})
    assert "assistant_masks" in _tokenize_error(ids, tokenizer, assistant_only_loss=True)
    assert "completion_mask" in _tokenize_error(ids, tokenizer, completion_only_loss=True)


def test_tokenizer_without_what_is_needed(monkeypatch) -> None:
    tokenizer = tiny_tokenizer()
    chat = Dataset.from_list([{"messages": CHATS[0]}])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.chat_template = template
    pair = Dataset.from_list([{"prompt": CHATS[1][:1], "completion": CHATS[1][1:]}])  # needs no markers
    assert tokenizer.decode([i for i in tokenize_records(pair, tokenizer)["labels"][0] if i != -100]) == "hello there"
    tokenizer.chat_template = None
    assert "no chat template" in _tokenize_error(chat, tokenizer)
    tokenizer.eos_token = None
    assert "no EOS token" in _tokenize_error(Dataset.from_dict({"text": TEXTS}), tokenizer)


def test_chat_problems_name_the_record(tokenizer) -> None:
    no_answer = Dataset.from_list([{"messages": CHATS[0]}, {"messages": CHATS[0][:2]}])
    refusing = "{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}"
    message = _tokenize_error(no_answer, tokenizer, chat_template=refusing)
    assert "roles must alternate" in message
    answers = Dataset.from_list([{"messages": [{"role": "assistant", "content": "a"}]}])
    silent = _tokenize_error(answers, tokenizer, chat_template="{# nothing #}")
    assert silent.startswith("record 0 (counted from 0): 'input_ids' is empty")
    none = Dataset.from_list([{"messages": [{"role": "user", "content": None}]}])
    assert "record 0 (counted from 0): a message in 'messages', of the role 'user', has no content" in _tokenize_error(
        none, tokenizer
    )
    empty = Dataset.from_list([{"messages": CHATS[0]}, {"messages": []}])
    assert _tokenize_error(empty, tokenizer).startswith("record 1 ")


def test_transforms_and_streams_are_refused(tokenizer) -> None:
    source = Dataset.from_dict({"text": TEXTS})
    assert "with_transform" in _tokenize_error(source.with_transform(lambda batch: batch), tokenizer)
    assert "IterableDataset" in _tokenize_error(source.to_iterable_dataset(), tokenizer)
