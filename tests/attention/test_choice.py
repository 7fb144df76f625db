"""Which backend `auto` takes, that it can run, and the numbers behind it."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longctx
from longctx.attention.backends import BACKENDS
from longctx.attention.choice import (
    BackendChoice,
    Documents,
    arrangements,
    assumed_documents,
    choose_backend,
)
from longctx.attention.cost import Arrangement, RingWork, Setup
from longctx.attention.modelled import attention_time
from longctx.machine.here import Machine
from longctx.machine.measure import measure_link
from longctx.machine.speeds import FLOPS_BACKWARD, FLOPS_FORWARD, TABLE, Link, Speeds
from longctx.model.tiny import tiny_model
from longctx.sequence.mesh import ParallelDims
from tests.workers import run_ranks

ONE_LONG = 131_072


@pytest.fixture(scope="module", autouse=True)
def four_to_choose_from():
    """The lists of this file stay true when another backend is registered."""
    with pytest.MonkeyPatch.context() as patch:
        for name in BACKENDS.keys() - {"local", "ulysses", "ring", "gather", "hybrid"}:
            patch.delitem(BACKENDS, name)
        yield


def machine_of(device: str, node: int, **speeds) -> Machine:
    return replace(Machine.of(device, node), speeds=replace(Speeds.of(device), **speeds))


def a_setup(
    sp: int, heads: int, kv_heads: int, *, node: int = 8, device: str = "H100", head_size: int = 128, **speeds
) -> Setup:
    return Setup(
        sp=sp,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=head_size,
        element_size=2,
        machine=machine_of(device, node, **speeds),
    )


def one(length: int = ONE_LONG) -> Documents:
    return Documents(rows=[np.array([length])], source="one document")


def many(length: int, row: int = ONE_LONG) -> Documents:
    return Documents(rows=[np.full(row // length, length)], source="many documents")


def auto(setup: Setup, documents: Documents | None = None, **options) -> BackendChoice:
    return choose_backend("auto", setup, documents or one(), **options)


QWEN3_8B = (32, 8)
QWEN2_HALF_B = (14, 2)


@pytest.mark.parametrize("documents", [one(), one(1 << 20), assumed_documents(ONE_LONG, packed=True)])
def test_ulysses_where_heads_and_node_allow(documents):
    assert str(auto(a_setup(8, *QWEN3_8B), documents).arrangement) == "ulysses 8"


SLOW = {"across": Link(2e9, 2e9)}


@pytest.mark.parametrize(
    ("setup", "documents", "taken"),
    [
        (a_setup(16, *QWEN3_8B), one(), "ulysses 8 × ring 2"),
        (a_setup(32, *QWEN3_8B), one(1 << 20), "ulysses 8 × ring 4"),
        (a_setup(8, *QWEN3_8B, node=4), assumed_documents(ONE_LONG, packed=True), "ulysses 4 × ring 2"),
        (a_setup(4, *QWEN2_HALF_B, head_size=64), one(), "ulysses 2 × ring 2"),
        (a_setup(4, 3, 3), one(), "ring 4"),
        (a_setup(8, 32, 1), one(), "ulysses 8"),
        (a_setup(4, 32, 1, node=1, **SLOW), one(32_768), "(ring|gather) 4"),
        (a_setup(4, 32, 32, node=1, **SLOW), one(32_768), "ulysses 4"),
        (a_setup(8, *QWEN3_8B), many(512), "ring 8"),
    ],
)
def test_auto_takes_what_is_fast(setup, documents, taken):
    """Ulysses within a node and a ring across nodes, or of what the heads leave.

    Ulysses repeats a single key/value head on every rank, while a ring passes one head on, which a slow link makes the
    better. A ring gives every short document to one rank, so that nothing travels.
    """
    assert re.fullmatch(taken, str(auto(setup, documents).arrangement))


def test_an_earlier_choice_stays_unless_another_is_much_better():
    setup = a_setup(8, *QWEN3_8B)
    before = auto(setup, one())
    assert str(before.arrangement) == "ulysses 8"
    short = auto(setup, many(512), before=before)
    assert str(short.arrangement) == "ring 8"
    back = auto(setup, one(), before=short)  # within 10%
    assert str(back.arrangement) == "ring 8"
    assert "chosen before the data was read" in back.reason
    assert str(auto(a_setup(8, 32, 32, device="GPU"), one(16_384), before=short).arrangement) == "ulysses 8"


def test_asked_for_is_taken_whatever_it_costs():
    setup = a_setup(8, *QWEN3_8B)
    for name, expected in (("ring", "ring 8"), ("gather", "gather 8"), ("hybrid", "ulysses 4 × ring 2")):
        choice = choose_backend(name, setup, one())
        assert (str(choice.arrangement), choice.reason) == (expected, "asked for")
        assert {how for how, _ in choice.modelled} == {
            how for backend in BACKENDS.spread.values() for how in backend.arrangements(8)
        }
    unmodelled = choose_backend("hybrid", setup, ring_size=4)
    assert (str(unmodelled.arrangement), unmodelled.modelled) == ("ulysses 2 × ring 4", ())
    with pytest.raises(ValueError, match=r"3 heads cannot be divided by sp 8"):
        choose_backend("ulysses", a_setup(8, 3, 3), one())


def test_line_names_choice_numbers_and_what_cannot_run():
    line = auto(a_setup(8, 12, 4), one()).describe()
    number = r"\d[\d.e+]*"
    assert re.fullmatch(
        rf"ulysses 4 × ring 2 \(auto\): modelled ms per layer: ulysses 4 × ring 2: {number}, "
        rf"ulysses 2 × ring 4: {number}, ring 8: {number}, gather 8: {number}; "
        r"ulysses 8 cannot: 12 heads; "
        r"for one document",
        line,
    ), line


def test_auto_keeps_to_a_given_padding_multiple():
    assert str(auto(a_setup(4, *QWEN3_8B), pad_to_multiple_of=4).arrangement) == "ulysses 4"
    refused = r"auto finds no backend for sp 4 .*ring 4, gather 4 cannot: needs rows padded to a multiple of 8"
    with pytest.raises(ValueError, match=refused):
        auto(a_setup(4, 3, 3), pad_to_multiple_of=4)


def can_run(how: Arrangement, heads: int, multiple: int | None) -> bool:
    """By what runs it: the degrees, Ulysses' rule for heads, and the length that a batch is padded to."""
    dims = ParallelDims.arrange(how.ring * how.ulysses, ring=how.ring, ulysses=how.ulysses)
    return heads % how.ulysses == 0 and (multiple is None or multiple % dims.multiple == 0)


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(
    sp=st.integers(2, 24),
    kv_heads=st.integers(1, 12),
    group=st.integers(1, 8),
    node=st.sampled_from([1, 2, 3, 4, 8]),
    multiple=st.none() | st.integers(1, 96),
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    device=st.sampled_from(sorted(TABLE.constants)),
)
def test_auto_never_takes_what_cannot_run(sp, kv_heads, group, node, multiple, lengths, device):
    setup = a_setup(sp, kv_heads * group, kv_heads, node=node, device=device)
    documents = Documents(rows=[np.array(lengths)], source="")
    if multiple is not None and not any(can_run(how, setup.num_heads, multiple) for how in arrangements(sp)):
        with pytest.raises(ValueError, match="Lower --sp, or name a backend"):
            auto(setup, documents, pad_to_multiple_of=multiple)
        return
    choice = auto(setup, documents, pad_to_multiple_of=multiple)
    how = choice.arrangement
    assert how.ring * how.ulysses == sp
    assert can_run(how, setup.num_heads, multiple)
    assert all(math.isfinite(seconds) and seconds > 0 for _, seconds in choice.modelled)
    named = choose_backend(how.name, setup, documents, ring_size=how.ring if how.name == "hybrid" else None)
    assert named.arrangement == how


def test_rings_too_long_to_model():
    with pytest.raises(ValueError, match=r"no backend for sp 521 .*ring 521, gather 521 cannot: rings above 512 ranks"):
        auto(a_setup(521, *QWEN3_8B))
    assert choose_backend("ring", a_setup(521, *QWEN3_8B), one()).arrangement.ring == 521


FREE = {"memory": math.inf, "message_seconds": 0.0, "launch_seconds": 0.0}
"""Nothing but FLOPs and bytes costs anything."""


@pytest.mark.parametrize(("heads", "kv", "copies"), [(32, 8, 1), (32, 1, 4), (14, 2, 1)])
def test_communication_by_hand(heads, kv, copies):
    """With infinitely fast arithmetic, what is left is the bytes of the formulas in `longctx.attention.cost`."""
    speed, tokens, sp, size, e = 1e9, 65_536, 4 if heads == 32 else 2, 128, 2
    attention = dict.fromkeys(("attention_forward", "attention_backward"), math.inf)
    setup = a_setup(sp, heads, kv, within=Link(speed, speed), **attention, **FREE)
    document = np.array([tokens])
    ulysses = attention_time(setup, Arrangement(name="ulysses", ring=1, ulysses=sp), RingWork.of(document, 1)).seconds
    share = tokens / sp * size * (sp - 1)  # elements of a head that leave or reach a rank
    assert ulysses == pytest.approx(2 * (2 * heads + 2 * kv * copies) * share / sp * e / speed)
    work = RingWork.of(document, sp)
    gather = attention_time(setup, Arrangement(name="gather", ring=sp, ulysses=1), work).seconds
    assert gather == pytest.approx(2 * kv * share * (e + e + 4) / speed)
    ring = attention_time(setup, Arrangement(name="ring", ring=sp, ulysses=1), work).seconds
    assert 0.9 * gather < ring < 1.0001 * gather  # what no later rank needs stays at home
    forward = gather * e / (e + e + 4), ulysses / 2
    assert forward[0] / forward[1] == pytest.approx(kv * sp / (heads + kv * copies))


def test_computation_by_hand():
    """With infinitely fast links, a ring takes the slowest rank's FLOPs, hop by hop, and Ulysses an equal share."""
    tokens, sp, (heads, kv), size, flops = 65_536, 4, QWEN3_8B, 128, 1e14
    attention = dict.fromkeys(("attention_forward", "attention_backward"), flops)
    setup = a_setup(sp, heads, kv, within=Link(math.inf, math.inf), **attention, **FREE)
    share = (FLOPS_FORWARD + FLOPS_BACKWARD) * tokens * (tokens + 1) / 2 * heads * size / sp / flops
    for how in arrangements(sp):
        seconds = attention_time(setup, how, RingWork.of(np.array([tokens]), how.ring)).seconds
        assert share * 0.9999 <= seconds <= share * 1.02, str(how)


def _in_a_group() -> tuple[Link, list[tuple[int, int]]]:
    link = measure_link(None, torch.device("cpu"), num_bytes=1 << 20, repetitions=3)
    found = []
    for lengths in (None, [4096, 4096], [64] * 200):
        _, sequence = longctx.parallelize(tiny_model(), sp=2, document_lengths=lengths)
        found.append((sequence.dims.ring, sequence.dims.ulysses))
    with pytest.raises(ValueError, match=r"document_lengths \[4, 0\]"):
        longctx.parallelize(tiny_model(), sp=2, document_lengths=[4, 0])
    return link, found


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, f"{__name__}:_in_a_group")


def test_links_are_measured_and_agreed_on(two_ranks):
    (link, _), (other, _) = two_ranks
    assert link == other
    assert 1e6 < link.exchange < 1e12
    assert 1e6 < link.pass_on < 1e12


def test_parallelize_chooses_by_the_documents_it_is_given(two_ranks):
    assert [found for _, found in two_ranks] == [[(1, 2), (1, 2), (2, 1)]] * 2


@pytest.mark.long
def test_a_run_changes_to_what_its_documents_make_much_better(tmp_path):
    """Short documents stay whole on a ring's ranks: chosen when the data is known, on the engine that is up."""
    records = ("".join(json.dumps({"text": f"document {i} of many short ones"}) + "\n") for i in range(2000))
    (tmp_path / "short.jsonl").write_text("".join(records))
    command = [sys.executable, "-m", "longctx.train", "--max_steps", "2", "--use_cpu", "True", "--explain"]
    command += ["--dataset_name", "short.jsonl", "--model_name_or_path", "tiny", "--max_length", "8192"]
    command += ["--per_device_train_batch_size", "1", "--logging_steps", "1", "--learning_rate", "1e-3"]
    printed, losses = [], []
    for name, flags in (("sp 2", ["--sp", "2", "--measure_links", "True"]), ("sp 1", [])):
        given = [*command, *flags, "--output_dir", name]
        done = subprocess.run(given, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        losses.append([step["loss"] for step in history if "loss" in step])
    text = printed[0]
    assert re.search(r"mesh .* sp 2 \(ring 2 × ulysses 1\)", text), text
    assert re.search(r"backend   ring 2 \(auto\): modelled ms per layer: ring 2: \d.* ulysses 2: \d", text), text
    assert "engine    deepspeed ZeRO-3 (chosen before the data was read, for ulysses 2)" in text
    assert "padded to a multiple of 4" in text
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
