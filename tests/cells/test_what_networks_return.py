"""What a network returns that is not what its cell was told: warnings, and cures that are none of what was done."""

import warnings

import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import dtype as mstype
from mindspore import nn, ops
from support.gan_networks import renamed
from support.networks import Linear, batch
from support.training import KINDS, by_sgd

import ms_lossscale as ls


class Returns(Linear):
    """Returns what `of` makes of its loss and of its errors, of shape (B, 1)."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def construct(self, x, y):
        errors = ops.matmul(x, self.weight) - y
        return self.of(ops.square(errors).mean(), errors)


def prediction_and_loss(loss, errors):
    return errors, loss


def loss_and_prediction(loss, errors):
    return loss, errors


def losses_and_count(loss, errors):
    return ops.square(errors), errors.astype(mstype.int32).sum(), (errors > 0).any()


def loss_alone(loss, errors):
    return loss


def a_list_of_aux(loss, errors):
    return loss, [errors]


def make(kind, of, **keywords):
    networks = [renamed("0.", Linear()), renamed("1.", Returns(of))]
    if kind == "scaled":
        return by_sgd(networks[1], 8.0, **keywords)
    return by_sgd(networks, 8.0, kind=kind, **{name: [False, value] for name, value in keywords.items()})


def warned(cell):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            cell(*batch(seed))
    return [str(each.message) for each in caught if "may be the loss" in str(each.message)]


CELLS = ("scaled", *slow("simultaneous", "alternating"))


@pytest.mark.parametrize("kind", CELLS)
def test_a_prediction_before_a_loss_is_warned_of_once(mode, kind):
    (message,) = warned(make(kind, prediction_and_loss, has_aux=True))
    number = 0 if kind == "scaled" else 1
    for words in (KINDS[kind].__name__, f"network {number} returned a Tensor of shape (4, 1), a Tensor of shape ()"):
        assert words in message


@quick_in_pynative_mode
@pytest.mark.parametrize("of", [loss_and_prediction, losses_and_count])
def test_a_loss_before_other_values_is_not(mode, of):
    assert not warned(make("scaled", of, has_aux=True))


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize(
    "of, keywords, cures, done",
    [
        (loss_alone, {"has_aux": True}, ["without any, has_aux=False"], "has_aux=True"),
        (a_list_of_aux, {"has_aux": True}, ["in no list or dict"], "has_aux=True"),
        (loss_alone, {"weighted": True}, ["weighted=False"], "weighted=True"),
        (loss_alone, {"weighted": True, "has_aux": True}, ["weighted=False", "has_aux=False"], "=True"),
        (loss_and_prediction, {}, ["has_aux=True", "weighted=True"], "=False"),
    ],
)
def test_no_cure_is_what_was_done_already(mode, kind, of, keywords, cures, done):
    cell = make(kind, of, **keywords)
    with pytest.raises(TypeError) as error:
        cell(*batch())
    for cure in cures:
        assert cure in str(error.value)
    assert done not in str(error.value)


@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_nor_of_a_function_in_a_manual_step(mode):
    network = Returns(loss_alone)
    step = ls.ManualStep(network, nn.SGD(network.trainable_params(), 0.1), 8.0)
    value_and_grad = step.value_and_grad(network, has_aux=True)
    with pytest.raises(TypeError, match="without any, has_aux=False") as error:
        value_and_grad(*step.begin(*batch()))
    assert "has_aux=True" not in str(error.value)
