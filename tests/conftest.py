"""What every test runs in: both execution modes of MindSpore, the same random weights, and a folder of its own."""

import gc
import os

# With AVX-512, MindSpore's convolutions on CPU choose a kernel that is 10 to 80 times slower. Read at import.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import mindspore
import pytest
from support.in_mode import in_mode

# Modules without examples, of which one takes the place of the self-check's checks when it is imported.
collect_ignore = ["support"]

MODES = {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}


@pytest.fixture(params=list(MODES))
def mode(request):
    """Runs the test in GRAPH_MODE and in PYNATIVE_MODE. The value is the mode's name."""
    with in_mode(MODES[request.param]):
        yield request.param


def _quick_in(quick):
    modes = [name if name == quick else pytest.param(name, marks=pytest.mark.long) for name in MODES]
    return pytest.mark.parametrize("mode", modes, indirect=True)


# Where the mode decides nothing of what is shown: in the one that takes less time, mostly PyNative mode, which compiles
# less. Graph mode compiles for a second or more.
quick_in_graph_mode, quick_in_pynative_mode = map(_quick_in, MODES)


@pytest.fixture(autouse=True, scope="module")
def _no_search_for_garbage_in_what_stays():
    """MindSpore collects garbage before each compilation: a tenth of the time, if it looks at all that is older."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_weights():
    """In whichever order and process the tests run."""
    mindspore.set_seed(0)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """MindSpore writes rank_0/ and rewritten_network/ into the working folder."""
    monkeypatch.chdir(tmp_path)
