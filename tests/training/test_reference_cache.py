"""What the kept log-probabilities of a reference model are found by: all that decides how a forward pass rounds."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

import longctx.parallel
from tests.jsonl import write_lines
from tests.training.test_dpo import PACKED, flags_of, histories, make_pairs
from tests.workers import run_ranks


def files_kept(flags, cache):
    """Numbers of kept files after a run, after the same run again, and after it on as many nodes as devices."""
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    found = []
    for devices_per_node in (2, 2, 1):
        longctx.parallel.devices_per_node = lambda *_, here=devices_per_node: here
        histories({"": flags})
        found.append(len(list(Path(cache, "longctx").glob("reference-*.npy"))))
    return found


@pytest.mark.long
def test_a_ring_that_another_machine_plans_computes_the_reference_anew(saved_model, tmp_path):
    """Speeds of links decide which rank holds which tokens, and so the order in which attention adds up."""
    data = tmp_path / "pairs.jsonl"
    write_lines(data, make_pairs())
    flags = [*flags_of("sigmoid", {}, saved_model, data, tmp_path / "out"), "--overwrite_output_dir", "True"]
    flags += ["--cp", "2", *PACKED, "--max_steps", "1"]
    assert run_ranks(2, f"{__name__}:files_kept", flags, str(tmp_path / "cache"))[0] == [1, 1, 2]
