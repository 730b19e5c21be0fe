"""Running a network for a look inside, so that nothing of it changes."""

import contextlib
import os

import mindspore
from mindspore import ops

from ms_lossscale._mindspore import forget_failed_calls, write_in_place


@contextlib.contextmanager
def replay(networks):
    """
    A context in which networks run in PyNative mode, for training, and after which they are what they were: their
    parameters (BatchNorm's statistics too) and buffers, whether each cell is in training, MindSpore's mode and its
    random state.

    It gives a function that puts parameters and buffers back in between.

    What is decorated with `mindspore.jit` runs in PyNative mode too, so that the cells inside can be watched. A network
    that is in training already runs as it is, with the cells inside that its user has taken out of training.
    """
    random_state = mindspore.get_rng_state()
    cells = {id(cell): cell for network in networks for _, cell in network.cells_and_names()}.values()
    in_training = [(cell, cell.training) for cell in cells]
    state = {id(s): s for network in networks for s in (*network.get_parameters(), *network.buffers())}.values()
    with _in_mode(mindspore.PYNATIVE_MODE, "0"):
        forget_failed_calls()
        values = [(each, ops.deepcopy(each)) for each in state if each is not None]

        def restore():
            write_in_place(values)

        try:
            for network in networks:
                if not network.training:
                    for _, cell in network.cells_and_names():
                        cell.add_flags(training=True)
            yield restore
        finally:
            restore()
            for cell, training in in_training:
                cell.add_flags(training=training)
            mindspore.set_rng_state(random_state)


def in_graph_mode():
    """A context, within `replay`, in which networks are compiled."""
    return _in_mode(mindspore.GRAPH_MODE, "1")


@contextlib.contextmanager
def _in_mode(mode, ms_jit):
    mode_before, jit = mindspore.get_context("mode"), os.environ.get("MS_JIT")
    mindspore.set_context(mode=mode)
    os.environ["MS_JIT"] = ms_jit
    try:
        yield
    finally:
        if jit is None:
            del os.environ["MS_JIT"]
        else:
            os.environ["MS_JIT"] = jit
        mindspore.set_context(mode=mode_before)


@contextlib.contextmanager
def running(owner, inputs):
    """Says which inputs, `batches[0]` say, it was that a network failed on."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"For '{owner}', the network fails on {inputs}, before there is anything to look at: {error}"
        ) from error
