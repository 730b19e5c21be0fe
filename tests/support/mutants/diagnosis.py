"""Mutants of the diagnoses."""

from support.mutants.mutant import Mutant

_OTHERS = ("test_diagnosis_of_other_networks.py",)
_REPORT = ("test_gradient_report.py",)
_FLOAT32 = ("test_advise_float32.py",)

MUTANTS = [
    Mutant(
        "a cell with a backward of its own is not watched",
        "_mindspore.py",
        "has_bprop, cell.has_bprop = cell.has_bprop, False",
        "has_bprop = cell.has_bprop",
        _OTHERS,
    ),
    Mutant(
        "vmap is not compiled under the diagnoses",
        "diagnosis/replay.py",
        'with _in_mode(mindspore.PYNATIVE_MODE, "0"), around_transforms(_compiling):',
        'with _in_mode(mindspore.PYNATIVE_MODE, "0"):',
        _OTHERS,
    ),
    Mutant(
        "what vmap compiles has the hooks, too",
        "diagnosis/cell_watch.py",
        "with around_transforms(self._unwatched):",
        "with contextlib.nullcontext():",
        _OTHERS,
    ),
    Mutant(
        "what fails in a hook is not told",
        "diagnosis/cell_watch.py",
        "self._failure = self._failure or error",
        "pass",
        _OTHERS,
    ),
    Mutant(
        "a network of graph mode only is the network's failure",
        "diagnosis/replay.py",
        "self._may_be_only_in_graph = trains_in_graph_mode",
        "self._may_be_only_in_graph = False",
        _OTHERS,
    ),
    Mutant(
        "the picture leaves zeros out",
        "diagnosis/picture.py",
        "counts[0], counts[-1] = distribution.zeros, distribution.non_finite",
        "counts[-1] = distribution.non_finite",
        _REPORT,
    ),
    Mutant(
        "no cell is left out again",
        "diagnosis/float32_search.py",
        "_smallest(trials, _fewest(trials, _enough(trials), []))",
        "_enough(trials)",
        _FLOAT32,
    ),
    Mutant(
        "asking leaves the cells in float32",
        "_mindspore.py",
        "        attributes.update(before)\n",
        "",
        _FLOAT32,
    ),
    Mutant(
        "a cell in float32 is not compiled again",
        "diagnosis/float32_advice.py",
        "            forget_compiled(self._owner)\n",
        "            pass\n",
        _FLOAT32,
    ),
    Mutant(
        "gradients are not looked at",
        "diagnosis/float32_trials.py",
        "return are_finite([loss, *grads, *self._state.values()])",
        "return are_finite([loss, *self._state.values()])",
        _FLOAT32,
    ),
]
