"""LossScaleMonitor measures underflow in training: what it finds in gradients that are known, and what it costs."""

import warnings

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from support.sloped_networks import manual
from support.training import changed, state
from test_loss_scale_monitor import train

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    InputGradient,
    LossScaleMonitor,
    ScaledTrainOneStepCell,
    profile_gradients,
)
from ms_lossscale.diagnosis import replay

SMALL = 2.0**-20


class Powers(nn.Cell):
    """
    The gradients of its weight are `2**-20` times its inputs, which go through float16 times the loss scale. BatchNorm
    sees the inputs, too. It counts its forwards in Python: not those that are compiled, see :func:`counted`.
    """

    def __init__(self, name="powers", dtype=mstype.float16, factor=SMALL):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(16, np.float32)), name=f"{name}.weight")
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.norm.update_parameters_name(f"{name}.")
        self.dtype, self.factor = dtype, factor
        self.forwards = [0]

    def construct(self, x):
        self.forwards[0] += 1
        product = (self.weight.astype(self.dtype) * x.astype(self.dtype)).astype(mstype.float32).sum()
        normed = ops.stop_gradient(self.norm(ops.stack((x, x))))
        return product * self.factor + 0.0 * normed.sum()


class Quiet(Powers):
    """The same for graph mode, which can't count."""

    def construct(self, x):
        product = (self.weight.astype(self.dtype) * x.astype(self.dtype)).astype(mstype.float32).sum()
        normed = ops.stop_gradient(self.norm(ops.stack((x, x))))
        return product * self.factor + 0.0 * normed.sum()


# From 1 to 2**-15, with the bits of float16.
SIGNIFICANDS = np.float16([1, *np.random.default_rng(0).uniform(1, 2, 15)])
X = (2.0 ** -np.arange(16) * SIGNIFICANDS).astype(np.float32)
SCALE = 2.0**8


def lost_at(loss_scale, x=X):
    """Returns the shares of zeros and of subnormal numbers in NumPy."""
    scaled = (x.astype(np.float16) * np.float16(loss_scale * SMALL)).astype(np.float16)
    smallest_normal = np.float16(2.0**-14)
    return np.mean(scaled == 0), np.mean((scaled != 0) & (np.abs(scaled) < smallest_normal))


def cell(network, loss_scale):
    return ScaledTrainOneStepCell(network, nn.SGD([network.weight], 0.5), loss_scale).set_train()


def dynamic(scale=SCALE, **keywords):
    return DynamicLossScale(scale, **{"scale_window": 1000, "max_loss_scale": 2.0**40, **keywords})


def counted(calls, mode):
    """Returns how many forwards of the cell itself its network counts; it counts the monitor's in both modes."""
    return calls if mode == "pynative" else 0


def warnings_of(its, steps=4, every=2, x=X, monitor=None):
    """Makes steps, and returns the warnings of them."""
    monitor = monitor or LossScaleMonitor(1000, underflow_every_n_steps=every)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monitor.watching(its):
            for _ in range(steps):
                monitor.after_step(*its(Tensor(x)), inputs=Tensor(x))
    return [str(each.message) for each in caught if each.category is RuntimeWarning]


def test_it_names_what_underflows_and_the_scale_that_would_do(mode):
    (told,) = warnings_of(cell(Quiet(), dynamic()))
    zeros, subnormal = (100 * share for share in lost_at(SCALE))
    assert zeros > 5 and subnormal > 50 and lost_at(2.0**33) == (0, 0)
    assert told == (
        f"For 'LossScaleMonitor', step 2: float16 loses gradients at the present loss scale, 256, of which a scale of "
        f"2**33 would keep more: powers.weight ({zeros:.2f} % zero, {subnormal:.2f} % subnormal; 0.00 % zero, 0.00 % "
        f"subnormal); first the shares at the present scale, then at the larger one. The loss scale rises towards it "
        f"while steps are clean; cell.set_loss_scale(2**33), or cell.find_loss_scale(*inputs), sets it at once."
    )


@quick_in_pynative_mode
def test_the_scale_that_it_names_is_that_of_a_profile(mode):
    its = cell(Quiet(), dynamic())
    report = profile_gradients(its, [(Tensor(X),)])
    assert report.recommended_loss_scale == 2.0**33
    its.set_loss_scale(2.0**33)
    assert warnings_of(its) == []


@quick_in_pynative_mode
@pytest.mark.parametrize(
    ("loss_scale", "advice"),
    [
        (1024.0, "This loss scale does not rise by itself: begin with 2**33, or with a DynamicLossScale."),
        (1000.0, "This loss scale does not rise by itself: begin with 2**33, or with a DynamicLossScale."),
        (
            DynamicLossScale(2.0**10),
            "The loss scale never gets there: pass max_loss_scale=2**33 or more, instead of 2**24.",
        ),
    ],
    ids=["fixed", "no power of two", "ceiling"],
)
def test_how_the_scale_gets_there(mode, loss_scale, advice):
    (told,) = warnings_of(cell(Quiet(), loss_scale))
    assert told.endswith(advice)


@quick_in_pynative_mode
@pytest.mark.parametrize("scale", [1.0, 2.0**8], ids=["all are zero", "some are zero"])
def test_a_larger_scale_that_overflows_is_not_named(mode, scale):
    """The largest gradient would allow 2**41, but what is multiplied by the inputs overflows above 2**35."""
    x = (X * 2.0**-8).astype(np.float32)
    zeros, subnormal = (100 * share for share in lost_at(scale, x))
    assert (zeros == 100) == (scale == 1.0)
    (told,) = warnings_of(cell(Quiet(), dynamic(scale)), x=x)
    after = "{:.2f} % zero, {:.2f} % subnormal)".format(*(100 * share for share in lost_at(2.0**33, x)))
    assert f"powers.weight ({zeros:.2f} % zero, {subnormal:.2f} % subnormal; {after}" in told
    assert "a scale of 2**33 would keep" in told


# What it says nothing of.


@quick_in_pynative_mode
@pytest.mark.parametrize("what", ["float32", "zeros", "enough", "overflow"])
def test_it_says_nothing(mode, what):
    network, x, scale = Powers(), X, 2.0**10
    # The share of the forwards of the monitor: without a reason to suspect anything one for each look.
    forwards = 1
    if what == "float32":
        network, x = Powers(dtype=mstype.float32), np.random.default_rng(0).normal(size=16).astype(np.float32)
        x[:8] = 0
    elif what == "zeros":
        # Half of them are zero at every scale.
        x = np.where(np.arange(16) < 8, 1.3, 0).astype(np.float32)
        forwards = 2
    elif what == "enough":
        scale = 2.0**33
    elif what == "overflow":
        scale = 2.0**37
    its = cell(network, dynamic(scale))
    network.forwards[0] = 0
    assert warnings_of(its, steps=4, every=2, x=x) == []
    assert network.forwards[0] == counted(4, mode) + 2 * forwards


# What it costs.


@quick_in_pynative_mode
def test_only_every_nth_step_costs_anything(mode, monkeypatch):
    read, asnumpy = [], Tensor.asnumpy
    monkeypatch.setattr(Tensor, "asnumpy", lambda tensor: (read.append(tensor.shape), asnumpy(tensor))[1])

    def costs(**keywords):
        network = Powers()
        its, monitor = cell(network, dynamic(2.0**33)), LossScaleMonitor(1000, **keywords)
        counts = []
        with monitor.watching(its):
            for _ in range(7):
                outputs = its(Tensor(X))
                read.clear()
                before = network.forwards[0]
                monitor.after_step(*outputs, inputs=Tensor(X))
                counts.append((network.forwards[0] - before, len(read)))
        return counts

    plain, measured = costs(), costs(underflow_every_n_steps=3)
    assert plain == [(0, 0)] * 7
    assert [forwards for forwards, _ in measured] == [0, 0, 1, 0, 0, 1, 0]
    assert [reads > 0 for _, reads in measured] == [False, False, True, False, False, True, False]


@quick_in_pynative_mode
def test_it_warns_once_and_then_measures_no_more(mode):
    network = Powers()
    its = cell(network, dynamic())
    network.forwards[0] = 0
    assert len(warnings_of(its, steps=7, every=2)) == 1
    # One at the present scale and one at the larger one.
    assert network.forwards[0] == counted(7, mode) + 2
    # Anew in the next training.
    assert len(warnings_of(its)) == 1


class Penalised(nn.Cell):
    """It takes a gradient in its forward, so that it is run in graph mode."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.gradient = InputGradient(self.inner)
        self.weight = self.inner.weight

    def construct(self, x):
        return (self.inner(x) + ops.square(self.gradient(x)).sum()) * SMALL


class Inner(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(16, np.float32)), name="inner.weight")

    def construct(self, x):
        return (self.weight * x).astype(mstype.float16).astype(mstype.float32).sum()


@quick_in_graph_mode
def test_a_network_of_graph_mode_is_compiled_once(mode, monkeypatch):
    made, graph = [], replay._InGraph
    monkeypatch.setattr(replay, "_InGraph", lambda part: made.append(part) or graph(part))
    its = cell(Penalised(), dynamic(2.0**20))
    monitor = LossScaleMonitor(1000, underflow_every_n_steps=1)
    with monitor.watching(its):
        for _ in range(3):
            monitor.after_step(*its(Tensor(X)), inputs=Tensor(X))
    assert len(made) == 1


def test_nothing_is_changed(mode):
    """Nor by a second run at a larger scale."""
    its, plain = (cell(Quiet(), dynamic()) for _ in "ab")
    rng = np.random.default_rng(0)
    monitor = LossScaleMonitor(1000, underflow_every_n_steps=1)
    with monitor.watching(its), pytest.warns(RuntimeWarning, match="float16 loses gradients"):
        for _ in range(5):
            x = Tensor(X * rng.random(16).astype(np.float32))
            monitor.after_step(*its(x), inputs=x)
            plain(x)
    assert not changed(state(its), state(plain))
    assert mindspore.get_context("mode") == {"graph": mindspore.GRAPH_MODE, "pynative": mindspore.PYNATIVE_MODE}[mode]


# Several networks, Model, and what can't be measured.


@quick_in_pynative_mode
def test_each_network_has_its_own(mode):
    networks = [Powers("a"), Powers("b", factor=2.0**3)]
    optimizers = [nn.SGD([network.weight], 0.0) for network in networks]
    its = AlternatingTrainOneStepCell(networks, optimizers, dynamic()).set_train()
    (told,) = warnings_of(its, steps=4, every=2)
    assert "float16 loses gradients of network 0 at the present loss scale, 256, of which" in told
    assert "a.weight" in told and "b.weight" not in told
    # The other one is still looked at, the first one no longer.
    assert [network.forwards[0] for network in networks] == [counted(4, mode) + 2] * 2


class Sum(nn.Cell):
    """For a batch of rows."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(16, np.float32)), name="weight")

    def construct(self, x):
        product = (self.weight.astype(mstype.float16) * x[0].astype(mstype.float16)).astype(mstype.float32)
        return product.sum() * SMALL


@quick_in_graph_mode
def test_in_model(mode):
    with pytest.warns(RuntimeWarning, match=r"step 1: float16 loses gradients.* weight \("):
        train(cell(Sum(), dynamic()), [(np.tile(X, (4, 1)),)] * 2, LossScaleMonitor(100, underflow_every_n_steps=1))


@quick_in_pynative_mode
def test_without_the_batch(mode):
    its, monitor = cell(Quiet(), dynamic()), LossScaleMonitor(1000, underflow_every_n_steps=1)
    with pytest.warns(RuntimeWarning) as caught, monitor.watching(its):
        for _ in range(3):
            monitor.after_step(*its(Tensor(X)))
    (warning,) = caught
    assert str(warning.message) == (
        "For 'LossScaleMonitor', step 1: underflow can't be measured, and is no longer: the batch is not known: pass "
        "inputs=(x, y), say, to after_step"
    )


@quick_in_pynative_mode
def test_a_failure_ends_no_training(mode):
    its, monitor = cell(Quiet(), dynamic()), LossScaleMonitor(1000, underflow_every_n_steps=1)
    message = r"step 1: underflow can't be measured, and is no longer: .* fails on the batch of this step"
    with pytest.warns(RuntimeWarning, match=message), monitor.watching(its):
        for _ in range(2):
            monitor.after_step(*its(Tensor(X)), inputs=(Tensor(X), Tensor(X)))
    assert its.counters()["applied_steps"] == 2


@quick_in_pynative_mode
def test_what_is_refused(mode):
    step, _ = manual(dynamic())
    with (
        pytest.raises(TypeError, match=r"'underflow_every_n_steps' needs a training cell, .* got a 'ManualStep'"),
        LossScaleMonitor(underflow_every_n_steps=1).watching(step),
    ):
        pass
    for value, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="'underflow_every_n_steps' must be"):
            LossScaleMonitor(underflow_every_n_steps=value)
