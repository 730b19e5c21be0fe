"""What all tests use: both execution modes of MindSpore, the same random weights, a folder for each test."""

import ast
import functools
import gc
import os
import re
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower. It reads this at import.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore
import pytest
from support.in_mode import in_mode

import ms_lossscale
from ms_lossscale import emulation

# These modules have no examples, and importing one of them replaces the self-check's checks.
collect_ignore = ["support"]

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}
# What MindSpore says where it lacks a kernel that it has on CPU; of a GPU as seen with MindSpore 2.10.
LACKING = {
    "GPU": re.compile(
        r"BFloat16|op \[?(AdamW|CudnnGRU|FFT|Histogram)\b|operator\[(SGD|BatchNorm)\]|lstm kernel|copy_ method"
    )
}


def pytest_addoption(parser):
    parser.addoption("--device", metavar="DEVICE", help="CPU, GPU or Ascend (default: what MindSpore chooses)")


def pytest_configure(config):
    chosen = config.getoption("device")
    if chosen is not None:
        try:
            mindspore.set_device(chosen)
        except (RuntimeError, ValueError) as error:
            raise pytest.UsageError(f"MindSpore can't use --device {chosen}: {str(error).splitlines()[0]}") from None


def device():
    """Returns the name of the device on which the tests run."""
    return mindspore.get_context("device_target")


def pytest_runtest_setup(item):
    for mark in item.iter_markers("only_on"):
        if device() not in mark.args:
            pytest.skip(f"not on {device()}: {mark.kwargs['reason']}")


@pytest.fixture(autouse=True)
def _npus_are_emulated_on_cpu(monkeypatch):
    if device() != "CPU":
        skip = functools.partial(pytest.skip, f"not on {device()}: an NPU is emulated on CPU only")
        monkeypatch.setattr(emulation, "saturation_mode", skip)


@pytest.fixture(params=list(MODES))
def mode(request):
    """Runs the test in GRAPH_MODE and in PYNATIVE_MODE. The value is the mode's name."""
    with in_mode(MODES[request.param]):
        yield request.param


def _marked(mark, *values):
    return [pytest.param(*(v if type(v) is tuple else [v]), marks=mark) for v in values]


# Values of `pytest.mark.parametrize` that only the slow tests take, or only the nightly ones.
slow, nightly = (functools.partial(_marked, mark) for mark in (pytest.mark.slow, pytest.mark.nightly))


def _in(*modes):
    return pytest.mark.parametrize("mode", modes, indirect=True)


# If the mode does not matter for a test, it runs in the faster one, and nightly in the other one, too. The
# faster one is mostly PyNative mode, since graph mode compiles for a second or more.
quick_in_graph_mode = _in("graph", *nightly("pynative"))
quick_in_pynative_mode = _in("pynative", *nightly("graph"))
slow_in_graph_mode = _in(*slow("graph"), *nightly("pynative"))
slow_in_pynative_mode = _in(*slow("pynative"), *nightly("graph"))


# A ManualStep, eagerly and compiled, each in a mode of its own; the other pairs nightly.
in_pairs = pytest.mark.parametrize(
    ("mode", "how"),
    [("pynative", "eagerly"), *slow(("graph", "in_jit")), *nightly(("graph", "eagerly"), ("pynative", "in_jit"))],
    indirect=["mode"],
)


@pytest.fixture(autouse=True, scope="module")
def _no_search_for_garbage_in_what_stays():
    """Exempts older objects from the garbage collection before each compilation, which took a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_weights():
    """Makes random weights the same in whichever order and process the tests run."""
    mindspore.set_seed(0)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Gives each test a folder: MindSpore writes rank_0/ and rewritten_network/ into the working folder."""
    monkeypatch.chdir(tmp_path)


@functools.cache
def _functions_of_the_package():
    files = (path for path in Path(ms_lossscale.__file__).parent.rglob("*.py") if path.parts[-2] != "checks")
    trees = (ast.parse(path.read_text()) for path in files)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """
    Skips a test that needs a kernel which this device is known to lack.

    With FAIL_IF_DROPPED=1, fails a test if graph mode warns that it dropped something of the package, see
    test_dropped_side_effects.py. What a process compiled before decides whether it warns, and so does chance.
    """
    report = yield
    if report.failed and device() in LACKING and (said := LACKING[device()].search(str(call.excinfo.value))):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], f"Skipped: no kernel on {device()}: {said[0]}")
    if "FAIL_IF_DROPPED" in os.environ and call.when == "call" and report.passed:
        dropped = re.findall(r"eliminated by mistake\. The node is:@\d+_\W*\d*\W*(\w+?)_\d+:", report.capstderr)
        ours = {name for name in dropped if name.startswith("ms_lossscale") or name in _functions_of_the_package()}
        if ours:
            report.outcome = "failed"
            report.longrepr = f"Graph mode warned that it dropped something in {', '.join(sorted(ours))}."
    return report
