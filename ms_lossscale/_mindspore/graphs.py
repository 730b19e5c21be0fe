"""Compiled code: what goes into a graph, and what came out of it."""

import os
from collections import Counter

from mindspore import get_context, jit, mutable, nn, ops
from mindspore.nn.cell import _cell_graph_executor
from mindspore.ops.composite.base import _Grad
from mindspore.train.anf_ir_pb2 import ModelProto

_WIRING = {"", "Depend", "Identity", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}


# `ops.vjp` is built on this class. It differentiates by all weights in each backward, and since the forward has side
# effects, compiled code keeps all of that: in a GAN, the gradients of the discriminator's weights twice. This object is
# called once for each loss with the weights of that loss only, and `merge_forward` makes all calls share one forward.
backward_of_shared_forward = _Grad(get_by_list=True, sens_param=True, merge_forward=True)


def loads_what_was_compiled() -> bool:
    """Returns whether MindSpore's compile cache is on, by MindSpore's own rule."""
    is_on = get_context("enable_compile_cache")
    return os.getenv("MS_COMPILER_CACHE_ENABLE") == "1" if is_on is None else is_on


def only_if(condition, write, *args):
    """
    Calls `write` if `condition`, a bool tensor of shape (), is True. Returns the condition.

    MindSpore drops a branch that only writes if the same function computes and returns its condition. Here the
    condition is an argument.
    """
    if condition:
        write(*args)
    return condition


def not_inlined(function):
    """Has MindSpore compile a function to a graph of its own, as `mindspore.no_inline` of newer versions does."""
    function.no_inline = True
    return function


def of_each_call(inputs):
    """
    Returns the inputs of a graph. MindSpore takes a tuple, list or dict for a constant, and would compile it anew in
    each call.
    """
    return tuple(map(_variable, inputs))


def _variable(value):
    if not isinstance(value, (tuple, list, dict)) or not value:
        return value
    try:
        return mutable(value)
    except TypeError:
        # There is None or a string in it, of which MindSpore makes constants only.
        return value


def in_compiled_code(note=lambda: None):
    """
    Returns a function that tells whether graph mode, or `mindspore.jit`, has compiled the code that calls it. It is
    evaluated at compilation, which then calls `note`, too.
    """

    def noted():
        note()
        return True

    class InCompiledCode(ops.constexpr(noted, get_instance=False)):
        def __call__(self):
            return False

    return InCompiledCode()


is_compiling = in_compiled_code()


@ops.constexpr
def refuse_compiled(name, cure):
    """Raises, at compilation, for a method of this name that only Python can call."""
    raise RuntimeError(f"'{name}()' can't be called in code that mindspore.jit or graph mode compiles. {cure}")


class MethodCell(nn.Cell):
    """Makes a Cell of a Cell's method: in graph mode, Python can call a Cell, but no method of one, as a graph."""

    def __init__(self, method):
        super().__init__(auto_prefix=False)
        self.of_cell = method.__self__
        self.method = method

    def __call__(self, *inputs):
        return super().__call__(*of_each_call(inputs))

    def construct(self, *inputs):
        return self.method(*inputs)


class CompiledMethod(MethodCell):
    """
    The same, which is one compiled graph in PyNative mode, too. `mindspore.jit` itself would mark the cell whose method
    it compiles. If that method is not `construct`, the marked cell can no longer be compiled into another graph.
    """

    # By its name: in PyNative mode on an Ascend 910A, MindSpore would take GE, which refuses a branch.
    @jit(backend="ms_backend")
    def construct(self, *inputs):
        return self.method(*inputs)


class CompiledForModes:
    """
    Runs a method as one compiled graph in PyNative mode, and follows the modes and the precision of a network's cells,
    which one compiled graph keeps as they were.

    Args:
        method (Callable): Takes Tensors, and tuples of them.
        network (Cell): What the method runs.
    """

    def __init__(self, method, network):
        self._method = method
        self._cells = [cell for _, cell in network.cells_and_names()]
        self._compiled = {}
        self._inputs = None

    def __call__(self, *inputs):
        modes = tuple((cell.training, cell.mixed_precision_type) for cell in self._cells)
        if modes not in self._compiled:
            self._compiled[modes] = CompiledMethod(self._method)
            if self._inputs is not None:
                self._compiled[modes].set_inputs(*self._inputs)
        return self._compiled[modes](*inputs)

    def set_inputs(self, *inputs):
        """Tells which dimensions of the inputs vary, as :meth:`mindspore.nn.Cell.set_inputs` does."""
        self._inputs = inputs
        self.clear()

    def clear(self):
        """Forgets what was compiled."""
        self._compiled.clear()


def compiled_operators(cell: nn.Cell) -> Counter[str]:
    """
    Returns how often each operator is in the graph that a Cell was compiled to, as summaries show it: without what is
    in branches, and without nodes that only pass values on.
    """
    (phase,) = cell.compile_cache
    graph = ModelProto.FromString(_cell_graph_executor._graph_executor.get_optimize_graph_proto(phase)).graph
    return Counter(node.op_type for node in graph.node if node.op_type not in _WIRING)


def forget_compiled(cell: nn.Cell) -> None:
    """Makes the next call of a cell, or of one inside it, compile again: MindSpore does not notice changed flags."""
    for _, inside in cell.cells_and_names():
        inside.compile_cache.clear()
