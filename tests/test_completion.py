"""Completion in real shells: bash, and zsh and fish where they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from longctx.completion import SHELLS
from longctx.settings.dpo import DPO
from longctx.verify.__main__ import VERIFY

BASH = """source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_longctx; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = "source {script}; complete -C '{line}' | string split -f 1 \\t"
ZSH = """zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'autoload -U compinit; compinit -u -D; eval "$(cat {script})"; longctx() {{ print CALL"ED:" $* :END }}'
zpty -w shell '{line}'$'\t'
zpty -r -m shell out '*CALLED:*:END*'
print -r -- ${{out##*CALLED:}}
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Scripts by shell, printed by an interpreter that imports neither torch nor TRL."""
    paths = {shell: tmp_path_factory.mktemp("scripts") / shell for shell in SHELLS}
    program = """import sys; from longctx.__main__ import main
main(sys.argv[1:]); assert not {'torch', 'trl'} & {*sys.modules}"""
    for shell, path in paths.items():
        command = [sys.executable, "-c", program, "completion", shell]
        path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return paths


def completed(shell, script, line):
    """Return the words that the shell offers at the end of the line, or what zsh makes of it."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    words = line if not line.endswith(" ") else f"{line}''"
    program = {"bash": BASH, "fish": FISH, "zsh": ZSH}[shell].format(script=script, words=words, line=line)
    done = subprocess.run([shell, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout if shell == "zsh" else set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_flags_and_values(shell, scripts):
    if shell == "zsh":  # calls the completed command
        assert "train --max_steps :END" in completed(shell, scripts[shell], "longctx train --max_ste")
        assert "plan --gpus_per_node :END" in completed(shell, scripts[shell], "longctx plan --gpus_")
        assert "plan --max_steps :END" in completed(shell, scripts[shell], "longctx plan --max_ste")
        return
    assert completed(shell, scripts[shell], "longctx train --max_ste") == {"--max_steps"}
    assert completed(shell, scripts[shell], "longctx tr") == {"train"}
    overlong = {"raise", "truncate", "drop", "split", "turns"}
    assert completed(shell, scripts[shell], "longctx train --overlong ") == overlong
    assert completed(shell, scripts[shell], "longctx train --packing ") == {"True", "False"}
    assert {"sigmoid", "simpo"} <= completed(shell, scripts[shell], "longctx dpo --loss_type ")
    assert completed(shell, scripts[shell], "longctx verify --num_l") == {"--num_layers"}
    assert completed(shell, scripts[shell], "longctx plan --gpu_") == {"--gpu_memory_gib"}
    assert completed(shell, scripts[shell], "longctx plan --tiled_mlp_") == {"--tiled_mlp_num_shards"}
    assert completed(shell, scripts[shell], "longctx plan --packing ") == {"True", "False"}
    assert {"bash", "zsh", "fish"} <= completed(shell, scripts[shell], "longctx completion ")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_is_completed(shell, scripts):
    words = set(re.findall(r"[\w-]+", scripts[shell].read_text()))
    prefix = "" if shell == "fish" else "--"
    assert {f"{prefix}{name}" for method in (DPO, VERIFY) for name in method.flags} <= words
