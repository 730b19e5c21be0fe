"""In PyNative mode, parts of a step are compiled: in the first calls, and never again while shapes stay."""

import sys

import pytest
from conftest import MODES, slow
from mindspore import Tensor
from support.gan_networks import GanLosses, gan_batch, generator_and_discriminator, two_optimizers
from support.in_mode import in_mode
from support.linear_pair import Trained, arrays
from support.manual_training import batch, dynamic, manual

import ms_lossscale as ls

# Compiling a step makes some 50,000 calls of Python functions, running it some hundred.
MOST_CALLS = 5000


def cell_of(kind, **keywords):
    trained = Trained(kind, **keywords)

    def inputs_of(overflows):
        x0, x1, y = map(Tensor, arrays(0, (overflows, overflows)))
        return (x0, y) if kind == "scaled" else (x0, x1, y)

    return trained.cell, inputs_of


def of_one_network(**keywords):
    networks = generator_and_discriminator()
    cell = ls.SimultaneousTrainOneStepCell(GanLosses(*networks), two_optimizers(*networks), dynamic(), **keywords)
    return cell.set_train(), lambda overflows: gan_batch(0, (0, 1) if overflows else ())


def manual_step(**keywords):
    return manual(dynamic(), **keywords)[2], lambda overflows: batch(0, overflows)


KEYWORDS = {"clip_norm": 1.0, "ema_decay": 0.9}
DROPPING = {"drop_overflowed_calls": True}
STEPS = {
    "plain": lambda: cell_of("scaled"),
    "retried": lambda: cell_of("scaled", max_retries=2, **KEYWORDS),
    "cycle": lambda: cell_of("scaled", steps=2),
    "dropping": lambda: cell_of("scaled", steps=2, max_retries=1, **DROPPING),
    "manual": lambda: manual_step(**KEYWORDS),
    "manual cycle": lambda: manual_step(gradient_accumulation_steps=2, **DROPPING),
    "simultaneous": lambda: cell_of("simultaneous", max_retries=1),
    "shared": lambda: of_one_network(max_retries=1),
    "alternating": lambda: cell_of("alternating", every=(1, 2), steps=2),
}
QUICK = ("retried", "shared")


def python_calls(call, inputs):
    """Returns how many Python functions a call runs."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        call(*inputs)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in STEPS if name not in QUICK))])
def test_a_step_compiles_nothing_once_it_has_run(name):
    """Neither while it applies nor while it skips, after both have happened."""
    with in_mode(MODES["pynative"]):
        call, inputs_of = STEPS[name]()
        first = python_calls(call, inputs_of(False))
        for overflows in (False, True, True, False, False, False):
            call(*inputs_of(overflows))
        calls = [python_calls(call, inputs_of(overflows)) for overflows in (False, False, True, True, False, False)]
    assert max(calls) < MOST_CALLS < first
