"""What goes wrong between `begin` and `end` of a ManualStep is noticed, in compiled code, too."""

import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, ops
from support.manual_training import Halve, adam, batch, batches, dynamic, manual, regression
from support.training import changed, state

from ms_lossscale import LossScaleMonitor, ManualStep

COUNTS = {"step_counters.skipped_steps", "step_counters.consecutive_skipped_steps"}


def zeros(step):
    return tuple(map(ops.zeros_like, step.parameters))


def end_alone(step):
    @mindspore.jit
    def end(*grads):
        return step.end(grads)

    return lambda: end(*zeros(step))


@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_an_end_without_begin_updates_nothing_and_is_counted(mode, steps):
    """Also within an accumulation cycle, which goes on as if it had not been."""
    keywords = {"gradient_accumulation_steps": steps, "ema_decay": 0.9, "clip_norm": 1.0}
    step, (network,), train_step = manual(dynamic(), "in_jit", **keywords)
    expected, (its_network,), its_train_step = manual(dynamic(), "in_jit", **keywords)
    end = end_alone(step)
    for i, data in enumerate(batches("..x....")):
        train_step(*data)
        its_train_step(*data)
        if i in (2, 4):
            # Between steps, what the last `begin` has copied is old.
            network(*batch(9))
            its_network(*batch(9))
            before = state(step)
            overflow = end()
            assert (overflow.dtype, overflow.shape, bool(overflow)) == (mindspore.bool_, (), True)
            assert changed(before, state(step)) == COUNTS
            assert step.overflowed_parameters() == []
    assert not changed(state(expected), state(step)) - COUNTS
    assert step.skip_reasons() == {**expected.skip_reasons(), "not_begun": 2}
    assert expected.skip_reasons()["not_begun"] == 0
    assert (
        step.counters()["skipped_steps"]
        == expected.counters()["skipped_steps"] + 2
        == sum(step.skip_reasons().values())
    )


def test_a_second_end_updates_nothing(mode):
    step, (network,), _ = manual(dynamic())
    expected, _, its_train_step = manual(dynamic(), "in_jit")
    value_and_grad = step.value_and_grad(network)

    @mindspore.jit
    def train_step(x, y):
        loss, grads = value_and_grad(*step.begin(x, y))
        first = step.end(grads)
        return loss, first, step.end(ops.depend(grads, first))

    for i, data in enumerate(batches(".x.")):
        overflows = train_step(*data)[1:]
        assert [bool(overflow) for overflow in overflows] == [i == 1, True]
        its_train_step(*data)
        assert not changed(state(expected), state(step)) - COUNTS
    assert step.counters() == {"applied_steps": 2, "skipped_steps": 4, "consecutive_skipped_steps": 1}
    assert step.skip_reasons()["not_begun"] == 3


@pytest.mark.parametrize(
    "keywords", [{}, *slow({"gradient_accumulation_steps": 2}, {"gradient_transforms": [Halve()]})]
)
def test_gradients_that_were_computed_before_begin_update_nothing(mode, keywords):
    step, (network,), train_step = manual(dynamic(), "in_jit", **keywords)
    expected, _, its_train_step = manual(dynamic(), "in_jit", **keywords)
    value_and_grad = step.value_and_grad(network)

    @mindspore.jit
    def differentiate_first(x, y):
        loss, grads = value_and_grad(x, y)
        x, y = step.begin(x, y)
        return loss, step.end(grads)

    for i, data in enumerate(batches("....")):
        assert bool(differentiate_first(*data)[1])
        assert step.skip_reasons()["not_begun"] == i + 1
        # The next step is one as ever.
        assert bool(train_step(*data)[1]) == bool(its_train_step(*data)[1])
        # What a forward writes before `begin` is not undone.
        differ = {name for name in changed(state(expected), state(step)) if ".moving_" not in name}
        assert differ <= COUNTS


def test_derivatives_outside_of_steps_cost_no_step(mode):
    step, (network,), _ = manual(dynamic(), "in_jit")
    value_and_grad = step.value_and_grad(network)

    @mindspore.jit
    def train_step(x, y):
        x, y = step.begin(x, y)
        _, grads = value_and_grad(x, y)
        skipped = step.end(grads)
        return skipped, value_and_grad(x, y)[0]

    @mindspore.jit
    def probe(x, y):
        return value_and_grad(x, y)[0]

    for data in batches("...."):
        assert not bool(train_step(*data)[0])
        probe(*data)
    assert step.counters() == {"applied_steps": 4, "skipped_steps": 0, "consecutive_skipped_steps": 0}


@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_fifty_skipped_steps_in_a_row_are_told_once(mode, steps, capfd):
    _, _, train_step = manual(dynamic(), "in_jit", gradient_accumulation_steps=steps, name="critic")

    def told_in(data, count):
        for _ in range(count * steps):
            train_step(*data)
        mindspore.runtime.synchronize()
        return [line for line in capfd.readouterr().out.splitlines() if "steps were skipped" in line]

    good, bad = batch(0), batch(1, overflows=True)
    assert told_in(bad, 49) == told_in(good, 1) == told_in(bad, 49) == []
    (line,) = told_in(bad, 1)
    assert line.startswith("For 'ManualStep' 'critic', the last 50 steps were skipped")
    assert told_in(bad, 60) == told_in(good, 1) == told_in(bad, 50) == []


@pytest.mark.parametrize(("begins", "ends"), [("in_jit", "eagerly"), ("eagerly", "in_jit")])
@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_begin_or_end_alone_is_compiled(mode, begins, ends, steps):
    step, (network,), _ = manual(dynamic(), gradient_accumulation_steps=steps)
    expected, _, its_train_step = manual(dynamic(), gradient_accumulation_steps=steps)
    value_and_grad = step.value_and_grad(network)

    def begin(x, y):
        return value_and_grad(*step.begin(x, y))

    def end(grads):
        return step.end(grads)

    begin = mindspore.jit(begin) if begins == "in_jit" else begin
    end = mindspore.jit(end) if ends == "in_jit" else end
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in batches("..x.......x...."):
            loss, grads = begin(*data)
            overflow = end(mindspore.mutable(grads))
            (its_loss,), its_overflow = its_train_step(*data)
            np.testing.assert_allclose(loss.asnumpy(), its_loss.asnumpy(), rtol=1e-5)
            assert bool(overflow) == bool(its_overflow)
    for name, value in state(expected).items():
        np.testing.assert_allclose(state(step)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert step.counters() == expected.counters()


@quick_in_pynative_mode
def test_steps_that_never_end_are_told_once(mode):
    step, (network,), train_step = manual(dynamic())

    def begin(count):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                network(*step.begin(*batch(0)))
        return [str(warning.message) for warning in caught]

    assert begin(9) == []
    train_step(*batch(0))
    assert begin(10) == []
    (message,) = begin(50)
    assert message.startswith("For 'ManualStep', the last 10 steps began and never ended: each 'begin' restores what")
    train_step(*batch(0))
    assert begin(20) == []


@quick_in_pynative_mode
def test_the_monitor_tells_of_an_end_without_begin(mode, capsys):
    step, _, train_step = manual(dynamic())
    train_step(*batch(0))
    end, monitor = end_alone(step), LossScaleMonitor(max_consecutive_skips=2)
    with monitor.watching(step):
        monitor.after_step(Tensor(0.0), end())
        with pytest.raises(RuntimeError, match=r"as 'end' came without 'begin'.* What to try: call begin\("):
            monitor.after_step(Tensor(0.0), end())
    assert "skipped (1 in a row) as 'end' came without 'begin', loss scale 1024 stays\n" in capsys.readouterr().out


@quick_in_pynative_mode
def test_a_step_without_a_scale_counts_it_too(mode):
    network = regression()
    step = ManualStep(network.set_train(), adam(network), None)
    step.begin(*batch(0))
    step.end(zeros(step))
    assert end_alone(step)()
    assert step.counters() == {"applied_steps": 1, "skipped_steps": 1, "consecutive_skipped_steps": 1}


@quick_in_pynative_mode
def test_steps_that_compiled_code_ends_are_none_that_never_end(mode):
    step, (network,), _ = manual(dynamic())
    value_and_grad = step.value_and_grad(network)

    @mindspore.jit
    def end(*grads):
        return step.end(grads)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            end(*value_and_grad(*step.begin(*batch(0)))[1])
    with pytest.warns(RuntimeWarning, match="the last 10 steps began and never ended"):
        for _ in range(12):
            step.begin(*batch(0))
