"""LossScaleMonitor notices what a loop of one's own forgets: an order, a cell, a call of after_step."""

import warnings

import numpy as np
import pytest
from conftest import in_pairs, quick_in_pynative_mode
from mindspore import Tensor
from support.linear_pair import Trained
from support.sloped_networks import cell, manual, with_norm

from ms_lossscale import DynamicLossScale, LossScaleMonitor


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "given",
    [
        lambda loss, overflow: (overflow, loss),
        lambda loss, overflow: (bool(overflow), float(loss)),
        lambda loss, overflow: (loss,),
        lambda loss, overflow: (),
        lambda loss, overflow: ((loss, overflow),),
        lambda loss, overflow: (loss, Tensor(1024.0)),
        lambda loss, overflow: (loss, Tensor([True, False])),
        lambda loss, overflow: (None, overflow),
    ],
)
def test_what_is_not_the_loss_and_the_overflow_of_a_manual_step(mode, given):
    step, train_step = manual(DynamicLossScale())
    monitor = LossScaleMonitor()
    with monitor.watching(step):
        outputs = train_step(with_norm(1.0))
        with pytest.raises(ValueError, match=r"two values, the loss and what 'end' returned, .*\(loss, overflow\)"):
            monitor.after_step(*given(*outputs))
        for fitting in (outputs, (float(outputs[0]), bool(outputs[1])), [each.asnumpy() for each in outputs]):
            monitor.after_step(*fitting)


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["scaled", "simultaneous", "alternating"])
def test_outputs_in_another_order_or_of_another_kind_of_cell(mode, kind):
    others = [Trained(other).call_cell() for other in ("scaled", "simultaneous", "alternating")]
    trained, monitor = Trained(kind), LossScaleMonitor()
    with monitor.watching(trained.cell):
        outputs = trained.call_cell()
        monitor.after_step(*outputs)
        loss, overflow, loss_scale, *more = outputs
        wrong = [(overflow, loss, loss_scale, *more), (loss, loss_scale, overflow, *more), (loss, overflow), [outputs]]
        if kind == "alternating":
            wrong += [outputs[:3], *others[:2]]
        else:
            wrong.append(others[2])
        for each in wrong:
            with pytest.raises(ValueError, match=r"all [34] Tensors that the \w+ returns, in this order: the loss; "):
                monitor.after_step(*each)


def told(recorded):
    return [str(each.message) for each in recorded if "LossScaleMonitor" in str(each.message)]


def watch(watched, made, monitor, steps=6, of_loop=lambda outputs: outputs):
    """Watches one cell in a loop that calls another one. Returns the warnings of the monitor."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        with monitor.watching(watched):
            for _ in range(steps):
                monitor.after_step(*of_loop(made()))
    return told(recorded)


@in_pairs
def test_another_cell_than_the_one_that_is_watched(mode, how):
    monitor, watched, made = LossScaleMonitor(every_n_steps=2), cell(DynamicLossScale()), cell(DynamicLossScale())
    (message,) = watch(watched, lambda: made(with_norm(1.0)), monitor)
    assert "the ScaledTrainOneStepCell that is watched made no step before step 2. Pass the cell that makes" in message
    step, _ = manual(DynamicLossScale(), how)
    _, train_step = manual(DynamicLossScale(), how)
    (message,) = watch(step, lambda: train_step(with_norm(1.0)), monitor, steps=1)
    assert "the ManualStep that is watched made no step before step 1." in message


@pytest.mark.parametrize("steps", [1, 2])
def test_of_alternating_networks_none_may_take_part(steps):
    trained = Trained("alternating", every=(3, 4), steps=steps)
    assert watch(trained.cell, trained.call_cell, LossScaleMonitor(every_n_steps=1), steps=9) == []
    other = Trained("alternating", every=(3, 4), steps=steps)
    assert len(watch(other.cell, trained.call_cell, LossScaleMonitor(every_n_steps=3))) == 1


@quick_in_pynative_mode
@pytest.mark.parametrize("norm, words", [(1.0, "came with an overflow of True, but was applied"), (np.inf, "skipped")])
def test_the_opposite_of_what_the_step_returned(mode, norm, words):
    step, train_step = manual(DynamicLossScale())

    def turned_around(outputs):
        return outputs[0], not bool(outputs[1])

    (message,) = watch(
        step, lambda: train_step(with_norm(norm)), LossScaleMonitor(every_n_steps=2), of_loop=turned_around
    )
    assert f"step 1 came with an overflow of {norm == 1.0}" in message and words in message


@quick_in_pynative_mode
@pytest.mark.parametrize("steps", [1, 2])
def test_loops_that_forget_nothing_are_not_warned_of(mode, steps):
    step, train_step = manual(DynamicLossScale(), gradient_accumulation_steps=steps)
    monitor, norms = LossScaleMonitor(every_n_steps=2, max_consecutive_skips=9), [1.0, np.inf, 1.0, 1.0, np.inf]
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for _ in range(2):
            with monitor.watching(step):
                for norm in norms:
                    monitor.after_step(*train_step(with_norm(norm)))
                    step.flush()
                monitor.after_epoch()
    assert told(recorded) == []


@quick_in_pynative_mode
def test_watching_without_a_single_after_step(mode):
    its, monitor = cell(DynamicLossScale()), LossScaleMonitor()
    message = r"without a single 'after_step'.*Call monitor\.after_step"
    with pytest.warns(RuntimeWarning, match=message) as recorded, monitor.watching(its):
        its(with_norm(1.0))
    assert [warning.filename for warning in recorded if "after_step" in str(warning.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What raises has another reason to have made no step.
        with pytest.raises(KeyboardInterrupt), monitor.watching(its):
            raise KeyboardInterrupt
