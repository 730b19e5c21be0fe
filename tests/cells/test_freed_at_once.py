"""A training cell and its memory are freed with the last reference to it. If the garbage collector freed it later, as
one that refers to itself, MindSpore would forget the graphs of other cells with the same inputs in the middle of their
use and compile them again."""

import gc
import weakref

import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, nn, ops
from support.training import cell_of

from ms_lossscale import DynamicLossScale


class Loss(nn.Cell):
    def __init__(self, name):
        super().__init__(auto_prefix=False)
        self.net = nn.Dense(4, 1)
        self.net.update_parameters_name(name)

    def construct(self, x):
        return ops.square(self.net(x)).mean()


def made(kind, steps=2):
    networks = [Loss(f"{i}.") for i in range(2 if kind == "alternating" else 1)]
    optimizers = [nn.Momentum(its.trainable_params(), 0.01, 0.9) for its in networks]
    keywords = {"gradient_accumulation_steps": steps, "clip_norm": 1.0, "ema_decay": 0.9}
    return cell_of(kind, networks, optimizers, DynamicLossScale(), **keywords)


@pytest.fixture
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["scaled", *slow("alternating")])
def test_a_training_cell_is_freed_at_once(kind, mode, no_garbage_collection):
    cell, x = made(kind), Tensor([[1.0, 2.0, 3.0, 4.0]])
    cell.find_loss_scale(x)
    cell(x)
    cell.flush()
    cell.load_state_dict(cell.parameters_dict())
    with cell.ema_weights():
        pass
    freed = weakref.ref(cell)
    del cell
    assert freed() is None


@quick_in_pynative_mode
@pytest.mark.parametrize("steps", [1, *slow(2)])
def test_a_manual_step_is_freed_at_once(mode, steps, no_garbage_collection):
    step, x = made("manual", steps), Tensor([[1.0, 2.0, 3.0, 4.0]])
    for _ in range(3):
        step.begin(x)
        step.scale(x)
        step.end(tuple(map(ops.ones_like, step.parameters)))
    step.flush()
    step.begin(x)
    step.begin(x)
    step.load_state_dict(step.parameters_dict())
    with step.ema_weights():
        pass
    freed = weakref.ref(step)
    del step
    assert freed() is None
