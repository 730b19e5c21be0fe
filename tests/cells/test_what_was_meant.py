"""Errors that say what was meant: arguments in another order, classes without brackets, keywords of other libraries,
batches in another form."""

import functools

import pytest
from conftest import quick_in_pynative_mode
from mindspore import ParameterTuple, amp, nn
from support.gan_networks import renamed
from support.networks import Around, Linear, batch
from support.refused import refused, table

import ms_lossscale as ls

LOSS_CELL = "nn.WithLossCell(network, loss_fn)"
X, Y = batch()

OF_ONE = [ls.ScaledTrainOneStepCell, ls.ManualStep]
SEVERAL = [ls.SimultaneousTrainOneStepCell, ls.AlternatingTrainOneStepCell]


def sgd(network, **keywords):
    return nn.SGD(network.trainable_params(), 0.01, **keywords)


def made(make, *loss_scale, **keywords):
    network = Linear()
    parts = network, sgd(network)
    return make(*([[part] for part in parts] if make in SEVERAL else parts), *loss_scale, **keywords)


def with_loss_function(make):
    network = nn.Dense(3, 1)
    parts = network, nn.MSELoss(), nn.Adam(network.trainable_params())
    return make(*([[part] for part in parts] if make in SEVERAL else parts))


def in_another_order(make):
    networks = [renamed(f"{i}.", Linear()) for i in range(2)]
    optimizers = list(map(sgd, networks))
    if make in OF_ONE:
        return make(optimizers[0], networks[0])
    # At the second place.
    return make([networks[0], optimizers[1]], [optimizers[0], networks[1]])


class HoldsOthers(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.parameters = ParameterTuple(network.trainable_params())


def with_second(make, second):
    networks = [renamed(f"{i}.", Linear()) for i in range(2)]
    return make(networks, [sgd(networks[0]), second(networks[1])])


NO_OPTIMIZERS = [
    (Around, ValueError, "'optimizers[1]', a Around, has none"),
    (lambda network: "adam", TypeError, "'optimizers[1]' must be a Cell, but got 'adam'"),
    (HoldsOthers, ValueError, "'optimizers[1]', a HoldsOthers, has no 'construct'"),
    (lambda network: sgd(network, loss_scale=512.0), ValueError, "[1]', a SGD, divides"),
    (lambda network: sgd(renamed("other.", Linear())), ValueError, "'optimizers[1]', a SGD, must own parameters"),
]
KEYWORDS = {
    "clip_norm": ["max_grad_norm", "max_norm", "grad_clip"],
    "gradient_accumulation_steps": ["accumulation_steps", "accumulate_grad_batches"],
    "ema_decay": ["ema"],
    "loss_scale": ["scale_value", "scale_sense", "loss_scale_manager"],
}
SETTINGS = {
    **{"growth_interval": "scale_window", "growth_factor": "scale_factor", "init_scale": "init_loss_scale"},
    **{"backoff_factor": "backoff_factor", "hysteresis": "hysteresis"},
}


def answered(make, name, answer, error=TypeError):
    words = f"For '{make.__name__}', there is no argument '{name}'", answer
    call = functools.partial(make if make in LOSS_SCALES else functools.partial(made, make), **{name: 2})
    return call, error, *words


def without_brackets(name):
    return f"the class '{name}' instead of an object, {name}(...)"


def of_each(make):
    call = functools.partial(made, make)
    return [
        (lambda: with_loss_function(make), TypeError, make.__name__, "Adam", "right after its network", LOSS_CELL),
        (lambda: in_another_order(make), ValueError, "a SGD as a network, and a Linear as an optimizer"),
        *((functools.partial(call, scale), TypeError, "'loss_scale'", without_brackets(scale.__name__))
          for scale in (ls.DynamicLossScale, amp.DynamicLossScaleManager)),
        (functools.partial(call, 8.0, skip_conditions=[ls.NormSpike]), TypeError, "[0]", without_brackets("NormSpike")),
        *(answered(make, name, f"Here it is '{here}'.") for here, elsewhere in KEYWORDS.items() for name in elsewhere),
        *(answered(make, name, f"It is a setting of a loss scale: DynamicLossScale({setting}=...).")
          for name, setting in SETTINGS.items()),
        (functools.partial(call, unheard_of=1), TypeError, "unexpected keyword argument 'unheard_of'"),
        *((functools.partial(with_second, make, second), error, make.__name__, word)
          for second, error, word in NO_OPTIMIZERS if make is not ls.ScaledTrainOneStepCell),
    ]  # fmt: skip


class Subclass(ls.ScaledTrainOneStepCell):
    def __init__(self, network, optimizer, loss_scale=None, **keywords):
        super().__init__(network, optimizer, loss_scale, **keywords)


def in_the_order_of_model():
    network = nn.Dense(3, 1)
    return ls.build_train_network(network, nn.MSELoss(), nn.Adam(network.trainable_params()))


LOSS_SCALES = ls.DynamicLossScale, ls.FixedLossScale
OF_ONE_CLASS = [
    (lambda: ls.ScaledTrainOneStepCell(nn.Dense(3, 1), nn.MSELoss()), ValueError,
     "must have parameters to train, but the argument 'optimizer', a MSELoss, has none. Pass an optimizer;", LOSS_CELL),
    (lambda: made(ls.ScaledTrainOneStepCell, loss_fn=nn.MSELoss()), TypeError, "no argument 'loss_fn'", LOSS_CELL),
    (lambda: ls.ScaledTrainOneStepCell(Linear(), nn.Adam), TypeError, "'optimizer'", "instead of an object"),
    (in_the_order_of_model, ValueError, "a MSELoss as the optimizer", "a Adam as the loss function",
     "(network, optimizer, loss_fn)"),
    answered(ls.DynamicLossScale, "init_scale", "Here it is 'init_loss_scale'."),
    answered(ls.DynamicLossScale, "scale_value", "Here it is 'init_loss_scale'."),
    answered(ls.DynamicLossScale, "growth_interval", "Here it is 'scale_window'."),
    answered(ls.DynamicLossScale, "growth_factor", "Here it is 'scale_factor'."),
    answered(ls.FixedLossScale, "scale_value", "Here it is 'loss_scale'."),
    answered(ls.FixedLossScale, "backoff_factor", "DynamicLossScale(backoff_factor=...)"),
    answered(ls.build_train_network, "loss_scale", "Here it is 'loss_scale_manager'.", ValueError),
    answered(ls.build_train_network, "max_grad_norm", "Here it is 'clip_norm'.", ValueError),
    answered(ls.ManualStep, "max_retries",
             "Your loop runs a batch again while 'end' returns True, see docs/own_steps.md."),
    answered(ls.ManualStep, "has_aux", "It is one of step.value_and_grad(forward, has_aux=True)."),
    answered(ls.ManualStep, "weighted", "step.end(grads, weight=weight)"),
    answered(ls.ManualStep, "network_inputs", "Your forward"),
    answered(Subclass, "max_norm", "'clip_norm'"),
]  # fmt: skip


@table(*OF_ONE_CLASS, *(row for make in (*OF_ONE, *SEVERAL) for row in of_each(make)))
def test_it_says_what_was_meant(call, error, words):
    refused(call, error, *words)


def test_what_is_meant_is_taken():
    assert made(Subclass, 8.0, clip_norm=1.0).get_loss_scale() == 8.0
    assert ls.DynamicLossScale(backoff_factor=0.25).backoff_factor == 0.25


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
