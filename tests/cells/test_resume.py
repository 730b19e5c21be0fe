"""A run that is stopped and goes on in a new process ends, bit for bit, where it would have ended."""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter
from support import resume_training
from support.networks import LinearWithBias
from support.optimizers import RUN_EVERYWHERE, make_optimizer
from support.python_process import check_python
from support.resume_training import FIRST, OPTIMIZERS, OVERFLOWS, THEN, lower_learning_rate, make_cell, train
from support.training import same_bits, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


@pytest.mark.slow
def test_goes_on_as_if_it_had_not_been_stopped(mode, tmp_path):
    wanted = {}
    for name in OPTIMIZERS:
        cell = make_cell(name)
        train(cell, 0, FIRST)
        lower_learning_rate(cell)
        mindspore.save_checkpoint(cell, str(tmp_path / f"{name}.ckpt"))
        at_the_stop = state(cell)
        reported = train(cell, FIRST, FIRST + THEN)
        wanted[name] = {"reported": reported, **state(cell)}

        # What makes this a test: an overflow and a growth among the steps, and all state moves.
        _, overflows, scales = reported.T
        assert overflows.sum() == sum(OVERFLOWS[FIRST:]) == 1
        assert {-1, 1} <= {*np.sign(np.diff(scales))}
        for weight in cell.network.trainable_params():
            assert not same_bits(at_the_stop[weight.name], wanted[name][weight.name])

    check_python(resume_training.__file__, mode, tmp_path, tmp_path, cwd=tmp_path)

    for name in OPTIMIZERS:
        resumed = np.load(tmp_path / f"{name}.npz")
        assert set(resumed) == set(wanted[name])
        for key in resumed:
            assert same_bits(resumed[key], wanted[name][key]), f"{name}: {key}"


def parameters_in(value):
    """The Parameters that an attribute holds, also in lists and dicts, where MindSpore does not look for them."""
    if isinstance(value, Parameter):
        return [value]
    value = list(value.values()) if isinstance(value, dict) else value
    return [its for each in value for its in parameters_in(each)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("name", sorted(RUN_EVERYWHERE))
def test_all_that_an_optimizer_remembers_is_in_the_checkpoint(name):
    network = LinearWithBias()
    optimizer, _ = make_optimizer(name, network)
    remembered = {parameter.name for value in vars(optimizer).values() for parameter in parameters_in(value)}
    assert remembered >= {"weight", "bias"}
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale())
    assert remembered <= set(cell.parameters_dict())
