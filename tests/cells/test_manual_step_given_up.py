"""A step of a ManualStep that never ends leaves nothing."""

import mindspore
import pytest
from conftest import in_pairs, slow
from support.manual_training import batch, dynamic, manual
from support.training import changed, state


def given_up(step, networks, data, how):
    """Begins a step, runs its forward and gives it up, as an exception between the two does."""

    def forward(x, y):
        x, y = step.begin(x, y)
        return networks[0](x, y)

    (mindspore.jit(forward) if how == "in_jit" else forward)(*data)


@pytest.mark.parametrize("steps", [1, *slow(2)])
@in_pairs
def test_a_step_that_never_ends_is_undone_when_the_next_begins(mode, how, steps):
    """Of an accumulation cycle, the calls before stay."""
    step, networks, train_step = manual(dynamic(), how, gradient_accumulation_steps=steps)
    expected, _, its_train_step = manual(dynamic(), how, gradient_accumulation_steps=steps)
    for seed in range(4):
        before = state(networks[0])
        given_up(step, networks, batch(10 + seed, overflows=seed == 2), how)
        assert changed(before, state(networks[0])) == {"network_0.1.moving_mean", "network_0.1.moving_variance"}
        train_step(*batch(seed))
        its_train_step(*batch(seed))
        assert not changed(state(expected), state(step))
    assert step.counters()["applied_steps"] == 4 // steps


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_an_exception_within_the_forward_that_is_differentiated(mode):
    step, networks, train_step = manual(dynamic())
    expected, _, its_train_step = manual(dynamic())

    def forward(x, y):
        step.scale(networks[0](x, y))
        raise InterruptedError

    grad = mindspore.grad(forward, None, step.parameters)
    for seed in range(2):
        with pytest.raises(InterruptedError):
            grad(*step.begin(*batch(10 + seed)))
        train_step(*batch(seed))
        its_train_step(*batch(seed))
        assert not changed(state(expected), state(step))


@pytest.mark.parametrize("what", ["load_state_dict", "load_param_into_net", "discard", "flush"])
@in_pairs
def test_what_comes_after_it_stays(mode, how, what, tmp_path):
    """The next step undoes nothing of it."""
    step, networks, train_step = manual(dynamic(), how, gradient_accumulation_steps=3)
    for seed in range(2):
        train_step(*batch(seed))
    expected, _, _ = manual(dynamic(), how, gradient_accumulation_steps=3)
    mindspore.save_checkpoint(step, "step.ckpt")
    saved = mindspore.load_checkpoint("step.ckpt")
    expected.load_state_dict(saved)
    given_up(step, networks, batch(10), how)
    if what == "load_state_dict":
        step.load_state_dict(saved)
    elif what == "load_param_into_net":
        mindspore.load_param_into_net(step, saved)
    else:
        getattr(step, what)()
        getattr(expected, what)()
    for each in (step, expected):
        each.begin(*batch(11))
    assert not changed(state(expected), state(step))
