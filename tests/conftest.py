"""The parity table, printed at the end of every pytest run that compared training with one device.

`--support-matrix PATH` writes benchmarks/results/support_matrix.md from what the run has shown. `--parity-page PATH`
enters the rows that soft GPUs have in the parity table, or those of DPO, into a page of benchmarks/results.

The tests run on the CPU, on machines with GPUs too: these are hidden from every process, unless `-m gpu` asks for the
tests that need one.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from tests import parity_page, refusals, selection

if "gpu" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the environment of the command
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # forked ranks can start no CUDA that their parent has
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["LONGCTX_HAS_STARTED"] = "1"  # a second run in the same process prints what the first one printed
refusals.install()  # before anything imports longctx
gc.disable()  # until all tests are collected: what is imported stays, and collections would take a quarter of the time
# Several hundred processes import longctx. Python keeps their bytecode in __pycache__ unless it is told not to.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from tests.small_model import HEADS, save_small_model  # noqa: E402
from tests.softcuda.build import unavailable  # noqa: E402
from tests.softcuda.ranks import SoftGPUs  # noqa: E402
from tests.workers import start_warm_server  # noqa: E402

_PARITY = pytest.StashKey[list[tuple[str, str, float, float, float]]]()
_rows: list[tuple[str, str, float, float, float]] = []
_outcomes: dict[str, bool] = {}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of small Qwen3 models with the head counts of HEADS."""
    return {name: save_small_model(tmp_path_factory.mktemp("models"), *heads) for name, heads in HEADS.items()}


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """The folder of a tiny model of one layer with its tokenizer, to be read only."""
    from longctx.model.tiny import tiny_config, tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    config = tiny_config()
    config.update({"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    tiny_model(config=config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def soft_gpus():
    """Two GPUs in host memory: see tests/softcuda. Compiled when it is used for the first time."""
    if reason := unavailable():
        pytest.skip(reason)
    with SoftGPUs() as gpus:
        yield gpus


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Run longctx.train on the CPU; the one error that it refuses with, before weights are read or processes start."""
    from longctx.train import main
    from tests.workers import start_rank_0_alone

    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    monkeypatch.setattr("longctx.run.model.load_model", lambda *_, **__: pytest.fail("weights were read"))
    start_rank_0_alone(monkeypatch)

    def run(*arguments):
        assert main(["--dataset_name", "stdlib", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("longctx: error: ") == 1
        return error

    return run


@pytest.fixture
def clean_state(monkeypatch):
    """Take back what resolving a run leaves in accelerate's state and in the environment."""
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    yield
    AcceleratorState._reset_state(True)
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def without_preflight(monkeypatch):
    """Let --dry_run print only what the flags resolve to, for models without weights and data that is not there."""
    monkeypatch.setattr("longctx.run.preflight.preflight", lambda run: [])


@pytest.fixture
def parity_table(request):
    """Append (case, how it was started, loss error, gradient norm error, error over the run)."""
    return request.node.stash.setdefault(_PARITY, [])


_refusals_met = refusals.RefusalsMet()


def pytest_configure(config):
    config.pluginmanager.register(_refusals_met)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two workers a core (at most 8 in all) if the whole suite runs, as tests wait for processes and messages.

    None for named tests, which start sooner alone.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    return min(2 * len(os.sched_getaffinity(0)), 8) if whole and "gpu" not in sys.argv else 0


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if told := getattr(node, "workeroutput", {}).get("selection"):
        _refusals_met.selection = told


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    rows = item.stash.get(_PARITY, []) if call.when == "call" else []
    report.parity = [(case, start, *map(float, errors)) for case, start, *errors in rows]
    return report


SLOWEST_FIRST = [
    "test_golden.py",
    "gpu/test_soft_training.py",
    "model/test_models.py",
    "training/test_training.py",
    "training/test_dpo.py",
    "training/test_resume.py",
    "test_plan.py",
    "training/test_checkpoint.py",
    "training/test_signals.py",
    "settings/test_specification.py",
    "forecast/test_search.py",
    "attention/test_kernel_choice.py",
    "data/test_data_fuzz.py",
    "untrusted/test_untrusted.py",
    "settings/test_auto.py",
    "untrusted/test_security.py",
    "data/test_mixture.py",
    "forecast/test_memory_trace.py",
    "test_docs.py",
    "launch/test_slurm.py",
    "model/test_multimodal.py",
    "layers/test_tiled_mlp.py",
    "attention/test_kernels.py",
    "training/test_ended_while_saving.py",
    "layers/test_loss.py",
    "attention/test_attention.py",
    "training/test_hub.py",
    "training/test_prepare.py",
    "untrusted/test_security_files.py",
    "layers/test_chunked.py",
    "training/test_key_fields.py",
    "benchmarks/test_gpu_benchmark.py",
    "layers/test_compiled.py",
    "benchmarks/test_differential.py",
    "layers/test_liger.py",
    "layers/test_routers.py",
    "attention/test_branches.py",
    "test_upstream.py",
    "data/test_data.py",
    "attention/test_backends.py",
    "model/test_rope.py",
    "data/test_tokens.py",
    "test_policy.py",
    "recurrent/test_spread.py",
]
"""Files of tests that take longest, from `pytest --durations 60`. Workers take whole files in this order, so that none
of them is left to one worker alone at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker takes all files with soft GPUs, which then start once."""
    from xdist.scheduler import LoadFileScheduling

    soft_gpus = "tests/gpu/"

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return soft_gpus if file.startswith(soft_gpus) else file

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(trylast=True)  # after what -m and -k leave out
def pytest_collection_modifyitems(config, items):
    """Leave out what is not selected, and put the slowest files first where there are workers.

    Without workers, files stay in the order of their names.
    """
    selection.select(config, items)
    if hasattr(config, "workerinput"):
        places = {config.rootpath / "tests" / file: place for place, file in enumerate(SLOWEST_FIRST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
    gc.freeze()  # no collection in a test walks through what is imported
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


def pytest_sessionstart(session):
    """Each worker of a whole run forks its ranks from a server that starts here, before a test changes the environment.

    Without workers, files come in the order of their names, and the first that forks ranks changes nothing.
    """
    if hasattr(session.config, "workerinput"):
        start_warm_server()


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # the process that started this worker judges the run
        session.config.workeroutput["selection"] = _refusals_met.selection
    elif session.config.getoption("--record-refusals"):
        _refusals_met.record()
    elif _refusals_met.missed() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_addoption(parser):
    selection.add_options(parser)
    parser.addoption("--record-refusals", action="store_true", help="enter into tests/refusals.tsv what this run met")
    parser.addoption("--support-matrix", type=Path, help="write what this run has shown into the support matrix")
    parser.addoption(
        "--parity-page",
        type=Path,
        help="enter the errors of training on soft GPUs, of DPO, or of model types, into this page",
    )


def pytest_runtest_logreport(report):
    if report.failed or report.when == "call":
        _outcomes[report.nodeid] = report.passed and _outcomes.get(report.nodeid, True)
    _rows.extend(map(tuple, getattr(report, "parity", ())))


def pytest_terminal_summary(terminalreporter, config):
    if path := config.getoption("--support-matrix"):
        _write_support_matrix(terminalreporter, path)
    if not _rows:
        return
    terminalreporter.section("relative error against one process, dense attention, fp32")
    terminalreporter.write_line(f"{'case':58} {'started by':18} {'loss 1':>8} {'grad 1':>8} {'losses':>8}")
    for case, start, loss, grad, run in sorted(_rows):
        terminalreporter.write_line(f"{case:58} {start:18} {loss:8.0e} {grad:8.0e} {run:8.0e}")
    if path := config.getoption("--parity-page"):
        ways = {way for _, way, *_ in _rows}
        started_by = next(way for way in (parity_page.STARTED_BY, parity_page.DPO, parity_page.MODELS) if way in ways)
        path.write_text(parity_page.page(path.read_text() if path.exists() else "", _rows, started_by))


def _write_support_matrix(terminalreporter, path):
    from tests.support_page import differences, page

    before = path.read_text() if path.exists() else ""
    after = page(before, _outcomes)
    path.write_text(after)
    terminalreporter.section(f"support matrix: {path}")
    for line in differences(before, after) or ["no cell has changed"]:
        terminalreporter.write_line(line)
