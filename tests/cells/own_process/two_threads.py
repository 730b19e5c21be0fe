"""Two threads that compile at once, which MindSpore can't: the error says so, and not what it means in one thread.

In a process of its own, since MindSpore is in a bad state afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor

from conftest import MODES
from mindspore import nn, ops
from support.in_mode import in_mode
from support.networks import batch
from support.training import by_sgd

from ms_lossscale import DynamicLossScale

_first_compiles = threading.Event()
_second_has_ended = threading.Event()


@ops.constexpr
def _wait_while_compiling():
    _first_compiles.set()
    return _second_has_ended.wait(20)


class _Waiting(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(3, 8), nn.ReLU(), nn.Dense(8, 1))

    def construct(self, x):
        _wait_while_compiling()
        return self.layers(x)


def test_two_threads_that_compile_at_once():
    networks = _Waiting(), nn.SequentialCell(nn.Dense(3, 8), nn.ReLU(), nn.Dense(8, 1))
    first, second = [by_sgd(nn.WithLossCell(each, nn.MSELoss()), DynamicLossScale()) for each in networks]
    with in_mode(MODES["graph"]), ThreadPoolExecutor(2) as threads:
        its_call = threads.submit(first, *batch())
        assert _first_compiles.wait(60)
        # It compiles meanwhile. Steps that begin at the same moment can crash MindSpore, before they compile.
        threads.submit(second, *batch()).result()
        _second_has_ended.set()
        error = its_call.exception()
    assert "MindSpore can't compile in two threads at once" in str(error)
    # MindSpore's error is the cause.
    assert error.__cause__ is not None
