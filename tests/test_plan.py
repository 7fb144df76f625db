"""`python -m longctx.plan`: what it recommends fits, is the fastest that does, and is a command that resolves."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest
from accelerate.commands.launch import launch_command_parser
from longctx.forecast.candidates import Machine, candidates, next_best, outlook, recommend, why
from longctx.forecast.closed_form import predict
from longctx.forecast.hardware import Hardware
from longctx.forecast.step_time import Speeds
from transformers import LlamaConfig

from longctx.attention.backends import BACKENDS
from longctx.forecast.model_sizes import ModelSizes, adapter_rows
from longctx.model.load import load_config
from longctx.model.tiny import tiny_config
from longctx.plan import main
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve

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
TINY = ["--model_name_or_path", "tiny"]


@pytest.fixture(scope="module")
def found():
    return candidates(LLAMA_8B, MACHINE)


@pytest.mark.parametrize("length", [16384, 150_000, 600_000, 1_100_000])
def test_the_fastest_that_leaves_a_tenth_free_is_recommended(found, length) -> None:
    outlooks = [outlook(candidate, MACHINE, length) for candidate in found]
    best, second = recommend(outlooks), next_best(outlooks)
    assert best.memory.device_bytes <= 0.9 * MACHINE.device_bytes
    assert best.memory.host_bytes <= 0.9 * MACHINE.host_bytes
    roomy = [
        one
        for one in outlooks
        if one.time is not None
        and one.memory.device_bytes <= 0.9 * MACHINE.device_bytes
        and one.memory.host_bytes <= 0.9 * MACHINE.host_bytes
    ]
    assert best.speed >= max(one.speed for one in roomy) / 1.02
    others = [one for one in roomy if (one.candidate.dims.sp, one.candidate.memory) != _degree_and_preset(best)]
    assert second.speed >= max(one.speed for one in others) / 1.02
    assert "the fastest that leaves 10% of memory free" in why(best, outlooks)


def _degree_and_preset(one):
    return one.candidate.dims.sp, one.candidate.memory


def test_what_fills_the_memory_is_recommended_last(found) -> None:
    length = max(candidate.max_length for candidate in found)
    outlooks = [outlook(candidate, MACHINE, length) for candidate in found]
    best = recommend(outlooks)
    assert best.candidate.max_length == length
    assert "nothing leaves 10% of memory free" in why(best, outlooks)
    assert next_best(outlooks) is None


def test_of_equal_speeds_the_simplest_is_recommended(found) -> None:
    """At 262,144 tokens rings, gathers and hybrids of four devices differ by less than 1%."""
    presets = [candidate for candidate in found if candidate.memory != "auto"]
    best = recommend([outlook(candidate, MACHINE, 262_144) for candidate in presets])
    assert (best.candidate.backend, best.candidate.dims.sp, best.candidate.memory) == ("ring", 4, "balanced")


def test_every_arrangement_of_eight_devices_is_there(found) -> None:
    ways = {(c.backend, c.dims.ulysses, c.dims.ring) for c in found}
    alone = {("local", 1, 1)}
    ulysses = {("ulysses", n, 1) for n in (2, 4, 8)}
    rings = {(name, 1, n) for name in ("ring", "gather") for n in (2, 4, 8)}
    assert ways >= alone | ulysses | rings | {("hybrid", 2, 2), ("hybrid", 4, 2), ("hybrid", 2, 4)}
    assert ways == alone | {
        (name, how.ulysses, how.ring)
        for name, backend in BACKENDS.spread.items()
        for sp in (2, 4, 8)
        for how in backend.arrangements(sp)
    }
    assert len(found) == 3 * len(ways)


def test_nothing_takes_more_than_there_is(found) -> None:
    assert recommend([outlook(candidate, MACHINE, 10**9) for candidate in found]) is None


def test_beyond_a_node_are_whole_nodes_and_one_split_of_hybrid() -> None:
    found = candidates(LLAMA_8B, replace(MACHINE, gpus=96), presets=["balanced"])
    assert {c.dims.sp for c in found} == {1, 2, 4, 8, 16, 24, 32, 48, 96}
    ways = {c.dims.sp: (c.dims.ulysses, c.dims.ring) for c in found if c.backend == "hybrid" and c.dims.sp > 8}
    assert ways == {16: (8, 2), 24: (8, 3), 32: (8, 4), 48: (8, 6), 96: (8, 12)}


def test_a_length_beyond_the_context_is_extended_in_the_command(tmp_path, capsys) -> None:
    LLAMA_8B.save_pretrained(tmp_path)  # of 2,048 tokens
    flags = ["--model_name_or_path", str(tmp_path), "--gpus", "2", "--lengths", "2048"]
    assert main([*flags, "--max_length", "9000"]) == 0
    printed = capsys.readouterr().out
    assert "The model's context is 2,048 tokens, and 9,000 are beyond it." in printed
    assert all("--rope_scaling yarn:5" in line for line in printed.splitlines() if line.startswith("accelerate"))
    assert main([*flags, "--max_length", "2048"]) == 0
    assert "rope_scaling" not in capsys.readouterr().out
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    LlamaConfig(**LLAMA_8B.to_dict() | {"rope_parameters": rope}).save_pretrained(tmp_path)
    assert main([*flags, "--max_length", "9000"]) == 0
    printed = capsys.readouterr().out
    assert "No --rope_scaling is known for it" in printed
    assert not any("rope_scaling" in line for line in printed.splitlines() if line.startswith("accelerate"))


def test_pictures_are_refused_before_any_work_without_matplotlib(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("longctx.plan.find_spec", lambda name: None)
    monkeypatch.setattr("longctx.model.load.load_config", lambda *_, **__: pytest.fail("work began"))
    assert main([*TINY, "--output", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_answer_is_printed_once(capsys) -> None:
    assert main([*TINY, "--gpus", "2", "--max_length", "4096"]) == 0
    text = capsys.readouterr().out
    assert text.count("Recommended for 4,096 tokens") == text.count("backend ") == 1
    assert text.index("Recommended for") < text.index("Next best: ") < text.index("backend ")
    first = re.search(r"--sp (\d)", text)
    assert f"A step of {2 // int(first[1])} sequence" in text


def test_thousand_devices_are_planned_in_a_page(capsys) -> None:
    assert main([*TINY, "--gpus", "1024", "--lengths", "1048576"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 60
    tables = [line for line in text.splitlines() if not line.startswith("accelerate")]
    assert max(map(len, tables)) <= 120
    command = next(line for line in text.splitlines() if line.startswith("accelerate launch"))
    launch = launch_command_parser().parse_args(shlex.split(command.replace("RANK", "5"))[2:])
    assert (launch.num_processes, launch.num_machines, launch.machine_rank) == (1024, 128, 5)
    assert launch.multi_gpu
    assert launch.main_process_ip == "HOST"


def test_a_model_is_a_folder_or_its_config_and_else_refused(tmp_path, capsys) -> None:
    tiny_config().save_pretrained(tmp_path)
    plans = []
    for name in (tmp_path, tmp_path / "config.json"):
        assert main(["--model_name_or_path", str(name), *TINY[2:], "--gpus", "2", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["candidates"] == plans[1]["candidates"]
    assert plans[0]["recommendation"]["command"] == plans[1]["recommendation"]["command"]
    (tmp_path / "bad.json").write_text("{")
    for bad in (tmp_path / "bad.json", tmp_path / "nothing"):
        assert main(["--model_name_or_path", str(bad), *TINY[2:]]) == 2
        assert f"--model_name_or_path {bad}" in capsys.readouterr().err


def test_a_folder_gets_the_plan_and_its_pictures(tmp_path, capsys) -> None:
    assert main([*TINY, "--gpus", "2", "--output", str(tmp_path / "plan")]) == 0
    capsys.readouterr()
    files = {path.name for path in (tmp_path / "plan").iterdir()}
    pictures = {"max_length.png", "tokens_per_second.png", "memory.png"}
    assert files == {"plan.json", "plan.md", "plan.html", *pictures}
    assert "| backend | sp | dp |" in (tmp_path / "plan" / "plan.md").read_text()
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["recommendation"]["sp"] == 1


@pytest.mark.long
def test_the_machine_at_hand_is_measured(capsys) -> None:
    assert main([*TINY, "--measure", "--gpus", "1", "--lengths", "4096", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["machine"]["speeds"]["matmul_flops"] > 1e8
    assert plan["machine"]["device_bytes"] > 2**20
    with pytest.raises(SystemExit):
        main([*TINY, "--measure", "--gpu", "H100"])
    assert "not allowed with" in capsys.readouterr().err


def test_the_command_it_prints_resolves(tmp_path, capsys) -> None:
    flags = ["--gpus", "4", "--max_length", "4096", "--lengths", "4096", "--json"]
    assert main([*TINY, *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    command = shlex.split(plan["recommendation"]["command"])
    arguments = command[command.index("longctx.train") + 1 :]
    arguments[arguments.index("DATA")] = "stdlib"
    run = resolve(parse_flags([*arguments, "--use_cpu"]), read_profile({}), {})
    assert run.dims.sp == plan["recommendation"]["sp"]
    assert run.settings["max_length"] == 4096


@pytest.mark.parametrize(
    ("gpus", "length"), [(1, 4096), (1, 65536), (8, 4096), (8, 131072), (8, 1048576), (16, 2097152)]
)
def test_the_commands_that_it_prints_fit_their_machine(gpus, length, tmp_path, monkeypatch, capsys) -> None:
    """As training predicts it from their flags: nothing that a plan assumes is left out of its command."""
    LLAMA_8B.save_pretrained(tmp_path)
    flags = ["--gpus", str(gpus), "--max_length", str(length), "--lengths", str(length), "--json"]
    assert main(["--model_name_or_path", str(tmp_path), *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    machine = plan["machine"]
    here = Hardware(
        gpus=machine["gpus_per_node"],
        gpu_name="NVIDIA H100 80GB HBM3",
        gpu_bytes=int(machine["device_bytes"]),
        host_bytes=int(machine["host_bytes"]),
    )
    monkeypatch.setattr(Hardware, "here", lambda gpus: here)
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: here.gpus)
    monkeypatch.setattr("longctx.settings.machine_checks.available_host_memory", lambda: here.host_bytes)
    for one in filter(None, (plan["recommendation"], plan["next_best"])):
        words = shlex.split(one["command"])
        arguments = words[words.index("longctx.train") + 1 :]
        arguments[arguments.index("DATA")] = "stdlib"
        env = {"RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(here.gpus)}
        run = resolve(parse_flags(arguments), read_profile(env), env)
        assert (run.dims.sp, run.backend.name, run.engine) == (one["sp"], one["backend"], one["engine"])
        predicted = run.forecast_for()
        assert predicted.memory.device_bytes == pytest.approx(sum(one["at"][0]["device_bytes"].values()), rel=0.02)
        assert predicted.memory.host_bytes == pytest.approx(sum(one["at"][0]["host_bytes"].values()), rel=0.02)
        assert predicted.fits
        assert not any("beyond the model's context" in note for note in run.notes)


@pytest.fixture
def wide_layers(tmp_path):
    """A model whose rows are whole blocks of 64 weights, as bitsandbytes needs them on a CPU."""
    LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=256).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("more", [[], ["--use_bnb_nested_quant", "True"]])
def test_4_bit_weights_are_planned_as_training_checks_them(more, wide_layers, monkeypatch, capsys) -> None:
    """Each set-up of the plan is the one from which the run of its flags predicts its memory."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    monkeypatch.setattr("longctx.settings.resolve.QLORA_VERSIONS", {})  # nothing is quantised here
    quantised = ["--use_peft", "True", "--load_in_4bit", "True", *more]
    assert main(["--model_name_or_path", wide_layers, "--gpus", "2", *quantised]) == 0
    printed = capsys.readouterr().out
    assert " ".join(quantised[2:]) in printed
    assert "--dtype bfloat16" in printed
    settings = {name.removeprefix("--"): True for name in quantised[::2]}
    settings |= {"lora_r": 16, "model_name_or_path": wide_layers}
    machine = replace(MACHINE, gpus=2, gpus_per_node=2, kernel="flash-attn 2")
    found = candidates(load_config(wide_layers), machine, presets=["balanced"], settings=settings)
    sizes = ModelSizes.of_config(load_config(wide_layers))
    in_layers = sizes.linear_parameters
    for candidate in found:
        in_4_bit = (0.5 + (1 if more else 4) / 64) * in_layers
        others = sizes.num_parameters - in_layers + 16 * adapter_rows(sizes)
        held = predict(candidate.setup, 4096).device["parameters"]
        assert held == pytest.approx(in_4_bit / 2 + 4 * others / 2)  # all over two ranks, the others in fp32
        flags = ["--model_name_or_path", wide_layers, "--dataset_name", "stdlib", "--max_length", "4096", *quantised]
        flags += ["--num_processes", "2", "--per_device_train_batch_size", "1", "--bf16", "True", "--use_cpu"]
        run = resolve(parse_flags([*flags, *candidate.flags()]), read_profile({}), {})
        assert replace(run.memory_setup(ranks_per_node=2), is_cpu=False, fused_layers=True) == candidate.setup


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Add --use_peft"),
        (["--use_peft", "--memory", "longest"], "which --memory longest sets, with --load_in_4bit True"),
    ],
)
def test_4_bit_weights_are_refused_as_in_training(flags, message, wide_layers, capsys) -> None:
    assert main(["--model_name_or_path", wide_layers, "--load_in_4bit", "True", *flags]) == 2
    assert message in capsys.readouterr().err


def test_documents_make_attention_cheap_and_the_length_the_same(tmp_path, capsys) -> None:
    histogram = tmp_path / "lengths.csv"
    histogram.write_text("# tokens\nlow,high,documents\n100,200,3\n1000,2000,1\n")
    common = [*TINY, "--gpus", "2", "--lengths", "65536", "--json"]
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
        (["--gpus", "12"], "not a whole number of nodes"),
        (["--gpu_memory_gib", "-1"], "is not a number above 0"),
        (["--document_lengths", "/nowhere.csv"], "low,high,documents"),
        (["--kernel", "flash-attn 9"], "No speeds are known for the kernel"),
        (["--lengths", "1"], "below 2"),
        (["--host_memory_gib", "nan"], "is not a number above 0"),
    ],
)
def test_bad_input_is_refused(flags, message, capsys) -> None:
    assert main([*TINY, *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("in_4_bit", [False, True])
def test_the_defaults_are_those_of_the_help(in_4_bit, wide_layers, monkeypatch) -> None:
    asked = []

    def stop(config, machine, *, presets, **_):
        asked.append((machine, presets))
        raise ValueError("that is all")

    monkeypatch.setattr("longctx.forecast.candidates.candidates", stop)
    more = ["--model_name_or_path", wide_layers, "--use_peft", "--load_in_4bit"] if in_4_bit else []
    assert main([*TINY, *more]) == 2
    [(machine, presets)] = asked
    assert presets == (["balanced", "auto"] if in_4_bit else ["balanced", "longest", "fastest", "auto"])
    assert (machine.gpus, machine.gpus_per_node, machine.device) == (8, 8, "H100")
    assert round(machine.host_bytes / 8 / 2**30) == 221


def test_what_fits_nowhere_ends_with_1(tmp_path, capsys) -> None:
    flags = ["--gpus", "1", "--max_length", str(10**9), "--lengths", str(10**9), "--output", str(tmp_path)]
    assert main([*TINY, *flags]) == 1
    assert "No setup fits sequences of this length" in capsys.readouterr().out
    assert (tmp_path / "plan.html").exists()
    assert not (tmp_path / "tokens_per_second.png").exists()


def test_preferences_are_planned_with_the_pass_of_their_reference(capsys) -> None:
    flags = [*TINY, "--gpus", "2", "--max_length", "65536", "--lengths", "65536", "--memory", "balanced"]
    plans = {}
    for method in ("train", "dpo"):
        assert main([*flags, "--method", method, "--json"]) == 0
        plans[method] = json.loads(capsys.readouterr().out)
    train, dpo = plans.values()
    assert train["reference_seconds"] is None
    assert f"-m longctx.{dpo['method']} " in dpo["recommendation"]["command"]
    step = dpo["recommendation"]["at"][0]["seconds_per_step"]
    assert 0.2 * step < dpo["reference_seconds"] < 0.4 * step  # the backward pass is over twice the forward pass
    assert step == train["recommendation"]["at"][0]["seconds_per_step"]  # a shared prompt with short answers
    assert main([*flags, "--method", "dpo"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the reference model's log-probabilities take a forward pass" in text
    assert "one pair per sequence, planned as one document: its answers share the prompt" in text


def test_pairs_that_do_not_share_their_prompt_are_planned_as_two_documents(tmp_path, capsys) -> None:
    """Layers with windows, which a forecast counts as full attention: two documents attend to half as much each."""
    windows = tiny_config()
    windows.update({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2})
    plans = []
    for number, config in enumerate((tiny_config(), windows)):
        config.save_pretrained(tmp_path / str(number))
        flags = ["--model_name_or_path", str(tmp_path / str(number)), "--method", "dpo", "--json"]
        sizes = ["--gpus", "2", "--max_length", "524288", "--lengths", "524288", "--memory", "balanced"]
        assert main([*flags, *sizes]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert [plan["shares_prompts"] for plan in plans] == [True, False]
    shared, twice = (plan["recommendation"]["at"][0]["seconds_per_step"] for plan in plans)
    assert twice < shared
