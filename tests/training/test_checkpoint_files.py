"""A checkpoint's folder is complete or absent, and any number of ranks can read it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from longctx.training.checkpoint.files import CheckpointError, make_partial, take_place, writing
from longctx.training.checkpoint.folder import checkpoints, rotate
from longctx.training.checkpoint.shards import ParameterShard, parameter_shards
from longctx.training.checkpoint.states import StateReader, write_states


def test_ranges_of_any_size_come_together(tmp_path):
    """Three ranks write a checkpoint, and two ranks with other ranges read it."""
    model = torch.nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    (weight, *rest) = list(parameter_shards(model, optimizer))
    for rank, (start, stop) in enumerate([(0, 11), (11, 30), (30, 35)]):
        part = {kind: value[start:stop] if value.dim() else value for kind, value in weight.states.items()}
        held = [
            type(weight)(name=weight.name, shape=weight.shape, start=start, states=part),
            *(rest if not rank else []),
        ]
        write_states(tmp_path, held, rank, file_bytes=50)
    reader = StateReader(tmp_path)
    for start, stop in [(0, 17), (17, 35), (10, 12)]:
        empty = {kind: torch.zeros_like(value[start:stop]) for kind, value in weight.states.items() if value.dim()}
        empty["step"] = torch.zeros(())
        reader.fill(type(weight)(name=weight.name, shape=weight.shape, start=start, states=empty))
        for kind, value in empty.items():
            assert torch.equal(value, weight.states[kind][start:stop] if value.dim() else weight.states[kind]), kind
    (tmp_path / "states-00001-000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks elements 11 to 35 of weight of weight"):
        StateReader(tmp_path).fill(weight)


@pytest.mark.parametrize(
    ("num_ranks", "opened"),
    [(6, [{0}, {1}, {2}, {3}, {4}, {5}]), (3, [{0, 1}, {2, 3}, {4, 5}]), (12, [{n // 2} for n in range(12)])],
)
def test_a_rank_opens_only_the_files_that_hold_its_part(num_ranks, opened, tmp_path):
    """Six ranks wrote 24 elements."""
    whole = torch.arange(24.0)
    for rank in range(6):
        states = {"weight": whole[4 * rank : 4 * rank + 4], "exp_avg": whole[4 * rank : 4 * rank + 4] / 2}
        write_states(tmp_path, [ParameterShard(name="w", shape=(24,), start=4 * rank, states=states)], rank)
    share = 24 // num_ranks
    for rank, expected in enumerate(opened):
        reader = StateReader(tmp_path, rank=rank, num_ranks=num_ranks)
        reader.find({"exp_avg"})
        states = {"weight": torch.zeros(share), "exp_avg": torch.zeros(share)}
        reader.fill(ParameterShard(name="w", shape=(24,), start=share * rank, states=states))
        assert torch.equal(states["weight"], whole[share * rank : share * (rank + 1)])
        assert torch.equal(states["exp_avg"], states["weight"] / 2)
        assert {int(path.name.split("-")[1]) for path in reader._open} == expected, rank


def test_kinds_of_states_that_the_nearest_files_lack_are_found(tmp_path):
    """A parameter that never had a gradient has no states."""
    write_states(tmp_path, [ParameterShard(name="a", shape=(2,), start=0, states={"weight": torch.ones(2)})], 0)
    states = {"weight": torch.ones(2), "exp_avg": torch.ones(2), "step": torch.ones(())}
    write_states(tmp_path, [ParameterShard(name="b", shape=(2,), start=0, states=states)], 1)
    reader = StateReader(tmp_path, rank=0, num_ranks=2)
    assert reader.kinds(scalars=False) == ["weight"]
    reader.find({"exp_avg", "step"})
    assert reader.kinds(scalars=False) == ["exp_avg", "weight"]
    assert reader.kinds(scalars=True) == ["step"]


@pytest.mark.parametrize(("settings", "device"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_the_count_of_steps_is_made_where_the_optimizer_makes_it(settings, device):
    """Fused and captured kernels read it on the parameters' device, here one that stands for a GPU."""
    model = torch.nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for piece in parameter_shards(model, optimizer, kinds=["exp_avg", "exp_avg_sq"], scalars=["step"]):
        assert {kind: value.device.type for kind, value in piece.states.items()} == {
            **dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), "meta"),
            "step": device,
        }


def test_what_fails_leaves_nothing_and_keeps_what_was_there(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "old").touch()

    def write():
        with writing(tmp_path / "checkpoint-3", is_owner=True) as partial:
            make_partial(partial)
            (partial / "new").touch()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint-3", "old"]


def make_checkpoints(folder, *steps, whole=True):
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
        if whole:
            (folder / f"checkpoint-{step}" / "longctx.json").touch()


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, {5, 10, 15, 20}),
        (1, None, {15}),
        (2, None, {10, 15}),
        (2, 5, {5, 15}),
        (1, 5, {5, 15}),
        (4, None, {5, 10, 15, 20}),
    ],
)
def test_what_was_just_saved_and_the_best_stay(limit, best, left, tmp_path):
    """A run that goes on from 10, since 20 is damaged, has saved 15. Only checkpoints are deleted."""
    make_checkpoints(tmp_path, 5, 10, 15, 20)
    for name in ("checkpoint-10-mine", "checkpoint-best", "checkpoint-7.tar"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-12.partial", "checkpoint-5.replaced"):
        (tmp_path / name).mkdir()
    rotate(tmp_path / "checkpoint-15", limit=limit, best=best and str(tmp_path / f"checkpoint-{best}"))
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"checkpoint-10-mine", "checkpoint-best", "checkpoint-7.tar", *(f"checkpoint-{n}" for n in left)}


def test_one_that_is_being_replaced_is_found(tmp_path):
    """A kill between its two names: the old one is whole, and in no other place than the new one will be."""
    make_checkpoints(tmp_path, 3, 6)
    (tmp_path / "checkpoint-6").rename(tmp_path / "checkpoint-6.replaced")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-6.replaced", "checkpoint-3"]
    make_checkpoints(tmp_path, 6)
    assert checkpoints(tmp_path)[0].name == "checkpoint-6"


def test_a_checkpoint_stays_until_the_one_that_repeats_it_has_its_name(tmp_path, monkeypatch):
    """A kill before each of the two renames leaves a whole one: the old one, under one of its names."""
    moved, replace = [], os.replace

    def killed(source, target):
        if len(moved) == at:
            raise KeyboardInterrupt
        moved.append(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    for at in (0, 1):
        moved.clear()
        folder = tmp_path / str(at)
        folder.mkdir()
        make_checkpoints(folder, 3)
        (folder / "checkpoint-3.partial").mkdir()
        with pytest.raises(KeyboardInterrupt):
            take_place(folder / "checkpoint-3.partial", folder / "checkpoint-3")
        assert len(checkpoints(folder)) == 1


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
