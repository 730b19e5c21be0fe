"""Whatever refers to state, in whatever holder: it is found, and nothing of the user's is executed."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn
from support.holders_of_state import HOLDERS

from ms_lossscale.forward_state.find import find_forward_state


class Holding(nn.Cell):
    def __init__(self, held):
        super().__init__()
        # As an ordinary attribute, whatever it is.
        object.__setattr__(self, "held", held)

    def construct(self, x):
        return x


def found_in(held):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_forward_state("cell", (Holding(held),)).names


def state():
    return Parameter(Tensor([1.0]), name="state", requires_grad=False)


@pytest.mark.parametrize("name", HOLDERS)
def test_state_in_a_holder(name):
    assert found_in(HOLDERS[name](state())) == ["unregistered_0.state"]


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(list(HOLDERS)), min_size=2, max_size=6))
def test_state_in_holders_within_holders(names):
    held = state()
    for name in names:
        held = HOLDERS[name](held)
    assert found_in(held) == ["unregistered_0.state"]
