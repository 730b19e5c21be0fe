"""Two threads that compile at once, which MindSpore can't: the error says so, and not what it means in one thread.

In a process of its own, since MindSpore is in a bad state afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor

from conftest import MODES
from mindspore import nn
from support.in_mode import in_mode
from support.networks import batch
from support.training import by_sgd

from ms_lossscale import DynamicLossScale


def test_two_threads_that_compile_at_once():
    layers = [nn.SequentialCell(nn.Dense(3, 8), nn.ReLU(), nn.Dense(8, 1)) for _ in range(2)]
    cells = [by_sgd(nn.WithLossCell(each, nn.MSELoss()), DynamicLossScale()) for each in layers]
    both_are_ready = threading.Barrier(2)

    def call(cell):
        both_are_ready.wait()
        cell(*batch())

    with in_mode(MODES["graph"]), ThreadPoolExecutor(2) as threads:
        errors = [future.exception() for future in [threads.submit(call, cell) for cell in cells]]
    for error in filter(None, errors):
        assert "MindSpore can't compile in two threads at once" in str(error)
        # MindSpore's error is the cause.
        assert error.__cause__ is not None
