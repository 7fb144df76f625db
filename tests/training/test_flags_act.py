"""A flag that acts on one device acts on sharded engines too."""

from __future__ import annotations

import os

import pytest

from longctx.settings.flags import SFT
from tests.training.test_training import run_cases
from tests.workers import run_ranks

STEPS = "--max_steps 3 --max_length 64 --per_device_train_batch_size 2 --overlong split --save_strategy no"
TRAINED = {
    **{name: f"--optim {name} --learning_rate 1e-3" for name in SFT.flags["optim"].values},
    "no clipping": "--max_grad_norm 0",
    "decay": "--weight_decay 0.1 --adam_beta1 0.8 --adam_beta2 0.9 --adam_epsilon 1e-6",
    "constant": "--lr_scheduler_type constant_with_warmup --warmup_steps 2",
    "checkpointing": "--gradient_checkpointing True",
    "selective": '--gradient_checkpointing True --gradient_checkpointing_kwargs {"selective":true}',
    "other order": "--data_seed 5 --shuffle_dataset True --dataloader_drop_last True --dataloader_num_workers 1",
    "accumulation": "--gradient_accumulation_steps 2",
}


def trained_losses(arguments, folder):
    """{case: [(loss, gradient norm) of each step]} on this process group, or on one process."""
    given = {case: [*STEPS.split(), *flags.split(), "--logging_steps", "1"] for case, flags in TRAINED.items()}
    return run_cases({case: [*arguments, *given[case], "--output_dir", f"{folder}/{case}"] for case in TRAINED})


@pytest.mark.long
@pytest.mark.parametrize("backend", ["ring", "ulysses"])
def test_flags_act_on_sharded_engines_as_on_one_device(backend, tmp_path):
    """Two ranks with FSDP2 or ZeRO-3 against one process without an engine."""
    (tmp_path / "data.jsonl").write_text("".join(f'{{"text": "{i} {"ab" * i}"}}\n' for i in range(1, 30)))
    arguments = ["--model_name_or_path", "tiny", "--dataset_name", str(tmp_path / "data.jsonl"), "--use_cpu"]
    one = run_ranks(1, f"{__name__}:alone", arguments, str(tmp_path / "one"))[0]
    two = [*arguments, "--sp", "2", "--sp_backend", backend]
    for results in run_ranks(2, f"{__name__}:trained_losses", two, str(tmp_path / "two")):
        for case, expected in one.items():
            assert len(results[case]) == len(expected) == 3
            for (loss, norm), (expected_loss, expected_norm) in zip(results[case], expected, strict=True):
                assert loss == pytest.approx(expected_loss, rel=1e-4), case
                assert norm == pytest.approx(expected_norm, rel=1e-3), case


def alone(arguments, folder):
    """`trained_losses` without the group, as a process that no launcher has started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return trained_losses(arguments, folder)
