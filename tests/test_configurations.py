"""Training cells of any configuration do what a reference in plain NumPy does, call by call, and resume bit for bit."""

import pytest
from conftest import MODES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.configurations import covering, draw
from support.configured_training import check
from support.in_mode import in_mode


@pytest.mark.parametrize(("its_mode", "configuration"), covering())
def test_each_two_values_of_different_settings_meet(its_mode, configuration):
    with in_mode(MODES[its_mode]):
        check(configuration)


@pytest.mark.long
@settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any(mode, data):
    check(draw(lambda values: data.draw(st.sampled_from(values))))
