"""`python -m longctx.plan`: what it recommends fits, is the fastest that does, and is a command that resolves."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import partial

import pytest
from accelerate.commands.launch import launch_command_parser
from transformers import LlamaConfig

from longctx.attention.backends import BACKENDS
from longctx.forecast.cost import cost
from longctx.forecast.documents import one_document
from longctx.forecast.learned import learn
from longctx.forecast.model_sizes import adapter_rows
from longctx.machine.here import Machine
from longctx.model.tiny import tiny_config
from longctx.plan import _machine, _parser, main
from longctx.report.plan_text import PAGE, Plan, as_text, name_of
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import described, resolve, spreads

LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)
LENGTHS = (16384, 131072, 524288, 1048576)
TINY = ["--model_name_or_path", "tiny"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    LLAMA_8B.save_pretrained(folder)
    return str(folder)


def planned(*flags: str) -> Plan:
    options, others = _parser().parse_known_args(flags)
    settings = parse_flags(others, {"train": SFT, "dpo": DPO}[options.method])
    machine = _machine(options, settings)
    return Plan(settings, machine, options.gpus, lengths=options.lengths, documents=one_document)


@pytest.fixture(scope="module")
def plan(llama):
    return planned("--model_name_or_path", llama, "--lengths", *map(str, LENGTHS))


def as_json(capsys, *flags: str, code: int = 0):
    assert main([*flags, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def text_of(capsys, *flags: str, code: int = 0) -> str:
    assert main([*flags]) == code
    return capsys.readouterr().out


def command_in(text: str) -> str:
    [command] = [line.strip() for line in text.splitlines() if line.startswith("    accelerate launch")]
    return command


@pytest.mark.parametrize("length", LENGTHS)
def test_the_fastest_that_leaves_a_tenth_free_is_recommended(plan, length) -> None:
    best, second = plan.best(length), plan.best(length, plan.best(length).shape.sp)
    for one in (best, second):
        assert one.cost.device_bytes <= 0.9 * plan.machine.device_bytes
        assert one.cost.host_bytes <= 0.9 * plan.machine.host_bytes
    roomy = [one for one in plan.choices[length] if one.cost.used <= 0.9]
    assert best.cost.speed >= max(one.cost.speed for one in roomy) / 1.02
    assert second.shape.sp != best.shape.sp
    assert second.cost.speed >= max(one.cost.speed for one in roomy if one.shape.sp != best.shape.sp) / 1.02


def test_what_fills_the_memory_is_recommended_last(llama, capsys) -> None:
    longest = max(far.length for _, far in planned("--model_name_or_path", llama, "--gpus", "2").reaches.values())
    text = text_of(capsys, "--model_name_or_path", llama, "--gpus", "2", "--max_length", str(longest))
    assert "the fastest that fits; none leaves 10% of it free" in " ".join(text.split())
    assert "Next best" not in text


def test_every_arrangement_of_eight_devices_is_there(plan) -> None:
    ways = {(run.backend.name, run.dims.ulysses, run.dims.ring) for run in plan.runs.values()}
    assert ways == {("local", 1, 1)} | {
        (name, how.ulysses, how.ring)
        for name, backend in BACKENDS.spread.items()
        for sp in (2, 4, 8)
        for how in backend.arrangements(sp)
    }
    assert len(plan.runs) == len(ways) == 13
    for choices in plan.choices.values():
        assert sorted(name_of(one.shape) for one in choices) == sorted(plan.runs)


def test_nothing_takes_more_than_there_is(plan) -> None:
    for length, choices in plan.choices.items():
        for one in choices:
            plain, farthest = plan.reaches[name_of(one.shape)]
            assert plain.length <= farthest.length
            assert one.cost.fits <= (length <= farthest.length)


def test_beyond_a_node_are_whole_nodes_and_one_split_of_hybrid(llama) -> None:
    settings = parse_flags(["--model_name_or_path", llama, "--dataset_name", "stdlib"])
    found = [run.dims for run in spreads(*described(settings, Machine.of("H100", 8), 96), 96)]
    assert {dims.sp for dims in found} == {1, 2, 4, 8, 16, 24, 32, 48, 96}
    ways = {d.sp: (d.ulysses, d.ring) for d in found if d.sp > 8 and min(d.ulysses, d.ring) > 1}
    assert ways == {16: (8, 2), 24: (8, 3), 32: (8, 4), 48: (8, 6), 96: (8, 12)}


# The text


def test_a_length_beyond_the_context_is_extended_in_the_command(llama, tmp_path, capsys) -> None:
    flags = ["--gpus", "2", "--lengths", "2048"]  # which is the context
    text = text_of(capsys, "--model_name_or_path", llama, *flags, "--max_length", "9000")
    assert "9,000 tokens are beyond the model's context of 2,048, so the command has --rope_scaling yarn:5." in text
    assert "--rope_scaling yarn:5" in command_in(text)
    assert "rope_scaling" not in text_of(capsys, "--model_name_or_path", llama, *flags, "--max_length", "2048")
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    LlamaConfig(**LLAMA_8B.to_dict() | {"rope_parameters": rope}).save_pretrained(tmp_path)
    text = text_of(capsys, "--model_name_or_path", str(tmp_path), *flags, "--max_length", "9000")
    assert "no --rope_scaling is known for it" in text
    assert "rope_scaling" not in command_in(text)


def test_the_text_says_everything_once_and_ends_with_the_page(plan, capsys) -> None:
    text = as_text(plan)
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    assert "8 × H100 of 79 GiB, 8 a node with 1,770 GiB of host memory (--host_memory_gib)" in paragraphs[0]
    assert paragraphs[1].startswith("Recommended for 1,048,576 tokens: ")
    best = plan.best(plan.length)
    assert f"{best.cost.speed:,.0f} tokens/s a device" in paragraphs[1]
    assert f"Device: {best.cost.device_bytes / 2**30:.1f} of 79.2 GiB; peak: {best.cost.moment};" in paragraphs[1]
    assert f"Host, a node: {best.cost.host_bytes / 2**30:,.1f} of 1,769.5 GiB" in paragraphs[1]
    assert f"Disk: {best.cost.disk['checkpoint'] / 2**30:.1f} GiB for each checkpoint" in paragraphs[1]
    assert paragraphs[2] == plan.command(best, plan.length) == command_in(text)
    assert "--output_dir OUT" in paragraphs[2]
    table = text.split("\n\n")[4].splitlines()
    assert [line.strip().split("  ")[0] for line in table] == ["arrangement", *plan.runs]
    assert table[0].split()[-2:] == ["at", "1,048,576"]
    assert table[1].endswith("host full")
    assert 2 <= len(paragraphs[5:]) <= 5
    assert paragraphs[-1] == PAGE
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("    accelerate"))
    assert len({*paragraphs}) == len(paragraphs)


@pytest.mark.long
def test_on_many_nodes_the_command_is_one_for_every_node(llama, capsys) -> None:
    text = text_of(capsys, "--model_name_or_path", llama, "--gpus", "1024", "--lengths", "1048576")
    launch = launch_command_parser().parse_args(shlex.split(command_in(text).replace("RANK", "5"))[2:])
    assert (launch.num_processes, launch.num_machines, launch.machine_rank) == (1024, 128, 5)
    assert launch.multi_gpu
    assert launch.main_process_ip == "HOST"
    assert "Run the command on every node, with RANK 0 on the first" in text


def test_a_model_is_a_folder_or_its_config_and_else_refused(tmp_path, capsys) -> None:
    tiny_config().save_pretrained(tmp_path)
    plans = [
        as_json(capsys, "--model_name_or_path", str(name), "--gpus", "2", "--lengths", "8192")
        for name in (tmp_path, tmp_path / "config.json")
    ]
    assert plans[0] == plans[1]
    (tmp_path / "bad.json").write_text("{")
    for bad in (tmp_path / "bad.json", tmp_path / "nothing"):
        assert main(["--model_name_or_path", str(bad)]) == 2
        assert "--model_name_or_path" in capsys.readouterr().err


@pytest.mark.long
def test_a_folder_gets_the_plan(tmp_path, capsys) -> None:
    folder = tmp_path / "new" / "plan"
    text = text_of(capsys, *TINY, "--gpus", "2", "--lengths", "8192", "--output", str(folder))
    assert {path.name for path in folder.iterdir()} == {"plan.json", "plan.md", "plan.html"}
    assert (folder / "plan.md").read_text() == text
    assert json.loads((folder / "plan.json").read_text())["recommendation"]["length"] == 8192


@pytest.mark.long
def test_the_machine_at_hand_is_measured(capsys) -> None:
    text = text_of(capsys, *TINY, "--measure", "--gpus", "1", "--lengths", "4096")
    assert "on 1 × CPU, 1 a node" in text
    assert "- Device" not in text
    assert "\n    longctx train --use_cpu True --num_processes 1 --model_name_or_path tiny" in text
    with pytest.raises(SystemExit):
        main([*TINY, "--measure", "--gpu", "H100"])
    assert "not allowed with" in capsys.readouterr().err


def test_corrections_that_runs_have_taught_are_used_and_said(plan, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    of = plan.choices[16384][0].cost
    learn(of, "cuDNN", speed=of.speed / 1.2, allocated_bytes=of.allocated_bytes)
    learn(of, "flash-attn 2", speed=of.speed / 1.2, allocated_bytes=of.allocated_bytes)
    flags = [*TINY, "--gpus", "1", "--lengths", "65536", "--json"]
    slower, before = as_json(capsys, *flags), as_json(capsys, *flags, "--no_learned")
    seconds = [one["recommendation"]["seconds_per_step"] for one in (slower, before)]
    assert seconds[0] == pytest.approx(1.2 * seconds[1], rel=1e-6)
    assert "Corrected by 1 run on this kind of GPU" in text_of(capsys, *flags[:-1])


# The command


def run_of(command: str, machine: Machine, gpus: int):
    """The run of a printed command, resolved on the same machine; there is no other with its flags."""
    words = shlex.split(command)
    at = words.index("-m") + 1
    settings = parse_flags(words[at + 1 :], {"longctx.train": SFT, "longctx.dpo": DPO}[words[at]])
    [run] = spreads(*described(settings, machine, gpus), gpus)
    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ["--max_length", "131072"],
        ["--max_length", "1048576"],
        ["--max_length", "1048576", "--host_memory_gib", "512"],
        ["--gpus", "1", "--lengths", "65536"],
        ["--gpus", "4", "--gpu", "RTX 4090", "--use_peft", "True", "--lengths", "16384"],
        ["--method", "dpo", "--max_length", "65536", "--per_device_train_batch_size", "2"],
        ["--gpus", "32", "--max_length", "262144", "--gradient_accumulation_steps", "3"],
        ["--config", "run.yaml"],
    ],
    ids=" ".join,
)
def test_the_command_it_prints_resolves(flags, llama, tmp_path, monkeypatch) -> None:
    """By construction what train resolves to: the same layout, memory options and cost."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-5\nsp: 4\nmax_length: 65536\ntiled_mlp: true\n")
    plan = planned("--model_name_or_path", llama, *flags)
    for one in filter(None, (plan.best(plan.length), plan.best(plan.length, plan.best(plan.length).shape.sp))):
        run = run_of(plan.command(one, plan.length), plan.machine, plan.gpus)
        assert run.settings["max_length"] == plan.length
        assert run.shape.arrangement == one.shape.arrangement
        assert run.shape.engine == one.shape.engine
        assert run.shape.options == replace(one.shape.options, overlap_exchange=run.overlaps_exchange)
        again = cost(run.shape, plan.machine, plan.length, plan.documents(plan.length))
        assert again.device == pytest.approx(one.cost.device, rel=1e-9)
        assert again.host == pytest.approx(one.cost.host, rel=1e-9)
        assert again.seconds == pytest.approx(one.cost.seconds, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("gpus", "length"), [(1, 4096), (1, 65536), (8, 4096), (8, 131072), (8, 1048576), (16, 2097152)]
)
def test_the_commands_that_it_prints_fit_their_machine(gpus, length, llama, monkeypatch, capsys) -> None:
    """As training predicts it from their flags: nothing that a plan assumes is left out of its command."""
    flags = ["--gpus", str(gpus), "--max_length", str(length), "--lengths", str(length)]
    plan = as_json(capsys, "--model_name_or_path", llama, *flags)
    found = plan["recommendation"]
    local = plan["machine"]["gpus_per_node"]
    here = Machine.of("NVIDIA H100 80GB HBM3", local, host_bytes=plan["machine"]["host_bytes"])
    monkeypatch.setattr(Machine, "here", lambda gpus: here)
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: local)
    monkeypatch.setattr("longctx.settings.arrange.check_liger_machine", lambda *_: None)
    monkeypatch.setattr("longctx.settings.machine_checks.available_host_memory", lambda: int(here.host_bytes))
    words = shlex.split(found["command"].replace("DATA", "stdlib"))
    env = {"RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local)}
    run = resolve(parse_flags(words[words.index("longctx.train") + 1 :]), read_profile(env), env)
    predicted = run.cost(one_document(length))
    assert sum(predicted.device.values()) == pytest.approx(sum(found["device_bytes"].values()), rel=1e-3)
    assert predicted.host_bytes == pytest.approx(sum(found["host_bytes"].values()), rel=1e-3)
    assert predicted.fits
    assert not any("beyond the model's context" in note for note in run.notes)


# What flags change


@pytest.fixture
def wide_layers(tmp_path):
    """A model whose rows are whole blocks of 64 weights, as bitsandbytes needs them."""
    LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=256).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--use_bnb_nested_quant", "True"]])
def test_4_bit_weights_are_planned_as_training_checks_them(more, wide_layers) -> None:
    flags = ["--model_name_or_path", wide_layers, "--gpus", "2", "--lengths", "4096"]
    plan = planned(*flags, "--use_peft", "True", "--load_in_4bit", "True", *more)
    for one in plan.choices[4096]:
        sizes = one.shape.model
        in_4_bit = (0.5 + (1 if more else 4) / 64) * sizes.linear_parameters
        others = sizes.num_parameters - sizes.linear_parameters + 16 * adapter_rows(sizes)
        held = one.cost.device["parameters"]
        assert held == pytest.approx(in_4_bit / 2 + 4 * others / 2)  # all over two ranks, the others in fp32
        run = run_of(plan.command(one, 4096), plan.machine, 2)
        assert run.shape.quantized_weight_bytes == one.shape.quantized_weight_bytes
        assert " ".join(more) in plan.command(one, 4096)


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
    of = partial(as_json, capsys, *TINY, "--gpus", "2", "--lengths", "65536", "--memory", "balanced")
    whole, packed = of(), of("--document_lengths", str(histogram))
    assert packed["documents"] == str(histogram)
    assert packed["arrangements"] == whole["arrangements"]
    attention = [
        {one["arrangement"]: one["seconds"]["attention"] for one in plan["choices"]["65536"]}
        for plan in (whole, packed)
    ]
    assert all(attention[1][name] < attention[0][name] / 5 for name in attention[0])


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
        (["--gpu", "H9000"], "--gpu H9000 is not a kind of GPU that is known. Use one of A100,"),
        (["--use_cpu"], "--use_cpu True needs --measure"),
        (["--max_lenght", "4096"], "Did you mean --max_length?"),
        (["--output", "/dev/null/plan"], "/dev/null/plan cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_refused(flags, message, capsys) -> None:
    assert main([*TINY, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_plan_without_a_model_is_refused(capsys) -> None:
    assert main(["--gpus", "2"]) == 2
    assert "--model_name_or_path is missing" in capsys.readouterr().err


def test_the_defaults_are_those_of_the_help() -> None:
    options, others = _parser().parse_known_args(TINY)
    machine = _machine(options, parse_flags(others))
    assert (options.gpus, machine.per_node, machine.device) == (8, 8, "H100")
    assert round(machine.host_bytes / 8 / 2**30) == 221
    assert options.lengths == [32768, 131072, 524288, 1048576]


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        (["--gpus", "1", "--max_length", "32768", "--host_memory_gib", "60"], "--use_peft True."),
        pytest.param(["--gpus", "8", "--max_length", "16777216"], "--gpus ", marks=pytest.mark.long),
        pytest.param(
            ["--gpus", "1", "--max_length", str(10**9)],
            "Neither an adapter nor 32 times the devices make it fit.",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_fits_nowhere_ends_with_1(flags, change, llama, tmp_path, capsys) -> None:
    """With what binds and the smallest change, which fits, and without a command."""
    flags = ["--model_name_or_path", llama, *flags]
    text = text_of(capsys, *flags, "--output", str(tmp_path), code=1)
    words = " ".join(text.split())
    assert "Nothing fits" in words
    assert "'s memory (" in words
    assert change in words
    assert "accelerate" not in text
    assert "Next best" not in text
    assert (tmp_path / "plan.html").exists()
    if (start := "The smallest change that fits: ") in words:
        asked = words.partition(start)[2].partition(".")[0].split()
        assert main([*flags, *asked]) == 0  # the later of two values counts


def test_a_shorter_length_is_recommended_where_none_of_the_usual_fits(llama, capsys) -> None:
    flags = ["--gpus", "1", "--gpu", "RTX 4090", "--use_peft", "True"]
    found = as_json(capsys, "--model_name_or_path", llama, *flags, "--lengths", "1048576")
    length, longest = found["recommendation"]["length"], max(of["longest"] for of in found["arrangements"].values())
    assert length <= longest < 2 * length


def test_preferences_are_planned_with_the_pass_of_their_reference(capsys) -> None:
    flags = [*TINY, "--gpus", "2", "--max_length", "65536", "--lengths", "65536", "--memory", "balanced"]
    found = as_json(capsys, *flags, "--method", "dpo")
    assert "-m longctx.dpo " in found["recommendation"]["command"]
    assert "forward pass" not in text_of(capsys, *flags)
    text = " ".join(text_of(capsys, *flags, "--method", "dpo").split())
    assert "one pair a sequence" in text
    seconds = text.partition("one forward pass over all sequences: ")[2].partition(" s ")[0]
    step = found["recommendation"]["seconds_per_step"]
    assert 0.2 * step < float(seconds) < 0.4 * step  # the backward pass is over twice the forward pass
