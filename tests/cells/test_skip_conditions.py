"""Conditions that skip a step which did not overflow. Their rule, and when they are asked, the configurations draw."""

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Parameter, Tensor, ops
from support.manual_training import dynamic
from support.sloped_networks import Slopes, cell, with_norm
from support.training import bookkeeping, by_sgd, changed, state

import ms_lossscale as ls


class HighLoss(ls.SkipCondition):
    """Skips where the loss is above a limit, which the user's code may set. It counts how often it was asked, and
    observed, and remembers what it observed."""

    def __init__(self, limit=100.0):
        super().__init__()
        self.one = Tensor(1.0)
        self.limit, self.asked, self.observed, self.last_loss = (
            Parameter(Tensor(value), name=name, requires_grad=False)
            for name, value in (("limit", limit), ("asked", 0.0), ("observed", 0.0), ("last_loss", 0.0))
        )

    def construct(self, loss, norm):
        ops.assign_add(self.asked, self.one)
        return loss > self.limit

    def observe(self, loss, norm):
        ops.assign_add(self.observed, self.one)
        ops.assign(self.last_loss, loss)


@quick_in_graph_mode
def test_state_of_a_condition(mode):
    condition = HighLoss()
    trained = cell(dynamic(), skip_conditions=[condition])
    losses = [float(trained(with_norm(norm))[0]) for norm in (4.0, 64.0, np.inf, 5.0)]
    assert losses[1] > 100 > losses[3]
    # Asked three times, observed twice, and one of the three was undone.
    held = condition.asked, condition.observed, condition.last_loss
    assert [float(its.asnumpy()) for its in held] == [2.0, 2.0, losses[3]]
    assert trained.get_loss_scale() == 2.0**9
    assert (trained.counters()["skipped_by_condition"], trained.skip_reasons()["loss"]) == (1, 1)
    assert {"asked", "observed", "last_loss"} <= trained.parameters_dict().keys()


def test_what_cannot_be_loaded():
    trained = cell(dynamic(), skip_conditions=[ls.NormSpike(max_norm=1.0, z_score=1.0)])
    for name, value in (("mean", np.float32(np.nan)), ("variance", np.float32(-1)), ("steps", np.int32(-1))):
        values = {**state(trained), f"norm_spike.{name}": value}
        with pytest.raises(ValueError, match=rf"norm_spike.{name}"):
            trained.load_state_dict({name: Tensor(value) for name, value in values.items()})


@quick_in_pynative_mode
def test_a_norm_that_is_nan_is_a_spike_where_nothing_is_checked(mode):
    trained = cell(None, skip_conditions=[ls.NormSpike(max_norm=10.0)])
    before = state(trained)
    assert bool(trained(with_norm(np.nan))[1])
    assert changed(before, state(trained)) <= bookkeeping(before)


@quick_in_pynative_mode
def test_networks_that_take_turns_have_the_very_conditions_that_each_was_given(mode):
    """A flat list is copied for each."""

    def alternating(conditions):
        networks = [Slopes(f"{i}") for i in range(2)]
        trained = by_sgd(networks, 8.0, kind="alternating", skip_conditions=conditions)
        return lambda: trained(with_norm(2.0))[1].asnumpy().tolist()

    own, shared = [HighLoss(1e6), HighLoss(1e6)], HighLoss(1e6)
    trained = alternating([[each] for each in own])
    assert trained() == [False, False]
    ops.assign(own[1].limit, Tensor(-1e6))
    assert trained() == [False, True]
    assert own[0].last_loss.asnumpy() < own[1].last_loss.asnumpy() == 4.0
    trained = alternating([shared])
    ops.assign(shared.limit, Tensor(-1e6))
    assert trained() == [True, False]
