"""The forms in which version 0.4 called the diagnoses work, with a warning each at the line of the program."""

import inspect

import numpy as np
import pytest
from mindspore import Tensor, nn
from support.networks import Linear, batch

from ms_lossscale import advise_float32, locate_overflow, profile_activations, profile_gradients

NETWORK = Linear()
BATCHES = [batch(seed) for seed in range(2)]
ALONE = nn.Dense(3, 1), Tensor(np.ones((2, 3), np.float32))
PARAMETERS = NETWORK.trainable_params()

OLD = {
    "order": (lambda: profile_gradients(NETWORK, PARAMETERS, BATCHES), lambda: profile_gradients(NETWORK, BATCHES)),
    "keyword": (
        lambda: profile_gradients(NETWORK, PARAMETERS, batches=BATCHES),
        lambda: profile_gradients(NETWORK, BATCHES, parameters=PARAMETERS),
    ),
    "clip": (
        lambda: profile_gradients(NETWORK, batches=BATCHES, clip=0.5),
        lambda: profile_gradients(NETWORK, BATCHES, clip_norm=0.5),
    ),
    "advice": (lambda: advise_float32(NETWORK, None, BATCHES), lambda: advise_float32(NETWORK, BATCHES)),
    "one batch": (
        lambda: locate_overflow(NETWORK, BATCHES[0], loss_scale=2.0**126),
        lambda: locate_overflow(NETWORK, [BATCHES[0]], loss_scale=2.0**126),
    ),
    "inputs": (
        lambda: locate_overflow(NETWORK, inputs=BATCHES[0], loss_scale=4.0),
        lambda: locate_overflow(NETWORK, [BATCHES[0]], loss_scale=4.0),
    ),
    "one Tensor": (
        lambda: locate_overflow(ALONE[0], ALONE[1], loss_scale=2.0),
        lambda: locate_overflow(ALONE[0], [ALONE[1]], loss_scale=2.0),
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_form_works_and_says_what_the_new_one_is(name):
    old, new = OLD[name]
    with pytest.warns(FutureWarning, match=r"is the form of version 0\.4, and works for the last time") as warned:
        result = old()
    (warning,) = warned
    assert warning.filename == __file__
    assert str(result) == str(new())


def test_all_four_look_alike():
    for diagnose in (profile_gradients, profile_activations, locate_overflow, advise_float32):
        parameters = list(inspect.signature(diagnose).parameters.values())
        assert [each.name for each in parameters[:4]] == ["network", "batches", "parameters", "loss_scale"]
        assert [each.kind for each in parameters[2:]] == [inspect.Parameter.KEYWORD_ONLY] * len(parameters[2:])
