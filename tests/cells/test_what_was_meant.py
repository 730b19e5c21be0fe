"""Errors that say what was meant: arguments in another order, classes without brackets, keywords of other libraries,
batches in another form."""

import functools

import pytest
from conftest import quick_in_pynative_mode
from mindspore import ParameterTuple, amp, nn
from support.gan_networks import renamed
from support.networks import Around, Linear, batch
from support.refused import refused

import ms_lossscale as ls

LOSS_CELL = "nn.WithLossCell(network, loss_fn)"
X, Y = batch()

SEVERAL = [ls.SimultaneousTrainOneStepCell, ls.AlternatingTrainOneStepCell]
CELLS = [ls.ScaledTrainOneStepCell, *SEVERAL, ls.ManualStep]


def sgd(network):
    return nn.SGD(network.trainable_params(), 0.01)


def made(make, *loss_scale, **keywords):
    network = Linear()
    parts = network, sgd(network)
    return make(*([[part] for part in parts] if make in SEVERAL else parts), *loss_scale, **keywords)


@pytest.mark.parametrize("make", CELLS)
def test_a_loss_function_between_network_and_optimizer(make):
    network = nn.Dense(3, 1)
    parts = network, nn.MSELoss(), nn.Adam(network.trainable_params())
    if make in SEVERAL:
        parts = [[part] for part in parts]
    refused(lambda: make(*parts), TypeError, make.__name__, "Adam", "right after its network", LOSS_CELL)


def test_a_loss_function_and_no_optimizer():
    network = nn.Dense(3, 1)
    words = (
        "must have parameters to train, but the argument 'optimizer', a MSELoss, has none. Pass an optimizer;",
        LOSS_CELL,
    )
    refused(lambda: ls.ScaledTrainOneStepCell(network, nn.MSELoss()), ValueError, *words)
    call = functools.partial(made, ls.ScaledTrainOneStepCell, loss_fn=nn.MSELoss())
    refused(call, TypeError, "no argument 'loss_fn'", LOSS_CELL)


def test_build_train_network_in_the_order_of_model():
    network = nn.Dense(3, 1)
    optimizer = nn.Adam(network.trainable_params())
    words = "a MSELoss as the optimizer", "a Adam as the loss function", "(network, optimizer, loss_fn)"
    refused(lambda: ls.build_train_network(network, nn.MSELoss(), optimizer), ValueError, *words)
    assert ls.build_train_network(network, optimizer, nn.MSELoss()).training


class HoldsOthers(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.parameters = ParameterTuple(network.trainable_params())


@pytest.mark.parametrize("make", [*SEVERAL, ls.ManualStep])
@pytest.mark.parametrize(
    "second, error, words",
    [
        (Around, ValueError, ["'optimizers[1]', a Around, has none"]),
        (lambda network: "adam", TypeError, ["'optimizers[1]' must be a Cell, but got 'adam'"]),
        (HoldsOthers, ValueError, ["'optimizers[1]', a HoldsOthers, has no 'construct'"]),
        (
            lambda network: nn.SGD(network.trainable_params(), 0.1, loss_scale=512.0),
            ValueError,
            ["[1]', a SGD, divides"],
        ),
        (lambda network: sgd(renamed("other.", Linear())), ValueError, ["'optimizers[1]', a SGD, must own parameters"]),
    ],
)
def test_what_is_no_optimizer_is_named_with_its_place(make, second, error, words):
    networks = [renamed(f"{i}.", Linear()) for i in range(2)]
    refused(lambda: make(networks, [sgd(networks[0]), second(networks[1])]), error, make.__name__, *words)


def test_networks_and_optimizers_in_another_order_at_the_second_place():
    networks = [renamed(f"{i}.", Linear()) for i in range(2)]
    optimizers = list(map(sgd, networks))
    call = lambda: ls.AlternatingTrainOneStepCell([networks[0], optimizers[1]], [optimizers[0], networks[1]])  # noqa: E731
    refused(call, ValueError, "networks come before their optimizers, but got a SGD as a network, and a Linear")


@pytest.mark.parametrize("make", CELLS)
def test_a_class_without_brackets(make):
    for scale in (ls.DynamicLossScale, amp.DynamicLossScaleManager):
        words = "'loss_scale'", f"the class '{scale.__name__}' instead of an object, {scale.__name__}(...)"
        refused(functools.partial(made, make, scale), TypeError, *words)
    words = "skip_conditions[0]", "the class 'NormSpike' instead of an object, NormSpike(...)"
    refused(lambda: made(make, 8.0, skip_conditions=[ls.NormSpike]), TypeError, *words)
    refused(lambda: ls.ScaledTrainOneStepCell(Linear(), nn.Adam), TypeError, "'optimizer'", "instead of an object")


def check_answer(make, name, answer, error=TypeError):
    words = f"For '{make.__name__}', there is no argument '{name}'", answer
    refused(functools.partial(made, make, **{name: 2}), error, *words)


@pytest.mark.parametrize("make", CELLS)
def test_keywords_of_others(make):
    for here, elsewhere in {
        "clip_norm": ["max_grad_norm", "max_norm", "grad_clip"],
        "gradient_accumulation_steps": ["accumulation_steps", "accumulate_grad_batches"],
        "ema_decay": ["ema"],
        "loss_scale": ["scale_value", "scale_sense", "loss_scale_manager"],
    }.items():
        for name in elsewhere:
            check_answer(make, name, f"Here it is '{here}'.")
    for name, setting in {
        **{"growth_interval": "scale_window", "growth_factor": "scale_factor", "init_scale": "init_loss_scale"},
        **{"backoff_factor": "backoff_factor", "hysteresis": "hysteresis"},
    }.items():
        check_answer(make, name, f"It is a setting of a loss scale: DynamicLossScale({setting}=...).")
    refused(lambda: made(make, unheard_of=1), TypeError, "unexpected keyword argument 'unheard_of'")


@pytest.mark.parametrize(
    "make, name, answer",
    [
        (ls.DynamicLossScale, "init_scale", "Here it is 'init_loss_scale'."),
        (ls.DynamicLossScale, "scale_value", "Here it is 'init_loss_scale'."),
        (ls.DynamicLossScale, "growth_interval", "Here it is 'scale_window'."),
        (ls.DynamicLossScale, "growth_factor", "Here it is 'scale_factor'."),
        (ls.FixedLossScale, "scale_value", "Here it is 'loss_scale'."),
        (ls.FixedLossScale, "backoff_factor", "DynamicLossScale(backoff_factor=...)"),
    ],
)
def test_keywords_of_loss_scales(make, name, answer):
    refused(lambda: make(**{name: 2}), TypeError, f"For '{make.__name__}', there is no argument '{name}'.", answer)
    assert ls.DynamicLossScale(backoff_factor=0.25).backoff_factor == 0.25


def test_keywords_of_build_train_network():
    check_answer(ls.build_train_network, "loss_scale", "Here it is 'loss_scale_manager'.", ValueError)
    check_answer(ls.build_train_network, "max_grad_norm", "Here it is 'clip_norm'.", ValueError)


@pytest.mark.parametrize(
    "keyword, answer",
    [
        ("max_retries", "Your loop runs a batch again while 'end' returns True, see docs/own_steps.md."),
        ("has_aux", "It is one of step.value_and_grad(forward, has_aux=True)."),
        ("weighted", "step.end(grads, weight=weight)"),
        ("network_inputs", "Your forward"),
    ],
)
def test_keywords_of_a_training_cell_in_a_manual_step(keyword, answer):
    check_answer(ls.ManualStep, keyword, answer)


class Subclass(ls.ScaledTrainOneStepCell):
    def __init__(self, network, optimizer, loss_scale, **keywords):
        super().__init__(network, optimizer, loss_scale, **keywords)


def test_a_class_of_ones_own_is_named():
    refused(lambda: made(Subclass, 8.0, max_norm=1.0), TypeError, "For 'Subclass'", "'clip_norm'")
    assert made(Subclass, 8.0, clip_norm=1.0).get_loss_scale() == 8.0


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "inputs, words",
    [
        ((X,), ["takes (data, label), but it gets 1 of 1 inputs", "cell(data, label)"]),
        (([X, Y],), ["cell(*batch)"]),
        (({"data": X, "label": Y},), ["cell(*batch.values())"]),
        ((X, X, Y), ["where the network takes one input, else a Cell or function"]),
    ],
)
def test_a_batch_in_another_form(mode, inputs, words):
    network = nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss())
    cell = ls.ScaledTrainOneStepCell(network, sgd(network), 8.0)
    with pytest.raises(TypeError) as error:
        cell(*inputs)
    message = str(error.value)
    assert all(word in message for word in words)
    # The loss cell is there.
    assert LOSS_CELL not in message or len(inputs) > 2
