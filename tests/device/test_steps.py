"""
A step on this device: undone in time though the device works through a queue, also after an exception, and the same
bit for bit when it is made again.
"""

import mindspore
import numpy as np
import pytest
from conftest import device, slow
from mindspore import ops
from support.normalised_training import Convolutional, batch, make_cell, trained
from support.python_process import ROOT, check_python

STEPS = 24


def values_of(network):
    return {parameter.name: parameter.asnumpy().tobytes() for parameter in network.get_parameters()}


def test_skipped_steps_are_undone_in_time(mode):
    """The host waits for no step, so that the next one is queued while the last one is undone."""
    overflows = np.random.default_rng(0).integers(0, 2, STEPS).astype(bool).tolist()
    results = []
    for pattern in (overflows, [False] * overflows.count(False)):
        mindspore.set_seed(0)
        network = Convolutional()
        cell, applied = make_cell(network), 0
        for step_overflows in pattern:
            cell(*batch(applied, step_overflows))
            applied += not step_overflows
        results.append((values_of(network), cell.counters()["skipped_steps"]))
    (after_skips, skipped), (without, none) = results
    assert (skipped, none) == (overflows.count(True), 0)
    # The steps that were applied, and nothing of the others.
    assert after_skips == without


class Raising(Convolutional):
    """Raises in its forward, after it has written BatchNorm's statistics and queued more work, if it is told to."""

    how = None

    def construct(self, x, labels, factor):
        loss = super().construct(x, labels, factor)
        if self.how == "python":
            raise KeyError("planted")
        if self.how == "shapes":
            loss = loss + ops.matmul(x, x[:1, :1, :2])
        if self.how == "kernel":
            # Nothing is computed from it, and what is read after it waits for it: where it fails while the gradients
            # are computed, or where something needs its result, MindSpore itself may crash.
            ops.cholesky(-ops.eye(4))
            ops.relu(loss).asnumpy()
        return loss


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("how", ["python", "shapes", "kernel"])
def test_a_forward_that_raises_leaves_nothing(mode, how):
    network = Raising()
    cell = make_cell(network)
    cell(*batch(0))
    before, counted = values_of(network), cell.counters()
    network.how = how
    with pytest.raises((KeyError, ValueError, RuntimeError)):
        cell(*batch(1))
    network.how = None
    # As the next step begins with what the forward wrote undone.
    cell(*batch(2, overflows=True))
    assert values_of(network) == before
    assert cell.counters() == {**counted, "skipped_steps": 1, "consecutive_skipped_steps": 1}


@pytest.mark.parametrize("dtype", ["float32", *slow("float16")])
def test_a_training_repeats_bit_for_bit(mode, dtype):
    assert trained(dtype) == trained(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_so_it_does_in_another_process(mode, dtype, tmp_path):
    """Resuming is bit for bit only where this is."""
    program = ROOT / "tests" / "support" / "normalised_training.py"
    printed = {check_python(program, device(), mode, dtype, cwd=tmp_path).split()[-1] for _ in range(2)}
    assert len(printed) == 1
