"""docs/howto/after-training.md: its commands are those that runs print, and work as far as a CPU without vLLM goes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.published import CONFIGS
from longctx.model.card import TrainedModel
from longctx.model.rope import extended
from longctx.train import main
from tests.jsonl import write_lines

PAGE = (Path(__file__).parents[1] / "docs/howto/after-training.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RUN = ["--max_steps", "1", "--save_strategy", "no", "--use_cpu", "True", "--report_to", "none"]
TASK = """
task: repeat_words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{input}}"
doc_to_target: "{{output}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_servers_are_started_as_a_run_prints_it():
    peft = pytest.importorskip("peft")
    base = "Qwen/Qwen3-8B"
    config = extended(CONFIGS[base], {"rope_type": "yarn", "factor": 4.0})
    adapter = peft.LoraConfig(r=32, target_modules=["q_proj"])
    models = [
        TrainedModel(folder="my-model", base=base, config=config),
        TrainedModel(folder="my-adapter", base=base, config=CONFIGS[base], adapter=adapter),
    ]
    assert [line for line in PAGE.splitlines() if line.startswith("vllm serve")][:2] == [of.serve() for of in models]
    assert f"{models[1].export().partition('  #')[0]}\n" in PAGE


def test_traces_become_records_that_are_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = {"context": "A table of towns.", "question": "Which is largest?", "llm_generated_reasoning_traces": "Rome."}
    write_lines(Path("pi2.jsonl"), (trace | {"final_answer_sql": "Rome"} for _ in range(4)))
    exec(PYTHON[-1], {})
    flags = ["--model_name_or_path", "tiny", "--dataset_name", "my_traces.jsonl", "--max_length", "256", *RUN]
    assert main([*flags, "--output_dir", "pi2"]) == 0
    AutoModelForCausalLM.from_pretrained("pi2")
    record = json.loads(Path("my_traces.jsonl").read_text().splitlines()[0])
    assert [message["content"] for message in record["prompt"]] == ["A table of towns.\n\nWhich is largest?"]
    assert [message["content"] for message in record["completion"]] == ["Rome."]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="needs lm_eval on the PATH (pip install lm_eval[hf])")
def test_the_harness_takes_the_model_and_the_flags_of_the_page(tmp_path, monkeypatch):
    """On a task of this machine, by transformers in the place of vLLM."""
    monkeypatch.chdir(tmp_path)
    flags = ["--max_length", "256", "--overlong", "truncate", "--max_steps", "3", "--output_dir", "my-model"]
    assert main([*RUN, *flags]) == 0
    Path("tasks").mkdir()
    Path("tasks", "repeat.yaml").write_text(TASK)
    Path("words.jsonl").write_text('{"input": "The word is apple. The word is", "output": "apple"}\n')
    [text] = re.findall(r"^(lm_eval .*?--metadata .*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
    program, *flags = shlex.split(text.replace("\\\n", " "))
    changed = {"vllm": "hf", "ruler": "repeat_words", "auto": "1"}
    flags = [changed.get(flag, flag.replace("=131072", "=1024")) for flag in flags]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = [program, *flags, "--include_path", "tasks", "--device", "cpu"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    [results] = Path("results", "my-model").rglob("results_*.json")
    assert "exact_match,none" in json.loads(results.read_text())["results"]["repeat_words"]
