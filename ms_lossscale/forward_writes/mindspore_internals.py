"""
What MindSpore keeps in private attributes and gives no other access to.

The public `named_parameters` and the like know a Parameter's name in a checkpoint; the source knows the attribute's.
"""

import functools
import pathlib
import re
import sys


def attributes_of(cell):
    """A cell's own Parameters, buffers and sub-cells by the attribute's name."""
    return {**cell._params, **cell._buffers, **cell._cells}


def frozen_state_of(cell):
    """A cell's own frozen Parameters and its own buffers."""
    parameters = [p for p in cell._params.values() if p is not None and not p.requires_grad]
    return [*parameters, *(buffer for buffer in cell._buffers.values() if buffer is not None)]


def forward_hooks_of(cell):
    return [*cell._forward_pre_hook.values(), *cell._forward_hook.values()]


def mark_buffers(cell):
    """Of a cell that was deep-copied, as layers are cloned, the buffers have lost their mark."""
    for buffer in cell._buffers.values():
        if buffer is not None:
            buffer._is_buffer = True


def is_buffer(tensor):
    return getattr(tensor, "_is_buffer", False)


def mapped_function(hyper_map):
    """The function that a HyperMap or Map was made with, or None."""
    return hyper_map.ops


def registered_functions(graph):
    """The functions that were registered with a MultitypeFuncGraph."""
    return [entry[-1] for entry in graph.entries]


@functools.cache
def inputs_of_primitive(cls):
    """
    Pairs of the inputs of a primitive's class: the name, and whether it is written.

    A signature keeps nothing that Python can read once it was declared, so its declaration is read.
    """
    for base in cls.__mro__:
        if "__mindspore_signature__" in vars(base):
            text = re.search(
                rf"^class {base.__name__}\(.*?(?=^class |\Z)", _text_of(base.__module__), re.DOTALL | re.MULTILINE
            )
            found = re.findall(_DECLARATION, text.group()) if text else ()
            return tuple((name, access == "RW_WRITE") for name, access in found)
    return ()


_DECLARATION = r"make_sig\(\s*['\"](\w+)['\"]\s*(?:,\s*(?:sig_rw=)?(?:sig\.)?sig_rw\.(\w+))?"


@functools.cache
def _text_of(module):
    path = getattr(sys.modules.get(module), "__file__", None)
    return pathlib.Path(path).read_text(encoding="utf-8") if path else ""
