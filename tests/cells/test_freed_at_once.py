"""A training cell and its memory are freed with the last reference to it. If the garbage collector freed it later, as
one that refers to itself, MindSpore would forget the graphs of other cells with the same inputs in the middle of their
use and compile them again."""

import gc
import weakref

import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import ops
from support.manual_training import adam, batch, dynamic, regression
from support.training import cell_of

DATA = batch(0)


def made(kind, steps=2):
    networks = [regression(i, f"{i}.") for i in range(2 if kind == "alternating" else 1)]
    keywords = {"gradient_accumulation_steps": steps, "clip_norm": 1.0, "ema_decay": 0.9}
    return cell_of(kind, networks, list(map(adam, networks)), dynamic(), **keywords)


@pytest.fixture
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["scaled", *slow("alternating")])
def test_a_training_cell_is_freed_at_once(kind, mode, no_garbage_collection):
    cell = made(kind)
    cell.find_loss_scale(*DATA)
    cell(*DATA)
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
    step = made("manual", steps)
    for _ in range(3):
        step.begin(*DATA)
        step.scale(DATA[0])
        step.end(tuple(map(ops.ones_like, step.parameters)))
    step.flush()
    step.begin(*DATA)
    step.begin(*DATA)
    step.load_state_dict(step.parameters_dict())
    with step.ema_weights():
        pass
    freed = weakref.ref(step)
    del step
    assert freed() is None
