"""What a network returns that is not what its cell was told: warnings, and cures that are none of what was done."""

import warnings

import pytest
from conftest import in_pairs, quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import dtype as mstype
from mindspore import nn, ops
from support.gan_networks import TupleOf, renamed
from support.networks import Linear, batch
from support.training import KINDS, by_sgd, stepping

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


def losses_of_each(loss, errors):
    return ops.square(errors)


def loss_of_one_value(loss, errors):
    return loss.reshape((1, 1))


def losses_and_weight(loss, errors):
    return ops.square(errors), 4


def losses_and_aux(loss, errors):
    return ops.square(errors), loss.reshape((1,))


def a_list_of_aux(loss, errors):
    return loss, [errors]


def make(kind, of, **keywords):
    networks = [renamed("0.", Linear()), renamed("1.", Returns(of))]
    if kind == "scaled":
        return by_sgd(networks[1], 8.0, **keywords)
    return by_sgd(networks, 8.0, kind=kind, **{name: [False, value] for name, value in keywords.items()})


def warned(call):
    """Returns the warnings of what is trained by its sum, of two calls: all have to come in the first one."""
    first, second = [], []
    for seed, of_call in enumerate((first, second)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(*batch(seed))
        of_call += [str(each.message) for each in caught if "trained" in str(each.message)]
    assert second == []
    return first


CELLS = ("scaled", *slow("simultaneous", "alternating"))


@pytest.mark.parametrize("kind", CELLS)
def test_a_prediction_before_a_loss_is_warned_of_once(mode, kind):
    (message,) = warned(make(kind, prediction_and_loss, has_aux=True))
    number = 0 if kind == "scaled" else 1
    for words in (KINDS[kind].__name__, f"network {number} returned a Tensor of shape (4, 1), a Tensor of shape ()"):
        assert words in message


@quick_in_pynative_mode
def test_a_loss_before_other_values_is_not(mode):
    assert warned(make("scaled", loss_and_prediction, has_aux=True)) == []
    (message,) = warned(make("scaled", losses_and_count, has_aux=True))
    assert "may be the loss" not in message


IS_SUMMED = "returned as its {} a Tensor of shape (4, 1), whose sum is trained"


@pytest.mark.parametrize("kind", CELLS)
def test_a_loss_of_several_values_is_warned_of_once(mode, kind):
    (message,) = warned(make(kind, losses_of_each))
    number = 0 if kind == "scaled" else 1
    words = KINDS[kind].__name__, f"network {number} {IS_SUMMED.format('loss')}", "loss.mean()", "loss.sum()"
    assert all(word in message for word in words)


def test_also_where_no_loss_scale_takes_part_and_of_one_network_with_several_losses(mode):
    (message,) = warned(by_sgd(Returns(losses_of_each)))
    assert IS_SUMMED.format("loss") in message
    networks = [renamed("0.", Linear()), renamed("1.", Returns(losses_of_each))]
    optimizers = [nn.SGD(network.trainable_params(), 0.1) for network in networks]
    (message,) = warned(ls.SimultaneousTrainOneStepCell(TupleOf(*networks), optimizers, 8.0).set_train())
    assert IS_SUMMED.format("loss_1") in message


@quick_in_graph_mode
@pytest.mark.parametrize(
    "of, keywords",
    [(loss_of_one_value, {}), (losses_and_weight, {"weighted": True})],
)
def test_what_is_no_loss_of_several_values(mode, of, keywords):
    assert warned(make("scaled", of, **keywords)) == []


@quick_in_graph_mode
def test_a_search_for_the_loss_scale_warns_and_the_steps_do_not_again(mode):
    cell = by_sgd(Returns(losses_of_each), ls.DynamicLossScale())
    with pytest.warns(RuntimeWarning, match="whose sum is trained") as caught:
        cell.find_loss_scale(*batch())
    (warning,) = caught
    assert warning.filename == __file__
    assert warned(cell) == []


@in_pairs
@pytest.mark.parametrize("weight, warns", [(None, True), (4.0, False)])
def test_of_a_manual_step_whose_end_tells_whether_it_has_a_weight(mode, how, weight, warns):
    network = Returns(losses_and_aux)
    step = ls.ManualStep(network, nn.SGD(network.trainable_params(), 0.1), 8.0).set_train()
    messages = warned(stepping(step, network, how, weight=weight, has_aux=True))
    assert len(messages) == warns
    assert all(word in message for message in messages for word in ("ManualStep", IS_SUMMED.format("loss")))


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
        (loss_and_prediction, {}, ["SimultaneousTrainOneStepCell"], "end("),
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
    with pytest.raises(TypeError, match="without any, has_aux=False") as error:
        stepping(step, network, has_aux=True)(*batch())
    message = str(error.value)
    assert "For 'ManualStep.value_and_grad', the function of optimizer 0 must return a tuple (loss, *aux)" in message
    assert "is aux, for end(grads, weight=weight)" in message
    # Neither what was done, nor arguments and a class that do not fit.
    assert not [word for word in ("has_aux=True", "weighted=True", "SimultaneousTrainOneStepCell") if word in message]
