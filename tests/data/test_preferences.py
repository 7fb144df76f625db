"""Pairs of answers: tokens and cuts as TRL makes them, packs that keep both sides, and what is refused."""

from __future__ import annotations

import json
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, Qwen3Config, Qwen3MoeConfig
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from longctx.collate import SequenceCollator
from longctx.data import DataError, load_records, tokenize_records
from longctx.data.kinds import PAIRS
from longctx.data.preferences import PairTextEncoder
from longctx.data.sides import sides_of_pairs
from longctx.dpo import main
from longctx.model.branches import branch_obstacle
from longctx.model.tiny import tiny_config, tiny_tokenizer
from longctx.packing import PairedDataset, kept_of_sides, plan_pairs
from longctx.settings import dpo
from longctx.settings.dpo import DPO
from longctx.settings.launcher import read_profile
from longctx.settings.model_config import _check_model_of_pairs
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.settings.rules import fill
from longctx.training.preference import LOSSES, SFT, Pairs, _summable, sides_of_batch
from tests.jsonl import write_lines
from tests.model.more_families import LLAMA4, SMALL

TEXT = [
    {"prompt": "one ", "chosen": "two", "rejected": "three and four"},
    {"prompt": "a longer prompt ", "chosen": "same", "rejected": "same"},
    {"prompt": "p" * 20, "chosen": "c" * 30, "rejected": ""},
]


def message(role, content):
    return [{"role": role, "content": content}]


CHATS = [
    {key: message("user" if key == "prompt" else "assistant", text) for key, text in record.items()}
    for record in TEXT[:2]
]
IMPLICIT = [{side: record["prompt"] + record[side] for side in ("chosen", "rejected")} for record in CHATS]
RECORDS = {"text": TEXT, "chats": CHATS, "implicit chats": IMPLICIT}


def trl_pairs(records, tokenizer):
    """The records as DPOTrainer tokenises them."""
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    return list(DPOTrainer._prepare_dataset(trainer, Dataset.from_list(records), tokenizer, args, "train"))


@pytest.mark.parametrize("kind", RECORDS)
def test_tokens_are_those_of_trl(kind):
    records, tokenizer = RECORDS[kind], tiny_tokenizer()
    pairs = tokenize_records(Dataset.from_list(records), tokenizer, text_field=PAIRS)
    sides = sides_of_pairs(pairs)
    for number, (pair, expected) in enumerate(zip(pairs, trl_pairs(records, tokenizer), strict=True)):
        prompt, chosen, rejected = (expected[f"{part}_ids"] for part in ("prompt", "chosen", "rejected"))
        assert pair["input_ids"] == prompt + chosen + prompt + rejected
        masked = [-100] * len(prompt)
        assert pair["labels"] == masked + chosen + masked + rejected
        lengths = [len(prompt), len(prompt) + len(chosen), len(prompt) + len(rejected)]
        assert [int(side[number]) for side in sides] == lengths


def test_packs_hold_both_sides_of_their_pairs_and_cut_them_like_trl():
    tokenizer = tiny_tokenizer()
    pairs = tokenize_records(Dataset.from_list(TEXT), tokenizer, text_field=PAIRS)
    sides, capacity = sides_of_pairs(pairs), 56
    packing, report = plan_pairs(sides, capacity, overlong="truncate")
    rows = PairedDataset(pairs, packing, sides, kept_of_sides(sides, capacity, "truncate"))
    rows.reference = np.arange(6.0).reshape(3, 2)
    collator = DataCollatorForPreference(pad_token_id=tokenizer.pad_token_id, max_length=capacity // 2)
    found = {}
    for row, numbers in zip(list(rows), packing.bins, strict=True):
        assert row["seq_lengths"].sum() == len(row["input_ids"]) <= capacity
        documents = np.split(row["input_ids"], np.cumsum(row["seq_lengths"])[:-1])
        found |= dict(zip(numbers.tolist(), zip(documents[::2], documents[1::2], strict=True), strict=True))
        assert row["reference"].tolist() == rows.reference[numbers].tolist()
    assert sorted(found) == [0, 1, 2]
    for number, expected in enumerate(trl_pairs(TEXT, tokenizer)):
        cut = collator([expected]) if number == 2 else DataCollatorForPreference(tokenizer.pad_token_id)([expected])
        for side, ids, mask in zip(found[number], cut["input_ids"], cut["attention_mask"], strict=True):
            assert side.tolist() == ids[mask.bool()].tolist()
    assert (report.documents, report.too_long_documents, report.unit) == (3, 1, "pairs")
    assert report.tokens == report.tokens_kept + report.tokens_cut
    assert str(report).startswith("3 pairs with")


def test_pairs_without_room_for_an_answer_are_left_out():
    pairs = tokenize_records(Dataset.from_list(TEXT), tiny_tokenizer(), text_field=PAIRS)
    sides = sides_of_pairs(pairs)
    packing, report = plan_pairs(sides, 38, overlong="truncate")  # 19 tokens a side, and a prompt of 20
    assert sorted(np.concatenate(list(packing.bins)).tolist()) == [0, 1]
    assert report.documents_dropped == 1
    assert plan_pairs(sides, 56, overlong="drop")[1].documents_dropped == 1


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_sides_that_share_their_prompt_are_branches_with_the_tokens_of_trl(kind):
    """However pairs are packed, and whichever of them are selected; a prompt of one token has nothing to share."""
    tokenizer = tiny_tokenizer()
    records = [*RECORDS[kind], *([{"prompt": "x", "chosen": "yes", "rejected": "no"}] * (kind == "text"))]
    pairs = tokenize_records(Dataset.from_list(records), tokenizer, text_field=PAIRS)
    pairs = pairs.select(range(len(pairs) - 1, -1, -1))  # in another order than in the file
    sides, capacity = sides_of_pairs(pairs), 1000
    packing, report = plan_pairs(sides, capacity, share=True)
    rows = PairedDataset(pairs, packing, sides, kept_of_sides(sides, capacity, "raise", share=True), share=True)
    rows.reference = np.arange(2.0 * len(pairs)).reshape(-1, 2)
    rows = pickle.loads(pickle.dumps(rows))
    [row] = list(rows)
    collator = SequenceCollator(pad_token_id=0, pad_to_multiple_of=8, padding_free=True)
    batch, layout = collator.with_layout([row])
    assert row["position_ids"].tolist() == batch["position_ids"][0, : len(row["input_ids"])].tolist()
    found = []
    for answer in sides_of_batch(layout):
        begin = np.flatnonzero(row["position_ids"][: answer.start + 1] == 0)[-1]
        trunk = row["input_ids"][begin : begin + row["position_ids"][answer.start]]
        labels = row["labels"][answer]
        found.append((np.append(trunk, row["input_ids"][answer]).tolist(), labels[labels != -100].tolist()))
    expected, tokens = trl_pairs(records, tokenizer)[::-1], 0
    for number, (pair, chosen, rejected) in enumerate(zip(packing.documents(0), found[::2], found[1::2], strict=True)):
        prompt, *answers = (expected[pair][f"{part}_ids"] for part in ("prompt", "chosen", "rejected"))
        assert [chosen, rejected] == [(prompt + answer, answer) for answer in answers]
        assert row["reference"][number].tolist() == [2.0 * pair, 2.0 * pair + 1]
        tokens += len(prompt) + 1 + sum(map(len, answers))
    assert tokens == len(row["input_ids"]) == report.tokens == report.tokens_kept
    assert (row["labels"] != -100).sum() == sum(len(pair[f"{side}_ids"]) for pair in expected for side in SIDES)


SIDES = ("chosen", "rejected")


def test_pairs_that_share_their_prompt_are_cut_to_the_room_that_is_left():
    """The last pair of TEXT has a prompt of 20 tokens and answers of 31 and 1, 53 tokens if the prompt is shared."""
    pairs = tokenize_records(Dataset.from_list(TEXT), tiny_tokenizer(), text_field=PAIRS)
    sides = sides_of_pairs(pairs)

    def cut(capacity, overlong):
        plan_pairs(sides, capacity, overlong=overlong, share=True)
        return kept_of_sides(sides, capacity, overlong, share=True)[2].tolist()

    assert cut(53, "raise") == [51, 21]
    with pytest.raises(ValueError, match=r"1 of 3 pairs are longer .* after the prompt that they share; .* with 53\. "):
        plan_pairs(sides, 52, share=True)
    assert cut(52, "drop") == [0, 0]
    assert cut(52, "truncate") == [35, 21]  # (52 + 19) // 2 of the longer side, and all of the shorter one
    assert cut(22, "truncate") == [0, 0]  # 20 tokens a side, as many as the prompt has
    packing, report = plan_pairs(sides, 52, overlong="truncate", share=True)
    rows = PairedDataset(pairs, packing, sides, kept_of_sides(sides, 52, "truncate", share=True), share=True)
    assert max(len(row["input_ids"]) for row in rows) <= 52
    assert report.tokens_cut == 51 - 35


@pytest.mark.parametrize(
    ("overlong", "said"),
    [("raise", "2 of 3 pairs are longer than max_length = 38 tokens"), ("split", "truncate or drop")],
)
def test_pairs_that_do_not_fit_are_refused(overlong, said):
    pairs = tokenize_records(Dataset.from_list(TEXT), tiny_tokenizer(), text_field=PAIRS)
    with pytest.raises(ValueError, match=said):
        plan_pairs(sides_of_pairs(pairs), 38, overlong=overlong)


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_data_of_which_no_pair_is_left_is_refused(overlong, tmp_path, capsys):
    """With a way out that exists for pairs."""
    write_lines(tmp_path / "pairs.jsonl", TEXT)
    flags = ["--model_name_or_path", "tiny", "--dataset_name", str(tmp_path / "pairs.jsonl"), "--prepare_only", "True"]
    assert main([*flags, "--max_length", "6", "--overlong", overlong, "--output_dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"--overlong {overlong} leaves no sequence to train on: 3 pairs" in error
    assert "3 pairs dropped" in error
    assert error.strip().endswith("Use a longer --max_length.")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "no token comes before the answers"),
        ({"prompt": message("user", "a"), "chosen": [], "rejected": message("assistant", "b")}, "non-empty list"),
        ({"chosen": message("user", "a"), "rejected": message("user", "b")}, "share no first message"),
        ({"prompt": "a", "completion": "b", "label": True}, "KTOTrainer"),
        ({"prompt": "a", "completion": "b"}, "no 'chosen' and 'rejected' answers"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen"),
        ({"prompt": "a", "chosen": "c", "rejected": "b", "ref_chosen_logps": -1.0}, "'ref_chosen_logps' is not read"),
        ({"prompt": "a", "chosen": "c", "rejected": "b", "system": "s"}, "the column 'system' is not read"),
    ],
)
def test_bad_pairs(record, said, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=said):
        tokenize_records(load_records(str(path), text_field=PAIRS), tiny_tokenizer(), text_field=PAIRS)


def test_an_answer_that_the_template_leaves_out_is_refused():
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match=r"record 0.*: 'chosen' has no tokens"):
        tokenize_records(Dataset.from_list(CHATS), tiny_tokenizer(), text_field=PAIRS, chat_template=template)


def test_masks_of_answers_are_refused():
    masked = [{**pair, "chosen": [{**pair["chosen"][0], "weight": 0}, *pair["chosen"][1:]]} for pair in CHATS[:1]]
    with pytest.raises(DataError, match=r"record 0.*: a message of an answer has a mask"):
        tokenize_records(Dataset.from_list(masked), tiny_tokenizer(), text_field=PAIRS)


NAMED = ["--model_name_or_path", "tiny", "--dataset_name", "pairs.jsonl"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--model_name_or_path is missing"),
        (["--model_name_or_path", "tiny"], "--dataset_name is missing"),
        ([*NAMED, "--overlong", "split"], "--overlong split is refused: a piece of an answer"),
        ([*NAMED, "--dataset_streaming", "True"], "computed for the whole data set"),
        ([*NAMED, "--use_weighting", "True"], "--use_weighting True is refused"),
        ([*NAMED, "--sync_ref_model", "True"], "--sync_ref_model True is refused"),
        ([*NAMED, "--label_smoothing_factor", "0.1"], "That of preferences is --label_smoothing"),
        ([*NAMED, "--loss_type", "aot"], "aot is refused: aot would depend on how pairs are spread over batches"),
        ([*NAMED, "--loss_type", "aot_unpaired"], "--loss_type aot_unpaired is refused: aot would depend"),
        ([*NAMED, "--loss_type", "sigmoid", "dpo"], "--loss_type dpo is refused"),
        ([*NAMED, "--beta", "0"], "--beta 0 is out of range: the loss would not depend on the answers"),
        ([*NAMED, "--eval_strategy", "steps", "--metric_for_best_model", "bleu"], "rewards/accuracies"),
    ],
)
def test_flags_that_are_refused(flags, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        fill(parse_flags(flags, DPO), read_profile({}))


@pytest.mark.parametrize(
    ("flags", "notes"),
    [
        ([], ["reference: the model before training, whose log-probabilities are computed once"]),
        (["--reference_free", "True"], ["reference: none"]),
        (["--loss_type", "sft"], ["reference: the model before training, whose log-probabilities are computed once"]),
        (
            ["--loss_type", "simpo", "--precompute_ref_log_probs", "False"],
            ["the reference is computed before training in any case", "reference: none"],
        ),
    ],
    ids=str,
)
def test_who_has_a_reference(flags, notes):
    settings = fill(parse_flags([*NAMED, *flags], DPO), read_profile({}))
    assert [note for note in settings.notes if "reference" in note] == notes


def test_flags_of_pairs_without_effect_earn_a_note():
    given = ["--disable_dropout", "False", "--ref_model_mixup_alpha", "0.5", "--ref_model_sync_steps", "4"]
    notes = fill(parse_flags([*NAMED, *given], DPO), read_profile({})).notes
    assert [note.split()[0] for note in notes if " has no effect " in note] == given[::2]


def test_a_prompt_that_the_tokenizer_merges_with_the_answers_ends_earlier(monkeypatch):
    """As in TRL; the token of both parts is of the answer."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["e b"])
    said, record = [], {"prompt": "the", "chosen": " blue", "rejected": " black"}
    monkeypatch.setattr("longctx.data.preferences.warn_of_split_prompt", lambda: said.append("prompt"))
    encoder = PairTextEncoder(tokenizer, "prompt+chosen+rejected")
    [ids], *_ = encoder.encode_noted({name: [text] for name, text in record.items()}, [0])
    [expected] = trl_pairs([record], tokenizer)
    prompt, chosen, rejected = (expected[f"{part}_ids"] for part in ("prompt", "chosen", "rejected"))
    assert ids.tolist() == prompt + chosen + prompt + rejected
    assert (tokenizer.decode(prompt), said) == ("th", ["prompt"])


def test_a_model_with_a_loss_of_its_own_is_refused():
    config = Qwen3MoeConfig(output_router_logits=True, router_aux_loss_coef=0.01)
    with pytest.raises(ValueError, match="Add --router_aux_loss_coef 0"):
        _check_model_of_pairs(config)


def test_sums_of_log_probabilities_are_the_same_in_any_order():
    """A GPU adds up in an order of its own; the difference of two equal models would not be 0."""
    values = -(torch.rand(10_000, generator=torch.Generator().manual_seed(0)) ** 8 * 20).requires_grad_()
    exact, places = _summable(values), torch.zeros(len(values), dtype=torch.int64)
    zero = torch.zeros(1, dtype=torch.float64)
    for these, are_equal in ((exact, True), (values.double(), False)):
        there, back = (zero.index_add(0, places, order) for order in (these, these.flip(0)))
        assert torch.equal(there, back) == are_equal
    assert (exact - values).abs().max() <= 2**-31
    assert torch.equal(torch.autograd.grad(exact.sum(), values)[0], torch.ones_like(values))


def test_simpo_is_that_of_trl():
    """Whose CPOTrainer takes the means of log-probabilities."""
    from trl.experimental.cpo import CPOTrainer

    flags = {"beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1}
    logps = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 9 - 30
    lengths = torch.tensor([[3.0, 9, 4, 4, 7], [5, 2, 8, 4, 1]], dtype=torch.float64)
    pairs = Pairs(tuple(logps), tuple(logps), tuple(logps), tuple(lengths))
    trainer = SimpleNamespace(**flags, loss_type="simpo", alpha=0.0, accelerator=SimpleNamespace(device="cpu"))
    expected = CPOTrainer.cpo_loss(trainer, *(logps / lengths))[0]
    torch.testing.assert_close(LOSSES["simpo"](pairs, flags), expected, rtol=1e-12, atol=0)


WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
NOT_SHARED = {  # model, flags and the reason
    "a window in one layer": (Qwen3Config(**SMALL, **WINDOWS), [], "since layers have a sliding window"),
    "convolutions": (
        CONFIG_MAPPING["lfm2"](**SMALL, layer_types=["conv", "full_attention"]),
        [],
        "since recurrent layers pass a state",
    ),
    "chunked attention": (CONFIG_MAPPING["llama4_text"](**LLAMA4), [], "since layers attend within chunks"),
    "chunks of the sequence": (tiny_config(), ["--sequence_chunk_size", "16"], "since the sequence-chunked step"),
    "as asked": (tiny_config(), ["--share_prompts", "False"], "as --share_prompts False asks"),
}


@pytest.mark.parametrize("case", NOT_SHARED)
def test_a_prompt_that_cannot_be_shared_counts_with_each_answer_and_the_summary_says_why(case, tmp_path):
    config, flags, reason = NOT_SHARED[case]
    config.save_pretrained(tmp_path)
    flags = [*flags, "--model_name_or_path", str(tmp_path), "--dataset_name", "pairs.jsonl", "--use_cpu", "True"]
    for method, given in ((DPO, flags), (DPO, flags[-6:])):
        run = resolve(parse_flags(given, method), read_profile({}), {})
        [line] = [line for line in run.summary() if line.label == "prompts"]
        shares = given != flags and config.model_type == "qwen3" and "window" not in case
        assert run.settings["share_prompts"] == shares
        assert line.value == "once for both answers" if shares else line.value.startswith("with each answer, ")
        assert shares or given != flags or reason in line.value


def test_experts_see_each_token_by_itself_and_share_prompts():
    """All but the loss of routers, which counts tokens; it is refused for pairs in any case."""
    config = Qwen3MoeConfig(output_router_logits=False)
    assert branch_obstacle(config, backend_has_branches=True, is_chunked=False) is None
    config.update({"output_router_logits": True, "router_aux_loss_coef": 0.1})
    assert "auxiliary loss" in branch_obstacle(config, backend_has_branches=True, is_chunked=False)
    assert "the backend" in branch_obstacle(tiny_config(), backend_has_branches=False, is_chunked=False)


def test_the_losses_that_flags_name_are_those_that_are_built():
    assert set(dpo.LOSSES) == {*LOSSES, SFT}
