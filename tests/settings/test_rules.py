"""Every rule of settings refuses what breaks it."""

from __future__ import annotations

import pytest

from longctx.launch.accelerate import MACHINE_FLAGS
from longctx.settings.dpo import DPO, DPO_RULES
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.rules import RULES, fill

TRAIN = "--model_name_or_path tiny --dataset_name stdlib"
MIXED = "--model_name_or_path tiny --datasets a b"
FRACTION = "datasets: [{path: a, fraction: %s}, {path: b}]"
EPOCH = f"{TRAIN} --eval_strategy epoch"
STREAM = f"{TRAIN} --dataset_streaming True --max_steps 1"

BREAKING = [
    *((f"{name} accelerate_config", f"{TRAIN} --{name} 1") for name in MACHINE_FLAGS),
    ("eval_on_start eval_strategy", f"{TRAIN} --eval_on_start True"),
    ("eval_generate eval_strategy", f"{TRAIN} --eval_generate 2"),
    ("load_best_model_at_end eval_strategy", f"{TRAIN} --load_best_model_at_end True"),
    ("early_stopping_patience eval_strategy", f"{TRAIN} --early_stopping_patience 2"),
    ("metric_for_best_model eval_strategy", f"{EPOCH} --metric_for_best_model bleu"),
    ("save_only_model load_best_model_at_end", f"{EPOCH} --load_best_model_at_end True --save_only_model True"),
    ("eval_steps", f"{TRAIN} --eval_strategy steps --eval_steps 1.5"),
    ("max_steps", f"{TRAIN} --max_steps 0"),
    ("num_train_epochs max_steps", f"{TRAIN} --num_train_epochs 0"),
    ("profile max_steps", f"{TRAIN} --profile True --max_steps 2"),
    ("logging_steps logging_strategy", f"{TRAIN} --logging_steps 0"),
    ("chat_template_path", f"{TRAIN} --chat_template_path no_such.jinja"),
    ("attn_implementation", f"{TRAIN} --attn_implementation kernels-community/flash-attn3"),
    ("attn_implementation", f"{TRAIN} --attn_implementation flash"),
    ("report_to", f"{TRAIN} --report_to paper"),
    ("dataset_name datasets", f"{MIXED} --dataset_name stdlib"),
    ("dataset_weights datasets", f"{MIXED} --dataset_weights 1"),
    ("dataset_weights datasets", "--dataset_weights 1 2", FRACTION % 0.5),
    ("datasets", "", FRACTION % 0.5),
    ("datasets", "", "datasets: [{path: a, fraction: 0}]"),
    ("datasets dataset_streaming", "--streaming True --max_steps 1", "datasets: [{path: a, fraction: 0.5}]"),
    ("test_split_size dataset_streaming", f"{STREAM} --test_split_size 0.5"),
    (
        "test_split_size dataset_weights dataset_stopping_strategy",
        f"{MIXED} --test_split_size 0.5 --dataset_weights 1 2 --dataset_stopping_strategy all_exhausted",
    ),
    ("dataset_streaming max_steps", f"{TRAIN} --dataset_streaming True"),
    ("balance_packs dataset_streaming", f"{STREAM} --balance_packs True"),
    ("eval_strategy dataset_streaming", f"{STREAM} --eval_strategy epoch"),
    ("logging_strategy dataset_streaming", f"{STREAM} --logging_strategy epoch"),
    ("prepare_only dataset_streaming", f"{STREAM} --prepare_only True"),
    ("save_strategy dataset_streaming", f"{STREAM} --save_strategy epoch"),
    ("shuffle_dataset dataset_streaming", f"{STREAM} --shuffle_dataset True"),
    ("packing_strategy dataset_streaming", f"{STREAM} --packing_strategy wrapped"),
]
BREAKING_OF_DPO = [
    ("loss_weights loss_type", f"{TRAIN} --loss_weights 1 2"),
    ("loss_type", f"{TRAIN} --loss_type simpo sigmoid"),
    ("f_divergence_type loss_type", f"{TRAIN} --loss_type simpo --f_divergence_type js_divergence"),
    ("label_smoothing loss_type", f"{TRAIN} --loss_type robust --label_smoothing 0.5"),
    ("loss_type label_smoothing", f"{TRAIN} --loss_type exo_pair"),
]
"""A command line, and a run file beside it, for each rule of each table in its order, under the rule's flags."""
EACH = [(SFT, rule, case) for rule, case in zip(RULES, BREAKING, strict=True)]
EACH += [(DPO, rule, case) for rule, case in zip(DPO_RULES, BREAKING_OF_DPO, strict=True)]


@pytest.mark.parametrize(("method", "rule", "case"), EACH, ids=[rule.flags for _, rule, _ in EACH])
def test_what_breaks_a_rule_is_refused(method, rule, case, tmp_path):
    flags, line, *file = case
    assert rule.flags == flags
    if file:
        (tmp_path / "run.yaml").write_text(file[0], encoding="utf-8")
        line += f" --model_name_or_path tiny --config {tmp_path}/run.yaml"
    settings = parse_flags(line.split(), method)
    with pytest.raises(ValueError, match=rf"^--{rule.flags.split()[0]} ") as refused:
        fill(settings, read_profile({}))
    told = str(refused.value)
    assert "\n" not in told, "a case breaks one rule"
    if isinstance(rule.why, str):
        assert rule.why in told
