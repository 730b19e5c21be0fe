"""The diagnoses train, and say so; with `train=False` they look at what evaluation computes."""

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Tensor, nn
from mindspore import dtype as mstype
from support.untouched import untouched

from ms_lossscale import advise_float32, locate_overflow, profile_activations, profile_gradients

# One feature is large, whose moving statistics have never seen such a value.
BATCH = np.float32([[4e4], [-4e4], [1e4], [-1e4]]), np.zeros((4, 1), np.float32)


def evaluated():
    """A normalisation whose output only training keeps small, in evaluation mode, and a layer in float16."""
    layers = nn.BatchNorm1d(1), nn.Dense(1, 1, weight_init=Tensor([[4.0]], mstype.float32)).to_float(mstype.float16)
    return nn.WithLossCell(nn.SequentialCell(*layers), nn.MSELoss()).set_train(False)


@quick_in_pynative_mode
def test_an_overflow_of_the_evaluation_is_found(mode):
    network = evaluated()
    inputs = tuple(map(Tensor, BATCH))
    assert np.isinf(network(*inputs).asnumpy())
    with untouched(network):
        trained = locate_overflow(network, [BATCH])
        trace = locate_overflow(network, [BATCH], train=False)
    assert (trained.found, trained.train) == (False, True)
    assert "at loss scale 1 in training mode (train=False looks at evaluation)." in str(trained)
    assert (trace.cell, trace.direction, trace.kind, trace.train) == ("_backbone.1", "forward", "inf", False)
    assert "The first overflow at loss scale 1 in evaluation mode is in the forward of _backbone.1" in str(trace)


@quick_in_pynative_mode
def test_the_other_diagnoses_look_at_it_too_and_say_so(mode):
    network = evaluated()
    with untouched(network):
        outputs = {
            train: {
                its.place.cell: its.distribution.non_finite
                for its in profile_activations(network, [BATCH], train=train).activations
                if its.kind == "output"
            }
            for train in (True, False)
        }
        advice = advise_float32(network, [BATCH], train=False)
    assert (outputs[True]["_backbone.1"], outputs[False]["_backbone.1"]) == (0, 2)
    assert (advice.holds, "_backbone.1" in advice.cells, advice.train) == (True, True, False)
    assert "in evaluation mode)" in str(advice)
    assert "in training mode)" in str(advise_float32(network, [BATCH]))
    report = profile_activations(network, [BATCH], train=False)
    assert str(report).startswith("Values at the cells in 1 batch in evaluation mode, gradients")


class Scaled(nn.Cell):  # Its gradient is 2 in training, and 1 in evaluation.
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(1, 1, weight_init="ones", has_bias=False)

    def construct(self, x):
        loss = self.dense(x).sum()
        return 2 * loss if self.training else loss


def test_gradients_of_the_evaluation_are_counted(mode):
    x = Tensor(np.ones((1, 1), np.float32))
    for network in (Scaled(), Scaled().set_train()):
        reports = [profile_gradients(network, [x], train=train) for train in (True, False)]
        assert [report.largest for report in reports] == [2.0, 1.0]
        assert [report.train for report in reports] == [True, False]
        assert "at loss scale 1 in evaluation mode" in str(reports[1])


@pytest.mark.parametrize("diagnose", [advise_float32, locate_overflow, profile_activations, profile_gradients])
def test_train_must_be_a_bool(diagnose):
    message = f"For '{diagnose.__name__}', the argument 'train' must be True or False, but got 0"
    with pytest.raises(TypeError, match=message):
        diagnose(evaluated(), [BATCH], train=0)
