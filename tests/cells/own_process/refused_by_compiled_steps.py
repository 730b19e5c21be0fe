"""What a ManualStep refuses while `mindspore.jit` compiles it.

In a process of their own: a compilation that fails leaves MindSpore in a state in which later ones may fail, too."""

import mindspore
import pytest
from support.manual_training import batch, dynamic, manual
from support.training import stepping

from ms_lossscale import LossScaleMonitor


def test_where_no_begin_ever_was_compiling_raises(mode):
    step, (network,), _ = manual(dynamic())
    value_and_grad = step.value_and_grad(network)

    @mindspore.jit
    def without_begin(x, y):
        loss, grads = value_and_grad(x, y)
        return loss, step.end(grads)

    @mindspore.jit
    def train_step(x, y):
        # What `begin` returns is not used, which is no mistake where the forward takes the inputs from elsewhere.
        step.begin(x, y)
        loss, grads = value_and_grad(x, y)
        return loss, step.end(grads)

    with pytest.raises(RuntimeError, match=r"For 'ManualStep.end', no step has begun\. Call begin\(\*inputs\) in each"):
        without_begin(*batch(0))
    assert step.counters() == {"applied_steps": 0, "skipped_steps": 0, "consecutive_skipped_steps": 0}
    assert not train_step(*batch(0))[1]
    assert without_begin(*batch(0))[1]
    assert step.counters() == {"applied_steps": 1, "skipped_steps": 1, "consecutive_skipped_steps": 1}


def test_what_python_alone_can_call_says_so_in_compiled_code(mode):
    step, (network,), train_step = manual(dynamic())
    value_and_grad, monitor = step.value_and_grad(network), LossScaleMonitor()

    def value_and_grad_of(x, y):
        return step.value_and_grad(network)(*step.begin(x, y))

    def after_step(x, y):
        loss, grads = value_and_grad(*step.begin(x, y))
        overflow = step.end(grads)
        monitor.after_step(loss, overflow)
        return overflow

    def get_loss_scale(x, y):
        return step.begin(x, y), step.get_loss_scale()

    def set_loss_scale(x, y):
        step.set_loss_scale(2.0)
        return step.begin(x, y)

    def counters(x, y):
        return step.begin(x, y), step.counters()

    def flush(x, y):
        step.flush()
        return step.begin(x, y)

    calls = (value_and_grad_of, after_step, get_loss_scale, set_loss_scale, counters, flush)
    for call in calls:
        name = call.__name__.removesuffix("_of")
        with pytest.raises(RuntimeError, match=rf"'{name}\(\)' can't be called in code that mindspore.jit or"):
            mindspore.jit(call)(*batch(0))
    train_step(*batch(0))
    assert step.counters()["applied_steps"] == 1


@pytest.mark.parametrize("how", ["eagerly", "in_jit"])
def test_a_loss_that_is_scaled_twice(mode, how):
    """Eagerly, graph mode compiles the derivative by itself."""
    step, (network,), _ = manual(dynamic(), name=how)

    def forward(x, y):
        return step.scale(network(x, y))

    with pytest.raises(RuntimeError, match=r"'ManualStep.value_and_grad', the function of optimizer 0 calls 'scale'"):
        stepping(step, forward, how)(*batch(0))
    assert step.counters()["applied_steps"] == 0
