"""Preparing data once: plans on disk, --prepare_only, ranks that wait for the first."""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch.distributed as dist

import longctx.data.encoders
import longctx.training.dataset
from longctx.model.load import load_config
from longctx.packing import Packing, load_plan, plan_packing, save_plan
from longctx.ranks.agreement import RefusedOnAllRanks, main_process_first
from longctx.run.preparation import agree_on_output
from longctx.settings.flags import SFT
from longctx.train import main
from longctx.training import fingerprint
from longctx.training.dataset import StreamedData
from longctx.training.fingerprint import column_arrays, digest
from tests.jsonl import write_lines
from tests.workers import run_ranks

LENGTHS = np.array([90, 7, 41, 0, 130, 64, 2, 300, 17, 88])


# ------------------------------------------------------------------------------------------------
# Plans on disk
# ------------------------------------------------------------------------------------------------


def kept_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def assert_same(kept, packing: Packing, report) -> None:
    assert kept is not None
    assert kept[1] == report
    for name in ("indices", "offsets", "starts", "stops"):
        mine, theirs = getattr(packing, name), getattr(kept[0], name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype
    assert kept[0].capacity == packing.capacity


def test_damaged_and_foreign_files_are_no_plans(tmp_path):
    assert load_plan(tmp_path, "abc") is None
    for overlong in ("drop", "truncate", "split"):
        packing, report = plan_packing(LENGTHS, 128, overlong=overlong)
        save_plan(tmp_path, "abc", packing, report)
        assert_same(load_plan(tmp_path, "abc"), packing, report)
    path = kept_file(tmp_path)
    whole = path.read_bytes()
    path.with_name("plan-other.npz").write_bytes(whole)
    assert load_plan(tmp_path, "other") is None
    for damaged in (b"", b"no zip", whole[:-30], whole[: len(whole) // 2], bytes(len(whole))):
        path.write_bytes(damaged)
        assert load_plan(tmp_path, "abc") is None
    for position in range(0, len(whole), 3):  # every byte is content, a checksum of it, or a name
        flipped = bytearray(whole)
        flipped[position] ^= 0x5A
        path.write_bytes(flipped)
        kept = load_plan(tmp_path, "abc")
        if kept is not None:  # time stamps, and other bytes that mean nothing
            assert_same(kept, packing, report)


@pytest.mark.parametrize(
    "changed",
    [
        {"indices": np.array(["a"] * 3)},
        {"indices": np.array([{}], dtype=object)},
        {"offsets": np.array([0, 2, 1, 12])},
        {"starts": None},
        {"header": np.array("{}")},
        {"header": np.array("[")},
    ],
    ids=str,
)
def test_a_file_with_other_arrays_is_no_plan(changed, tmp_path):
    packing, report = plan_packing(LENGTHS, 128, overlong="split")
    save_plan(tmp_path, "abc", packing, report)
    path = kept_file(tmp_path)
    with np.load(path) as file:
        arrays = dict(file) | changed
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    assert load_plan(tmp_path, "abc") is None


# ------------------------------------------------------------------------------------------------
# --prepare_only
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def run_flags(tmp_path, monkeypatch):
    """Flags of a small run on text, with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    data = write_lines(tmp_path / "data.jsonl", ({"text": f"{i} " * (20 + 7 * i)} for i in range(40)))
    flags = ["--model_name_or_path", "tiny", "--dataset_name", data, "--max_length", "256"]
    return [*flags, "--overlong", "split", "--output_dir", str(tmp_path / "out")]


def never(*args, **kwargs):
    raise AssertionError("called")


def plans(tmp_path):
    return sorted((tmp_path / "cache" / "longctx").glob("plan-*.npz"))


def test_prepare_only_prints_the_report_and_loads_no_weights(run_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("longctx.run.model.load_model", never)
    monkeypatch.setattr("longctx.launch.spawn.spawn", never)
    monkeypatch.setattr("torch.distributed.init_process_group", never)
    assert main([*run_flags, "--prepare_only", "--sp", "4"]) == 0
    output = capsys.readouterr().out
    assert "packing   40 documents with " in output
    assert "no token lost" in output
    (plan,) = plans(tmp_path)
    assert load_plan(plan.parent, plan.stem.removeprefix("plan-"))[0].capacity == 256  # of a whole sequence at any sp
    assert not (tmp_path / "out").exists()


def test_prepare_only_on_other_local_ranks_is_over_at_once(run_flags, tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("longctx.training.dataset.prepare_data_set", never)
    assert main([*run_flags, "--prepare_only"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("num_proc", [[], ["--dataset_num_proc", "2"]])
def test_what_cannot_be_tokenised_is_named_with_its_file(num_proc, run_flags, tmp_path, capsys):
    lines = ['{"input_ids": [1, 2]}'] * 5 + ["", '{"input_ids": [1, 99999]}']
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    assert main([*run_flags, *num_proc, "--prepare_only"]) == 2
    assert f"{tmp_path}/data.jsonl:7: 'input_ids' holds the token id 99999" in capsys.readouterr().err


@pytest.mark.long
def test_a_later_run_neither_tokenises_nor_plans(run_flags, tmp_path, monkeypatch):
    assert main([*run_flags, "--prepare_only"]) == 0
    (before,) = plans(tmp_path)
    written = before.stat().st_mtime_ns
    monkeypatch.setattr(longctx.data.encoders.Encoder, "__call__", never)
    with monkeypatch.context() as patch:
        patch.setattr(longctx.training.dataset, "plan_packing", never)
        assert main([*run_flags, "--prepare_only"]) == 0
        assert main([*run_flags, "--max_steps", "1", "--report_to", "none", "--save_strategy", "no"]) == 0
    assert before.stat().st_mtime_ns == written
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["log_history"][0]["packing"]["documents"] == 40
    for other in (["--max_length", "128"], ["--seed", "7"], ["--packing", "False"], ["--overlong", "drop"]):
        count = len(plans(tmp_path))
        assert main([*run_flags, *other, "--prepare_only"]) == 0
        assert len(plans(tmp_path)) == count + 1


def test_a_damaged_or_wrong_plan_is_replaced(run_flags, tmp_path, capsys):
    assert main([*run_flags, "--prepare_only"]) == 0
    (path,) = plans(tmp_path)
    right, expected = path.read_bytes(), capsys.readouterr().out
    key = path.stem.removeprefix("plan-")
    packing, report = load_plan(path.parent, key)
    lengths = np.bincount(packing.indices, packing.stops - packing.starts).astype(np.int64)
    other, fewer = (plan_packing(some, 256, overlong="split") for some in (LENGTHS, lengths[:-1]))
    lying = Packing(**vars(packing) | {"indices": np.zeros_like(packing.indices)})
    for spoil in (
        lambda: path.write_bytes(b"no zip"),
        lambda: save_plan(path.parent, key, *other),
        lambda: save_plan(path.parent, key, *fewer),
        lambda: save_plan(path.parent, key, lying, report),
    ):
        spoil()
        assert main([*run_flags, "--prepare_only"]) == 0
        assert capsys.readouterr().out == expected
        assert load_plan(path.parent, key) is not None
        np.testing.assert_array_equal(load_plan(path.parent, key)[0].indices, packing.indices)
    assert len(right) == path.stat().st_size


# ------------------------------------------------------------------------------------------------
# Ranks that wait
# ------------------------------------------------------------------------------------------------


def outcome(function, *arguments):
    """What a function returns, or the message of what ends it on all ranks."""
    try:
        return function(*arguments)
    except RefusedOnAllRanks as error:
        return str(error)


def prepare_on_two_nodes(folder, model):
    """Rank 0 on one node, ranks 1 and 2 on another, each with a disk of its own behind the same relative path: what
    each has prepared, how often it has read the files of model and stream, and where --save_on_each_node acts."""
    dist.barrier()  # no rank begins before all have come, however busy the machine is
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(datetime.timedelta(seconds=2), dist.group.WORLD)  # less than the work takes
    rank = dist.get_rank()
    node = Path(folder, "first" if rank == 0 else "second")
    os.environ |= {"GROUP_RANK": "0" if rank == 0 else "1", "LOCAL_RANK": str(max(rank - 1, 0))}
    node.mkdir(exist_ok=True)
    os.chdir(node)

    def work():
        if Path("made").exists():
            return "read", Path("made").read_text(), None
        begin = time.monotonic()
        time.sleep(3)
        Path("made").write_text(str(rank))
        return "made", str(rank), (begin, time.monotonic())

    prepared = main_process_first(work, "cache")
    args = SimpleNamespace(process_index=rank, local_process_index=max(rank - 1, 0), save_only_model=False)
    settings = {"model_name_or_path": model, "use_peft": True, "datasets": [], "dataset_name": f"{folder}/stream.txt"}
    settings |= {"dataset_streaming": True, "dataset_text_field": "text"}
    read, content_digests = [], fingerprint.content_digests
    fingerprint.content_digests = lambda files: read.append(files) or content_digests(files)
    fingerprint.compare_files(settings, load_config(model), StreamedData(rows=None), args)

    def on_each_node(output_dir, asked, best=False):
        args.output_dir, args.save_on_each_node, args.load_best_model_at_end = output_dir, asked, best
        return outcome(agree_on_output, args) or args.save_on_each_node

    outputs = on_each_node(f"{folder}/common", True), on_each_node("own", True)
    return prepared, len(read), outputs, (on_each_node("own", False), on_each_node("own", True, best=True))


@pytest.mark.long
def test_each_node_prepares_once_where_files_are_not_shared(models, tmp_path):
    (tmp_path / "stream.txt").write_text("a stream")
    found = run_ranks(3, f"{__name__}:prepare_on_two_nodes", str(tmp_path), models["GQA 4:2"])
    prepared, read, outputs, refused = zip(*found, strict=True)
    (*first, at), (*second, meanwhile), third = prepared
    assert (first, second, third) == (["made", "0"], ["made", "1"], ("read", "1", None))
    assert max(at[0], meanwhile[0]) < min(at[1], meanwhile[1])  # both at the same time
    assert read == (2, 0, 0)  # model and stream, which all nodes see, by the first rank
    assert set(outputs) == {(False, True)}  # rank 0 writes into a common folder, with the flag too
    for without, with_best in refused:
        assert "is not the folder that rank 0 has by that name. Name one on a file system that all nodes" in without
        assert "--load_best_model_at_end reads the files of all ranks" in with_best


def test_documents_are_known_by_their_labels_too():
    """What a resumed run compares: tokens, labels, and where each document ends."""
    ids = {"input_ids": [[1, 2, 3], [4, 5]]}
    columns = [ids, ids | {"labels": [[1, 2, 3], [4, 5]]}, ids | {"labels": [[1, -100, 3], [4, 5]]}]
    columns.append({"input_ids": [[1, 2], [3, 4, 5]]})
    assert len({digest(column_arrays(datasets.Dataset.from_dict(of))) for of in columns}) == 4


def test_states_of_adamw_belong_to_all_its_flags():
    adamw = {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"}
    assert adamw | {"optim", "lr_scheduler_type"} <= {name for name, flag in SFT.flags.items() if flag.resume == "same"}
