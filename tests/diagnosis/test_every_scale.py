"""A gradient that is NaN at every loss scale while the loss is finite: where, and what to write instead, is said."""

import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from support.training import by_sgd, changed, state
from support.untouched import untouched

from ms_lossscale import DynamicLossScale, LossScaleMonitor, advise_float32, locate_overflow


class Norm(nn.Cell):
    def __init__(self, epsilon):
        super().__init__()
        self.epsilon = epsilon

    def construct(self, x):
        return ops.sqrt(ops.square(x).sum(-1) + self.epsilon)


class Distance(nn.Cell):
    """The norm of a layer's output, exactly 0 for an input of 0. Its gradient is as large as `factor`."""

    def __init__(self, epsilon=0.0, factor=1.0):
        super().__init__()
        self.dense = nn.Dense(3, 2, weight_init="ones", has_bias=False)
        self.norm = Norm(epsilon)
        self.factor = factor

    def construct(self, x):
        return self.norm(self.dense(x)).astype(mstype.float32).mean() * self.factor


def in_float16(network):
    network.dense.to_float(mstype.float16)
    network.norm.to_float(mstype.float16)
    return network


ORDINARY = Tensor(np.float32([[1, 2, 3], [3, 2, 1]]))
WITH_ZERO = Tensor(np.float32([[1, 2, 3], [0, 0, 0]]))
SAYS = (
    "In the backward of norm, the gradient that it passes back is NaN at every loss scale, while the loss is finite: a "
    "derivative is infinite there, as that of a root or norm of exactly 0. Add an epsilon under the root, "
    "ops.sqrt(x + 1e-6); ops.where after it does not help."
)
IN_FLOAT16 = " Or the derivative overflows in float16: advise_float32 tells whether float32 mends that."


@quick_in_pynative_mode
def test_it_is_located(mode):
    network = Distance()
    with untouched(network):
        trace = locate_overflow(network, [ORDINARY, WITH_ZERO])
    assert (trace.cell, trace.direction, trace.kind, trace.batch) == ("norm", "backward", "NaN", 1)
    assert trace.every_scale == SAYS
    assert str(trace).endswith(SAYS)
    assert locate_overflow(in_float16(Distance()), [WITH_ZERO]).every_scale == SAYS + IN_FLOAT16
    assert not locate_overflow(Distance(epsilon=1e-6), [WITH_ZERO]).found
    # What fits at a lower scale, and what the forward does.
    overflow = locate_overflow(in_float16(Distance(factor=2.0**17)), [ORDINARY])
    assert (overflow.found, overflow.direction, overflow.every_scale) == (True, "backward", "")
    assert locate_overflow(Distance(), [ORDINARY * np.inf]).every_scale == ""


@quick_in_pynative_mode
def test_advice_on_a_float32_network_says_so(mode):
    advice = advise_float32(Distance(), [WITH_ZERO])
    assert (advice.holds, advice.cells) == (False, [])
    assert SAYS in str(advice)


def test_the_warning_says_so_and_training_goes_on(mode):
    cell = by_sgd(Distance(), DynamicLossScale(2.0**10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(49):
            cell(WITH_ZERO)
    before = state(cell)
    with pytest.warns(RuntimeWarning, match="the last 50 steps were skipped") as caught:
        cell(WITH_ZERO)
    message = str(caught[0].message)
    assert f"the gradients that were not finite last: dense.weight. {SAYS} More symptoms" in message
    assert "float32" not in message
    assert all(name.startswith("step_counters.") for name in changed(before, state(cell)))
    assert mindspore.get_context("mode") == {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}[mode]
    assert not cell(ORDINARY)[1]


@quick_in_pynative_mode
def test_the_stop_of_a_monitor_says_so_where_it_has_the_batch(mode):
    said = {}
    for batch, overflows in ((WITH_ZERO, True), (WITH_ZERO, False), (ORDINARY, True)):
        network = Distance() if batch is WITH_ZERO else in_float16(Distance(factor=2.0**17))
        cell = by_sgd(network, DynamicLossScale(1.0))
        monitor = LossScaleMonitor(max_consecutive_skips=2)
        with pytest.raises(RuntimeError, match="was stopped at step 2") as error, monitor.watching(cell):
            for _ in range(2):
                monitor.after_step(*cell(batch), inputs=batch if overflows else None)
        said[batch is WITH_ZERO, overflows] = str(error.value)
    assert said[True, True].endswith(SAYS)
    for message in (said[True, False], said[False, True]):
        assert "What to try: the backward overflows at every scale so far" in message
        assert "NaN at every scale, as behind the root of an exact 0, needs an epsilon under it" in message
