"""`python -m longctx.plan`: what it recommends fits, is the least that fits, and is a command that resolves."""

from __future__ import annotations

import json
import shlex

import pytest
from transformers import LlamaConfig

from longctx.config import resolve
from longctx.flags import parse_flags
from longctx.launch.profile import read_profile
from longctx.plan import Machine, candidates, outlook, recommend
from longctx.plan.__main__ import main
from longctx.step_time import Speeds

LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)
MACHINE = Machine(
    gpus=8,
    gpus_per_node=8,
    device="H100",
    device_bytes=85e9,
    host_bytes=1.9e12,
    kernel="flash-attn 3",
    speeds=Speeds.of("H100", "flash-attn 3"),
)


@pytest.fixture(scope="module")
def found():
    return candidates(LLAMA_8B, MACHINE)


@pytest.mark.parametrize("length", [16384, 150_000, 600_000, 1_100_000, 5_000_000])
def test_the_smallest_sp_that_fits_is_recommended_and_its_fastest_backend(found, length) -> None:
    best = recommend([outlook(candidate, MACHINE, length) for candidate in found])
    fitting = [candidate for candidate in found if candidate.max_length >= length]
    assert best.time is not None
    assert best.candidate.dims.sp == min(candidate.dims.sp for candidate in fitting)
    assert sum(best.memory.device.values()) <= MACHINE.device_bytes
    assert sum(best.memory.host.values()) <= MACHINE.host_bytes


def test_every_arrangement_of_eight_devices_is_there(found) -> None:
    ways = {(c.backend, c.dims.ulysses, c.dims.ring) for c in found}
    alone = {("local", 1, 1)}
    ulysses = {("ulysses", n, 1) for n in (2, 4, 8)}
    rings = {(name, 1, n) for name in ("ring", "gather") for n in (2, 4, 8)}
    assert ways == alone | ulysses | rings | {("hybrid", 2, 2), ("hybrid", 4, 2), ("hybrid", 2, 4)}
    assert len(found) == 2 * len(ways)


def test_nothing_takes_more_than_there_is(found) -> None:
    assert recommend([outlook(candidate, MACHINE, 10**9) for candidate in found]) is None


def test_the_command_it_prints_resolves(tmp_path, capsys) -> None:
    flags = ["--model_name_or_path", "tiny", "--gpus", "4", "--max_length", "4096", "--lengths", "4096", "--json"]
    assert main(flags) == 0
    plan = json.loads(capsys.readouterr().out)
    command = shlex.split(plan["recommendation"]["command"])
    arguments = command[command.index("longctx.train") + 1 :]
    arguments[arguments.index("DATA")] = "stdlib"
    run = resolve(parse_flags([*arguments, "--use_cpu"]), read_profile({}), {})
    assert run.dims.sp == plan["recommendation"]["sp"]
    assert run.settings["max_length"] == 4096


def test_documents_make_attention_cheap_and_the_length_the_same(tmp_path, capsys) -> None:
    histogram = tmp_path / "lengths.csv"
    histogram.write_text("# tokens\nlow,high,documents\n100,200,3\n1000,2000,1\n")
    common = ["--model_name_or_path", "tiny", "--gpus", "2", "--lengths", "65536", "--json"]
    plans = []
    for extra in ([], ["--document_lengths", str(histogram)]):
        main([*common, *extra])
        plans.append(json.loads(capsys.readouterr().out)["candidates"])
    for whole, packed in zip(*plans, strict=True):
        assert packed["max_length"] == whole["max_length"]
        if whole["at"][0]["fits"]:
            assert packed["at"][0]["seconds"]["attention"] < whole["at"][0]["seconds"]["attention"] / 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "--gpus 0 is below 1"),
        (["--gpus", "12"], "no whole number of nodes"),
        (["--gpu_memory_gib", "-1"], "is not above 0"),
        (["--document_lengths", "/nowhere.csv"], "low,high,documents"),
        (["--kernel", "flash-attn 9"], "Nothing is known of the kernel"),
        (["--lengths", "1"], "below 2"),
    ],
)
def test_bad_input_is_refused(flags, message, capsys) -> None:
    assert main(["--model_name_or_path", "tiny", *flags]) == 2
    assert message in capsys.readouterr().err


def test_what_fits_nowhere_ends_with_1(capsys) -> None:
    assert main(["--model_name_or_path", "tiny", "--gpus", "1", "--max_length", str(10**9)]) == 1
    assert "No set-up takes that" in capsys.readouterr().out
