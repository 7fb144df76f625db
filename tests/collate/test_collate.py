"""The collator's contract, and that its packed batches are exact in stock transformers models."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.collate import IGNORE_INDEX, SequenceCollator
from longctx.packing import PackedDataset, pack
from tests.model.more_families import SMALL

PAD = 7
PACKED_KEYS = {"use_cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
PER_TOKEN_KEYS = {"input_ids", "labels", "position_ids"}


def make_rows(lengths: list[list[int]], *, seed: int = 0, vocabulary: int = 64) -> list[dict[str, Any]]:
    """Rows holding documents of these lengths."""
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(8, vocabulary, sum(row)), "seq_lengths": row} for row in lengths]


ROWS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4)


@given(ROWS, st.sampled_from([1, 2, 3, 8, 64]), st.booleans())
@settings(deadline=None)
def test_contract(lengths: list[list[int]], multiple: int, padding_free: bool) -> None:
    examples = make_rows(lengths)
    batch = SequenceCollator(PAD, multiple, padding_free)(examples)
    if padding_free:
        lengths = [[n for row in lengths for n in row]]
        examples = [{"input_ids": np.concatenate([e["input_ids"] for e in examples])}]
    longest = max(map(sum, lengths))
    assert batch["input_ids"].shape == (len(lengths), -(-longest // multiple) * multiple)
    size = batch["input_ids"].shape[1]
    segments: list[int] = []
    for b, (row, example) in enumerate(zip(lengths, examples, strict=True)):
        tail = size - sum(row)
        parts = row + [tail] * (tail > 0)
        segments += parts
        assert batch["input_ids"][b].tolist() == example["input_ids"].tolist() + [PAD] * tail
        assert batch["position_ids"][b].tolist() == [i for n in parts for i in range(n)]
        expected = np.append(example["input_ids"], [IGNORE_INDEX] * tail)
        expected[np.cumsum([0, *row[:-1]])] = IGNORE_INDEX
        assert batch["labels"][b].tolist() == expected.tolist()
    assert all(batch[key].dtype == torch.int64 for key in PER_TOKEN_KEYS)
    if padding_free or any(len(row) > 1 for row in lengths):
        assert set(batch) == PER_TOKEN_KEYS | PACKED_KEYS
        assert batch["use_cache"] is False
        for side in "qk":
            assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
            assert batch[f"cu_seq_lens_{side}"].tolist() == np.cumsum([0, *segments]).tolist()
            assert batch[f"max_length_{side}"] == max(segments)
        assert batch["cu_seq_lens_q"][-1] == batch["input_ids"].numel()
    else:
        assert set(batch) == PER_TOKEN_KEYS | {"attention_mask"}
        assert batch["attention_mask"].dtype == torch.int64
        assert batch["attention_mask"].sum(1).tolist() == [sum(row) for row in lengths]


def test_the_example_of_the_docstring() -> None:
    rows = [{"input_ids": [11, 12, 13, 14, 15], "seq_lengths": [3, 2]}, {"input_ids": [21, 22, 23]}]
    batch = SequenceCollator(0, 4)(rows)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14, 15, 0, 0, 0], [21, 22, 23, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [
        [-100, 12, 13, -100, 15, -100, -100, -100],
        [-100, 22, 23, -100, -100, -100, -100, -100],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 11, 16]
    assert batch["max_length_q"] == 5


def test_empty_batch_is_one_segment_of_padding() -> None:
    for multiple, size in ((1, 2), (2, 2), (3, 3), (8, 8)):
        batch = SequenceCollator(PAD, multiple).empty()
        assert batch["input_ids"].tolist() == [[PAD] * size]
        assert batch["labels"].tolist() == [[IGNORE_INDEX] * size]
        assert batch["position_ids"].tolist() == [list(range(size))]
        assert batch["cu_seq_lens_q"].tolist() == [0, size]
        assert set(batch) == PER_TOKEN_KEYS | PACKED_KEYS


def test_labels_and_masks() -> None:
    ids = [11, 12, 13, 14]
    collate = SequenceCollator(PAD)

    def labels(**columns: Any) -> list[int]:
        return collate([{"input_ids": ids} | columns])["labels"][0].tolist()

    assert labels() == [-100, 12, 13, 14]
    assert labels(labels=[1, 2, -100, 4]) == [-100, 2, -100, 4]
    assert labels(labels=torch.tensor([1, 2, -100, 4])) == [-100, 2, -100, 4]
    assert labels(completion_mask=[0, 0, 1, 1]) == [-100, -100, 13, 14]
    assert labels(assistant_masks=np.array([True, True, False, True])) == [-100, 12, -100, 14]
    assert labels(completion_mask=[0, 0, 1, 1], assistant_masks=[1, 1, 0, 1]) == [-100, -100, -100, 14]
    assert labels(labels=[1, 2, 3, 4], completion_mask=[0, 0, 0, 0]) == [-100, 2, 3, 4]
    assert labels(labels=None, seq_lengths=None) == [-100, 12, 13, 14]
    assert labels(seq_lengths=[2, 0, 2], text="ignored", score=[0.5] * 9) == [-100, 12, -100, 14]
    assert collate([{"input_ids": ids, "seq_lengths": [2, 0, 2]}])["cu_seq_lens_q"].tolist() == [0, 2, 4]


def test_documents_survive_where_only_position_ids_do() -> None:
    """A stock trainer passes on the model's own arguments only, which drops seq_lengths."""
    packed = PackedDataset(pa.table({"input_ids": [[11, 12, 13], [14, 15], [16]]}), pack([3, 2, 1], 6))
    row = packed[0]
    assert row["seq_lengths"].tolist() == [3, 2, 1]
    del row["seq_lengths"]
    batch = SequenceCollator(PAD, 4)([row])
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 8]


def test_collator_is_picklable_and_leaves_examples_alone() -> None:
    collate = pickle.loads(pickle.dumps(SequenceCollator(PAD, 4, padding_free=True)))
    examples = make_rows([[3, 2], [4]])
    before = [e["input_ids"].copy() for e in examples]
    collate(examples)["labels"].zero_()
    assert all((e["input_ids"] == b).all() for e, b in zip(examples, before, strict=True))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"input_ids": []}, ["example 0 has no tokens", "leave empty documents out"]),
        ({"labels": [1]}, ["no input_ids", "labels"]),
        ({"input_ids": [1, 2, 3], "labels": [2, 3]}, ["labels", "has 2 values", "3 input_ids", "not shifted"]),
        ({"input_ids": [1, 2], "completion_mask": [1]}, ["completion_mask", "has 1 values", "2 input_ids"]),
        ({"input_ids": [1, 2], "seq_lengths": [1]}, ["sum to 1", "2 input_ids", "each document"]),
        ({"input_ids": [1, 2], "seq_lengths": [3, -1]}, ["seq_lengths", "sum to 2"]),
        ({"input_ids": [1, 2], "position_ids": [1, 2]}, ["position_ids", "seq_lengths"]),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 3]}, ["position_ids", "seq_lengths"]),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, ["padded already", "1 zeros", "without padding"]),
        ({"input_ids": [1.5, 2]}, ["integers", "float64"]),
        ({"input_ids": [[1, 2]]}, ["shape (1, 2)"]),
    ],
)
def test_bad_examples(example: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        SequenceCollator(PAD)([example])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_bad_collators() -> None:
    with pytest.raises(ValueError, match="got None; for a tokenizer without a pad token use its eos_token_id"):
        SequenceCollator(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pad_to_multiple_of must be .* got 0"):
        SequenceCollator(PAD, 0)
    with pytest.raises(ValueError, match=r"collator.empty\(\)"):
        SequenceCollator(PAD)([])


# Stock transformers models

EXACT = {"rtol": 0, "atol": 1e-5}  # fp32 logits of order 1; a leak between documents changes them by over 1e-2


def make_model(name: str, attention: str) -> torch.nn.Module:
    """A small random model with GQA and weights large enough for attention to matter."""
    import transformers

    sizes = SMALL | {"head_dim": 8, "initializer_range": 0.2, "pad_token_id": PAD, "attn_implementation": attention}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def document_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] of one document alone: no mask, no padding, no packing."""
    return model(input_ids=tokens[None]).logits[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_stock_models_see_documents_one_by_one(name: str, attention: str) -> None:
    """Logits of collated batches equal those of every document alone."""
    model = make_model(name, attention)
    cases = [([[5, 9, 2], [7, 1], [16]], False), ([[5, 9, 2], [7, 1], [3]], True), ([[6], [11]], False)]
    for lengths, padding_free in cases:
        examples = make_rows(lengths)
        batch = SequenceCollator(PAD, 8, padding_free)(examples)
        starts = starts_in(batch, lengths, padding_free)
        with torch.no_grad():
            logits = model(**batch).logits.flatten(0, 1)
            for number, document in enumerate(split_documents(examples)):
                alone = document_logits(model, document)
                got = logits[starts[number] : starts[number] + len(document)]
                torch.testing.assert_close(got, alone, **EXACT, msg=lambda m, n=number: f"document {n}: {m}")


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_stock_loss_is_the_mean_over_all_documents(name: str) -> None:
    """Label shifting by the stock loss meets no document border: -100 stands at every first token."""
    model = make_model(name, "sdpa")
    examples = make_rows([[5, 9, 2], [7, 1], [4]])
    total, count = 0.0, 0
    with torch.no_grad():
        for document in split_documents(examples):
            logits = document_logits(model, document)
            total += torch.nn.functional.cross_entropy(logits[:-1], document[1:], reduction="sum").item()
            count += len(document) - 1
        for padding_free in (False, True):
            loss = model(**SequenceCollator(PAD, 8, padding_free)(examples)).loss.item()
            assert loss == pytest.approx(total / count, rel=1e-5)  # fp32 mean of 22 token losses


def split_documents(examples: list[dict[str, Any]]) -> list[torch.Tensor]:
    rows = [torch.from_numpy(example["input_ids"]).split(example["seq_lengths"]) for example in examples]
    return [document for row in rows for document in row]


def starts_in(batch: dict[str, Any], lengths: list[list[int]], padding_free: bool) -> list[int]:
    """First token of each document in the flattened batch."""
    size = batch["input_ids"].shape[1]
    if padding_free:
        flat = [n for row in lengths for n in row]
        return np.cumsum([0, *flat[:-1]]).tolist()
    return [b * size + start for b, row in enumerate(lengths) for start in np.cumsum([0, *row[:-1]]).tolist()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_empty_batch_runs_through_a_stock_model(attention: str) -> None:
    output = make_model("Llama", attention)(**SequenceCollator(PAD, 4).empty())
    assert output.logits.isfinite().all()
