"""A checkpoint's folder is complete or absent, and any number of ranks can read it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from longctx.training.checkpoint.files import CHECKPOINT, LEFT_BEHIND, CheckpointError, remove, take_place
from longctx.training.checkpoint.folder import checkpoints, rotate
from longctx.training.checkpoint.shards import ParameterShard, parameter_shards
from longctx.training.checkpoint.storage import INDEX, StateReader, write_index, write_states


def write(folder, pieces_of_ranks, shapes, **settings):
    """Write the ranges of each rank, and the index."""
    written = [write_states(folder, held, rank, **settings) for rank, held in enumerate(pieces_of_ranks)]
    kinds = {kind: is_scalar for _, of_rank in written for kind, is_scalar in of_rank.items()}
    write_index(folder, [ranges for ranges, _ in written], kinds, shapes)


def test_ranges_of_any_size_come_together(tmp_path):
    """Three ranks write a checkpoint, and two ranks with other ranges read it."""
    model = torch.nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    (weight, bias) = list(parameter_shards(model, optimizer))
    ranks = []
    for start, stop in [(0, 11), (11, 30), (30, 35)]:
        part = {kind: value[start:stop] if value.dim() else value for kind, value in weight.states.items()}
        ranks.append([replace(weight, start=start, states=part), *([] if ranks else [bias])])
    shapes = {"weight": [7, 5], "bias": [7]}
    write(tmp_path, ranks, shapes, file_bytes=50)
    reader = StateReader(tmp_path, shapes)
    assert reader.kinds == {"weight": False, "exp_avg": False, "exp_avg_sq": False, "step": True}
    for start, stop in [(0, 17), (17, 35), (10, 12)]:
        empty = {kind: torch.zeros_like(value[start:stop]) for kind, value in weight.states.items() if value.dim()}
        empty["step"] = torch.zeros(())
        reader.fill(replace(weight, start=start, states=empty))
        for kind, value in empty.items():
            assert torch.equal(value, weight.states[kind][start:stop] if value.dim() else weight.states[kind]), kind
    (tmp_path / "states-00001-000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"states-00001-000.safetensors is missing"):
        StateReader(tmp_path, shapes).fill(weight)


def test_a_rank_opens_only_the_files_that_hold_its_part(tmp_path):
    """Six ranks wrote 24 elements, of which this one has 8."""
    write(tmp_path, [[piece("w", torch.arange(24.0), 4 * rank, 4)] for rank in range(6)], {"w": [24]})
    reader = StateReader(tmp_path, {"w": [24]})
    reader.fill(piece("w", torch.zeros(24), 8, 8))
    assert {path.name for path in reader._stored} == {f"states-0000{rank}-000.safetensors" for rank in (2, 3)}


def piece(name, whole, start, length, *kinds):
    """A range of a parameter, with states that are half of it."""
    states = {"weight": whole[start : start + length]}
    states |= dict.fromkeys(kinds, states["weight"] / 2)
    return ParameterShard(name=name, shape=tuple(whole.shape), start=start, states=states)


def test_weights_that_the_models_files_hold_are_read_from_there(tmp_path):
    whole, shapes = torch.arange(24.0), {"w": [24]}
    ranks = [[piece("w", whole, 12 * rank, 12, "exp_avg")] for rank in range(2)]
    write(tmp_path, ranks, shapes, leave_out=["weight"])
    save_file({"other": -whole, "w": whole}, tmp_path / "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    read = piece("w", torch.zeros(24), 3, 17, "exp_avg")
    StateReader(tmp_path, shapes).fill(read)
    assert torch.equal(read.states["weight"], whole[3:20])
    assert torch.equal(read.states["exp_avg"], whole[3:20] / 2)
    for wrong in (torch.zeros(12, 2), torch.zeros(25), torch.zeros(24, dtype=torch.int32)):
        save_file({"w": wrong}, tmp_path / "model-00001-of-00001.safetensors")
        with pytest.raises(CheckpointError, match=r"of-00001.safetensors is damaged: 'w' is of type [FI]32"):
            StateReader(tmp_path, shapes).fill(read)
    index.write_text(json.dumps({"weight_map": {"w": "../model-00001-of-00001.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names '\.\./model-00001-of-00001.safetensors', outside its folder"):
        StateReader(tmp_path, shapes).fill(read)


@pytest.mark.parametrize("parts", [[(0, 4), (4, 3)], [(0, 4), (5, 3)], [(0, 5), (4, 4)], [(1, 7)], [(0, 9)]])
def test_ranges_that_do_not_make_up_a_parameter_are_not_saved(parts, tmp_path):
    ranks = [[piece("w", torch.ones(9), start, length, "exp_avg")] for start, length in parts]
    with pytest.raises(ValueError, match="the ranks hold w in ranges that overlap or leave a gap"):
        write(tmp_path, ranks, {"w": [8]})


def test_a_parameter_that_no_rank_holds_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="no rank holds a range of v"):
        write(tmp_path, [[piece("w", torch.ones(8), 0, 8, "exp_avg")]], {"w": [8], "v": [2]})


STATES = "states-00000-000.safetensors"


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("starts", lambda w: w["starts"].__setitem__(1, 3), r"states-00000-000.* is damaged: 'weight\|0\|w' is of"),
        ("starts", lambda w: w["starts"].__setitem__(1, 0), r"index.json is damaged: the ranges of w start at"),
        ("starts", lambda w: w["starts"].__setitem__(0, 1), r"index.json is damaged: the ranges of w start at"),
        ("starts", lambda w: w["starts"].__setitem__(1, 8), r"index.json is damaged: the ranges of w start at"),
        ("starts", lambda w: w["starts"].__setitem__(1, 4.0), r"index.json is damaged: w has the ranges"),
        ("starts", lambda w: w["starts"].pop(), r"index.json is damaged: w has the ranges"),
        ("files", lambda w: w["files"].__setitem__(0, 2), r"index.json is damaged: w is in the files"),
        ("files", lambda w: w["files"].reverse(), r"states-00001-000.* is damaged"),
    ],
)
def test_an_index_that_lies_is_refused_by_file(name, change, message, tmp_path):
    write(tmp_path, [[piece("w", torch.arange(8.0), 4 * rank, 4, "exp_avg")] for rank in range(2)], {"w": [8]})
    change_index(tmp_path, lambda index: change(index["parameters"]["w"]))
    with pytest.raises(CheckpointError, match=message):
        StateReader(tmp_path, {"w": [8]}).fill(piece("w", torch.zeros(8), 0, 8, "exp_avg"))


def test_an_index_without_a_parameter_is_of_another_model(tmp_path):
    write(tmp_path, [[piece("w", torch.ones(8), 0, 8)]], {"w": [8]})
    with pytest.raises(CheckpointError, match=r"index\.json has no ranges of v: it is of another model"):
        StateReader(tmp_path, {"w": [8], "v": [8]}).fill(piece("v", torch.zeros(8), 0, 8))


@pytest.mark.parametrize("file", [f"../{STATES}", f"{STATES}.index.json", "model"])
def test_an_index_names_files_of_states_alone(file, tmp_path):
    write(tmp_path, [[piece("w", torch.ones(8), 0, 8)]], {"w": [8]})
    change_index(tmp_path, lambda index: index.update(files=[file]))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged: .* is not the name of a file of states"):
        StateReader(tmp_path, {"w": [8]})


@pytest.mark.parametrize(("settings", "device"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_the_count_of_steps_is_made_where_the_optimizer_makes_it(settings, device):
    """Fused and captured kernels read it on the parameters' device, here one that stands for a GPU."""
    model = torch.nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    expected = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), "meta") | {"step": device}
    for piece in parameter_shards(model, optimizer, {"exp_avg": False, "exp_avg_sq": False, "step": True}):
        assert {kind: value.device.type for kind, value in piece.states.items()} == expected


def make_checkpoints(folder, *steps):
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "longctx.json").touch()


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [(None, None, {5, 10, 15, 20}), (1, None, {15}), (2, None, {10, 15}), (1, 5, {5, 15}), (4, None, {5, 10, 15, 20})],
)
def test_what_was_just_saved_and_the_best_stay(limit, best, left, tmp_path):
    """A run that goes on from 10, since 20 is damaged, has saved 15. Only checkpoints are deleted."""
    make_checkpoints(tmp_path, 5, 10, 15, 20)
    others = {"checkpoint-10-mine", "checkpoint-best", "checkpoint-7.tar"}
    for name in {*others, "checkpoint-12.partial", "checkpoint-5.replaced"}:
        (tmp_path / name).mkdir()
    rotate(tmp_path / "checkpoint-15", limit=limit, best=best and str(tmp_path / f"checkpoint-{best}"))
    found = {path.name for path in tmp_path.iterdir()}
    assert found == others | {f"checkpoint-{n}" for n in left}


def test_a_checkpoint_stays_until_the_one_that_repeats_it_has_its_name(tmp_path, monkeypatch):
    """A kill before each of the two renames leaves a whole one, under one of its names, which the next save keeps."""
    moved, replace = [], os.replace

    def killed(source, target):
        if len(moved) == at:
            raise KeyboardInterrupt
        moved.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    for at in (0, 1, 2):  # the first clears the name that the old one gets
        moved.clear()
        folder = tmp_path / str(at)
        folder.mkdir()
        make_checkpoints(folder, 3, 6)
        (folder / "checkpoint-3.partial").mkdir()
        with pytest.raises(KeyboardInterrupt):
            take_place(folder / "checkpoint-3.partial", folder / "checkpoint-3")
        names = {"checkpoint-6", "checkpoint-3.replaced" if at == 2 else "checkpoint-3"}
        assert {path.name for path in checkpoints(folder)} == names
        rotate(folder / "checkpoint-6", limit=None, best=None)
        assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize("name", ["checkpoint-3", "checkpoint-6.replaced"])
def test_a_kill_while_an_old_one_is_deleted_leaves_nothing_of_its_name(name, tmp_path, monkeypatch):
    """It would be the folder that was changed last, without a manifest."""
    make_checkpoints(tmp_path, 6)
    (tmp_path / name).mkdir()
    (tmp_path / name / "longctx.json").touch()

    def killed(folder, **options):
        if folder.exists():
            (folder / "longctx.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path / name)
    (left,) = {path.name for path in tmp_path.iterdir()} - {"checkpoint-6"}
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-6"]
    assert not CHECKPOINT.fullmatch(left)
    assert LEFT_BEHIND.fullmatch(left)
    rotate(tmp_path / "checkpoint-6", limit=None, best=None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]


def test_padding_of_a_part_is_not_written():
    """Seven elements are split into two parts of four. The last element of the second part is padding."""
    flat, model = torch.arange(10.0), torch.nn.Linear(7, 1, bias=False)
    zero = SimpleNamespace(optimizer=torch.optim.SGD([flat], lr=1.0), fp32_partitioned_groups_flat=[flat])
    zero.get_param_id, zero.grad_position = lambda parameter: 0, [(0, 2, 4)]
    zero._swappable_optimizer_subgroup = lambda group: False
    for rank, numel in ((0, 4), (1, 3)):
        zero._get_param_partition_rank = lambda parameter, rank=rank: rank
        (piece,) = parameter_shards(model, zero)
        assert (piece.start, piece.states["weight"].tolist()) == (4 * rank, flat[2 : 2 + numel].tolist())
    zero._get_param_partition_rank = lambda parameter: 2
    assert not list(parameter_shards(model, zero))
    zero._swappable_optimizer_subgroup = lambda group: True
    with pytest.raises(ValueError, match=r"optimizer states on NVMe are neither saved .*--save_only_model True"):
        list(parameter_shards(model, zero))
