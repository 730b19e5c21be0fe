"""Runs code in one of MindSpore's modes."""

import contextlib

import mindspore


@contextlib.contextmanager
def in_mode(mode):  # A context in which MindSpore is in this mode, GRAPH_MODE or PYNATIVE_MODE.
    before = mindspore.get_context("mode")
    mindspore.set_context(mode=mode)
    try:
        yield
    finally:
        mindspore.set_context(mode=before)
