"""A function as a network trains, is saved and is restored as the Cell that computes the same."""

import functools

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor
from support.manual_training import adam, batch, batches, dynamic, regression, train_step_of
from support.networks import Around
from support.training import cell_of, changed, state

import ms_lossscale as ls

GLOBAL = None


def closure(network):
    def forward(x, y):
        return network(x, y)

    return forward


def of_a_global(x, y):
    return GLOBAL(x, y)


def use_a_global(network):
    global GLOBAL
    GLOBAL = network
    return of_a_global


class Trainer:  # Of no Cell.
    def __init__(self, network):
        self.network = network

    def forward(self, x, y):
        return self.network(x, y)


class TrainerCell(Around):
    forward = Trainer.forward


def bound(network, x, y):
    return network(x, y)


def of_a_lambda(network):
    return lambda x, y: network(x, y)


def default_argument(network):
    def forward(x, y, its=network):
        return its(x, y)

    return forward


FUNCTIONS = {
    **{"closure": closure, "global": use_a_global, "lambda": of_a_lambda, "default_argument": default_argument},
    "method": lambda network: Trainer(network).forward,
    "method_of_a_cell": lambda network: TrainerCell(network).forward,
    "partial": lambda network: functools.partial(bound, network),
}


def trained(kind, networks, loss_of=lambda network: network):
    """Trains, with an overflow. Returns the cell, and all that was shown."""
    functions = [loss_of(network) for network in networks]
    cell = cell_of(kind, functions, list(map(adam, networks)), dynamic())
    call = train_step_of(cell, functions) if kind == "manual" else cell
    shown = []
    for data in batches("..x."):
        loss, overflow, *_ = call(*data)
        loss = loss if kind == "manual" else [loss]
        shown.append(np.hstack([each.asnumpy().ravel() for each in (*loss, overflow)]))
    return cell, shown


@functools.lru_cache
def _expected(kind, count, mode):
    cell, shown = trained(kind, [regression(i, f"network_{i}.") for i in range(count)])
    return state(cell), shown, cell.forward_state_names()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("closure", "scaled"),
        *slow(
            *(("global", "scaled"), ("method", "simultaneous"), ("method_of_a_cell", "alternating")),
            *(("partial", "simultaneous"), ("partial", "manual"), ("lambda", "manual"), ("closure", "manual")),
            *(("default_argument", "alternating"), ("closure", "alternating")),
        ),
    ],
)
def test_the_same_bits_as_the_cell(mode, name, kind):
    count = 1 if kind == "scaled" else 2
    networks = [regression(i, f"network_{i}.") for i in range(count)]
    if mode == "graph" and (name == "default_argument" or (name, kind) == ("partial", "manual")):
        default = r"'default_argument.*forward', has the default 'network', a Cell"
        with pytest.raises(ValueError, match=rf"{default}|'networks\[0\]' is a functools.partial that binds a Cell"):
            trained(kind, networks, FUNCTIONS[name])
        return
    expected, shown, forward_state = _expected(kind, count, mode)

    def loss_of(network):
        # Functions beside Cells.
        return network if kind == "simultaneous" and network is networks[0] else FUNCTIONS[name](network)

    cell, its_shown = trained(kind, networks, loss_of)
    np.testing.assert_array_equal(its_shown, shown)
    # The names, too: those of the weights are their own.
    assert not changed(expected, state(cell))
    assert cell.forward_state_names() == forward_state
    assert any("moving_mean" in its for its in forward_state)
    assert all(its.training for network in networks for _, its in network.cells_and_names())
    cell.set_train(False)
    assert not any(its.training for network in networks for _, its in network.cells_and_names())
    loaded = {key: Tensor(value) for key, value in expected.items()}
    assert cell.load_state_dict(loaded) == ([], [])


@pytest.mark.slow
def test_one_function_with_all_losses(mode):
    networks = [regression(i, f"network_{i}.") for i in range(2)]

    def losses(x, y):
        return networks[0](x, y), networks[1](x, y)

    cell = ls.SimultaneousTrainOneStepCell(losses, [adam(each) for each in networks], dynamic()).set_train()
    expected, _, _ = _expected("simultaneous", 2, mode)
    for data in batches("..x."):
        cell(*data)
    assert not changed(expected, state(cell))


@quick_in_pynative_mode
def test_a_network_in_evaluation_mode_is_named(mode):
    network = regression()
    cell = ls.ScaledTrainOneStepCell(closure(network), adam(network))
    with pytest.warns(UserWarning, match=r"all cells of the network are in evaluation mode.*BatchNorm1d") as warned:
        cell(*batch(0))
    assert not [each for each in warned if "FunctionNetwork" in str(each.message)]


STEP = None


def forward_of_a_global_step(x, y):
    loss = GLOBAL(x, y)
    return STEP.scale(loss), loss


@quick_in_pynative_mode
def test_the_step_itself_is_no_state_of_its_forward(mode):
    global GLOBAL, STEP
    GLOBAL, STEP = regression(), None
    STEP = ls.ManualStep(forward_of_a_global_step, adam(GLOBAL), dynamic(), ema_decay=0.9).set_train()
    names = ["1.moving_mean", "1.moving_variance"]
    grad = mindspore.value_and_grad(forward_of_a_global_step, None, STEP.parameters, has_aux=True)
    for seed in range(6):
        _, grads = grad(*STEP.begin(*batch(seed, overflows=seed == 2)))
        STEP.end(grads)
        assert STEP.forward_state_names() == names
    assert STEP.counters() == {"applied_steps": 5, "skipped_steps": 1, "consecutive_skipped_steps": 0}
