"""Uses of MindSpore's private functions, and workarounds for its faults, each with its reason."""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Callable, Optional

from mindspore import GRAPH_MODE, Parameter, ParameterTuple, Tensor, experimental, get_context, jit, mutable, nn, ops
from mindspore import dtype as mstype
from mindspore._c_expression import Cell_, MixedPrecisionType
from mindspore.nn.cell import _cell_graph_executor
from mindspore.ops.composite.base import _Grad, _pynative_executor, _TaylorOperation, _Vmap
from mindspore.train.amp import _OutputTo16
from mindspore.train.anf_ir_pb2 import ModelProto

_WIRING = {"", "Depend", "Identity", "Load", "MakeTuple", "Partial", "Switch", "TupleGetItem", "UpdateState"}

# `ops.vjp` is built on this class. It differentiates by all weights in each backward, and since the forward has side
# effects, compiled code keeps all of that: in a GAN, the gradients of the discriminator's weights twice. This object is
# called once for each loss with the weights of that loss only, and `merge_forward` makes all calls share one forward.
backward_of_shared_forward = _Grad(get_by_list=True, sens_param=True, merge_forward=True)


def forget_failed_calls() -> None:
    """
    Clears what PyNative mode keeps of calls that an exception ended.

    PyNative mode would go on casting all that follows to the dtype of the cell that the exception came through
    (`to_float`, or a level of amp), even what is assigned to a Parameter. It would also go on recording for the
    gradient, and graph mode may then fail to differentiate ("The node adjoint is null"). No public function ends
    either.

    It takes about 0.5 ms while operators run: call it once for many Parameters, and never in a running step.
    """
    _pynative_executor.clear_res()


def loads_what_was_compiled() -> bool:
    """Returns whether MindSpore's compile cache is on, by MindSpore's own rule."""
    is_on = get_context("enable_compile_cache")
    return os.getenv("MS_COMPILER_CACHE_ENABLE") == "1" if is_on is None else is_on


def raise_what_failed() -> None:
    """Raises what an operator raised, if any did. PyNative mode otherwise raises it when a result is waited for."""
    _pynative_executor.sync()


def write_in_place(values: list[tuple[Parameter, Tensor]]) -> None:
    """
    Writes into the present memory of Parameters, which compiled code uses. Call it in PyNative mode or between steps.

    Args:
        values (list[tuple[Parameter, Tensor]]): Pairs of a Parameter and a tensor of its shape, which is cast.
    """
    if values:
        forget_failed_calls()
    for parameter, value in values:
        value = ops.cast(value, parameter.dtype)
        try:
            ops.assign(parameter, value)
        except RuntimeError:
            # A view is refused; `parameter.set_data(value.reshape(...))` makes the Parameter one.
            parameter.copy_(value)


@contextlib.contextmanager
def without_recording() -> Iterator[None]:
    """
    A context in which PyNative mode records nothing for a later `.backward()`. It would make other graphs of compiled
    code, which leave out some of what they write, and keep what they compute. No public function says so until 2.10.
    """
    enabled = _pynative_executor.enable_grad()
    _pynative_executor.set_enable_grad(False)
    try:
        yield
    finally:
        _pynative_executor.set_enable_grad(enabled)


def take_held_gradients(weights: Iterable[Parameter]) -> list[Optional[Tensor]]:
    """
    Takes from weights the gradients that a `.backward()` has left in them. Returns None for a weight without.

    They are in `.grad` from the MindSpore on that has a public `Tensor.backward`; until 2.10, its machinery keeps them
    in `._grad`.
    """
    grads = []
    for weight in weights:
        name = "grad" if hasattr(weight, "grad") else "_grad"
        grad = getattr(weight, name, None)
        if grad is not None:
            setattr(weight, name, None)
        grads.append(grad)
    return grads


def unlisted_state(optimizer: nn.Cell) -> list[Parameter]:
    """
    Returns the Parameters that get_parameters(), and so a checkpoint, misses because MindSpore's experimental
    optimizers keep them in plain lists: learning rates, and `mu_product` of NAdam.
    """
    # Other optimizers have lists, too, but with a learning rate that has been replaced.
    if not isinstance(optimizer, experimental.optim.Optimizer):
        return []
    listed = {id(parameter) for parameter in optimizer.get_parameters()}
    found = {}
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)):
            found.update({id(p): p for p in value if isinstance(p, Parameter) and id(p) not in listed})
    return list(found.values())


@contextlib.contextmanager
def around_transforms(context: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """
    A context that enters `context()` whenever `vmap` (which `jacrev` and `jacfwd` use) or `jet` runs the function that
    it transforms. Both exist in compiled code only: with MS_JIT=0 in the environment, they call themselves without end.
    """

    def around(transform):
        def call(self, *args, **kwargs):
            def transformed(*inputs, **keywords):
                with context():
                    return transform(self, *args, **kwargs)(*inputs, **keywords)

            return transformed

        return call

    transforms = {each: each.__call__ for each in (_Vmap, _TaylorOperation)}
    try:
        for each, transform in transforms.items():
            each.__call__ = around(transform)
        yield
    finally:
        for each, transform in transforms.items():
            each.__call__ = transform


def register_forward_hook(cell: nn.Cell, hook: Callable) -> Any:
    """
    Registers a hook also on a cell with a `bprop`. The cell's own method does not, though such a cell calls its hooks.
    """
    has_bprop, cell.has_bprop = cell.has_bprop, False
    try:
        return cell.register_forward_hook(hook)
    finally:
        cell.has_bprop = has_bprop


class Float32Cell(nn.Cell):
    """
    Base class of cells that refuse to be cast, since their arithmetic must stay in float32.

    In float16, the scale that an update rule computes would become infinite, and every later step would be skipped.
    `to_float`, and `mindspore.amp` for a whole training cell, reach every cell inside through `add_flags`.
    """

    def add_flags(self, **flags: Any) -> nn.Cell:
        if flags.get("fp16") or flags.get("bf16"):
            raise ValueError(
                f"For '{type(self).__name__}', the arithmetic of the loss scale must stay in float32, but got a cast "
                f"to {'float16' if flags.get('fp16') else 'bfloat16'}. Cast the network before it is passed to the "
                f"training cell: network.to_float(...), amp.auto_mixed_precision(network, ...), or "
                f"ms_lossscale.build_train_network(network, ..., level=...)."
            )
        return super().add_flags(**flags)


class _NoOptimizer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.parameters = ParameterTuple(())


class DeviceOverflowCheck(nn.TrainOneStepWithLossScaleCell):
    """
    MindSpore's own overflow check for GPU and Ascend, which knows the kernels and modes of every chip. It is
    `get_overflow_status`, documented for "user-defined training network[s] based on this class", without a network, an
    optimizer or Parameters.

    How a chip is recognised differs between MindSpore versions. The names that this class reads of its base for that
    (`ascend_910b_target`, the environment variable) are the same from 2.7 to 2.10, and a test watches them.
    """

    def __init__(self):
        super().__init__(nn.Identity(), _NoOptimizer(), Tensor(1.0))
        del self.scale_sense
        # The training cell itself agrees across ranks, once for all networks.
        self.is_distributed = False
        self._no_status = Tensor([0] * 8, mstype.int32)

    @property
    def saturates(self):
        """Whether `get_overflow_status` would read the NPU's register, by the same conditions."""
        if self.gpu_target:
            return False
        return not self.ascend_910b_target or self._ascend_check_overflow_mode == "SATURATION_MODE"

    def construct(self, grads):
        return self.get_overflow_status(self._no_status, grads)


def only_if(condition, write, *args):
    """
    Calls `write` if `condition`, a bool tensor of shape (), is True. Returns the condition.

    MindSpore drops a branch that only writes if the same function computes and returns its condition. Here the
    condition is an argument.
    """
    if condition:
        write(*args)
    return condition


def of_each_call(inputs):
    """Returns the inputs of a graph. MindSpore takes a tuple for a constant, and would compile it anew in each call."""
    return tuple(mutable(each) if isinstance(each, tuple) and each else each for each in inputs)


class CompiledMethod(nn.Cell):
    """
    Runs a method of a cell as one compiled graph in PyNative mode, too.

    It is a cell of its own because `mindspore.jit` marks the cell whose method it compiles. If that method is not
    `construct`, the marked cell can no longer be compiled into another graph.

    Args:
        method (Callable): Takes tensors and tuples of them.
    """

    def __init__(self, method):
        super().__init__(auto_prefix=False)
        self.of_cell, self.method = method.__self__, method

    def __call__(self, *inputs):
        return super().__call__(*of_each_call(inputs))

    @jit
    def construct(self, *inputs):
        return self.method(*inputs)


# Raised for a gradient within a loss, of a cell that another loss calls as well; which of the two depends on the order.
_INNER_GRADIENT = ("Illegal AnfNode", "real_primal_func")
_OTHER_FUNCTION = "The parameters number of the function is"


def explanation(cell, error):
    """
    Explains an error of MindSpore for the user of a training cell, if MindSpore's message does not.

    Args:
        cell (TrainingCell): The cell that was called.
        error (Exception): What its call raised.

    Returns:
        str, a sentence for the user; None if there is nothing to add.
    """
    if get_context("mode") != GRAPH_MODE:
        return None
    name, text = type(cell).__name__, str(error)
    if any(part in text for part in _INNER_GRADIENT):
        return (
            f"For '{name}', MindSpore could not compile a network that takes the gradient of a Cell which another loss "
            f"of the step calls as well (a gradient penalty of a critic, say). Take the gradient of a method of the "
            f"loss cell instead: in its __init__, self.gradient = ops.GradOperation()(self.score), with "
            f"def score(self, x): return self.critic(x)."
        )
    if _OTHER_FUNCTION not in text:
        return None
    for _, part in cell.cells_and_names():
        # Left by `mindspore.jit`: MindSpore then parses that method instead of `construct`.
        compiled = getattr(part, "__parse_method__", "construct")
        if compiled != "construct" and f" : {compiled}_" in text:
            return (
                f"For '{name}', MindSpore can't compile '{type(part).__name__}' into a graph, since '{compiled}' of it "
                f"was compiled by itself, in PYNATIVE_MODE. Call the training cell in one mode only."
            )
    return None


# Where a cell keeps its precision: for `to_float` (with a copy of its flags in a dict) and amp's "auto" level.
_OF_PRECISION = ("_func_graph_flags", "fp16", "fp32", "bf16", "_cell_init_args", "amp_strategy", "construct", "dtype")


def put_in_float32(cell: nn.Cell) -> Callable[[], None]:
    """
    Makes a cell and those inside it compute in float32, whatever has put them into float16. Returns a function that
    restores every attribute.

    `to_float` alone does not reverse the levels of amp. O1 replaces cells by subclasses whose rewritten source has
    casts in it; O2 wraps the cells that stay in float32, and casts their output; "auto" wraps the `construct` of the
    whole network. Nothing public shows or reverses that.
    """
    undo = [_put_alone_in_float32(each) for _, each in cell.cells_and_names()]

    def undo_all():
        for each in undo:
            each()

    return undo_all


@contextlib.contextmanager
def in_float32(cells: Iterable[nn.Cell]) -> Iterator[None]:
    """A context in which these cells, and those inside them, compute in float32."""
    undo = [put_in_float32(cell) for cell in cells]
    try:
        yield
    finally:
        # In reverse order, since one of the cells may be inside another.
        for each in reversed(undo):
            each()


def _put_alone_in_float32(cell):
    its_class, attributes = type(cell), vars(cell)
    precision = cell.mixed_precision_type
    before = {name: attributes[name] for name in _OF_PRECISION if name in attributes}
    if "_func_graph_flags" in before:
        before["_func_graph_flags"] = dict(before["_func_graph_flags"])

    cell.add_flags(fp16=False, fp32=True, bf16=False)
    if is_rewritten(cell):
        cell.__class__ = written_class(cell)
    if isinstance(cell, _OutputTo16):
        cell.dtype = mstype.float32
    if attributes.pop("amp_strategy", None) is not None:
        attributes.pop("construct", None)

    def undo():
        cell.__class__ = its_class
        cell.mixed_precision_type = precision
        Cell_.set_mixed_precision_type(cell, precision or MixedPrecisionType.NOTSET)
        for name in _OF_PRECISION:
            attributes.pop(name, None)
        attributes.update(before)

    return undo


def is_library_cell(cell: nn.Cell) -> bool:
    """Returns whether a Cell's class is MindSpore's or this package's, not a user's own."""
    return type(cell).__module__.partition(".")[0] in ("mindspore", "ms_lossscale")


def is_rewritten(cell: nn.Cell) -> bool:
    """Returns whether amp's O1, or a white list, wrote the cell's class: its file is in the folder for such classes."""
    construct = vars(type(cell)).get("construct")
    return construct is not None and Path(construct.__code__.co_filename).parent.name == "rewritten_network"


def written_class(cell: nn.Cell) -> type[nn.Cell]:
    """Returns the class of a cell as its author wrote it."""
    return type(cell).__mro__[1] if is_rewritten(cell) else type(cell)


def is_cast(cell: nn.Cell) -> bool:
    """Returns whether `to_float` or any level of amp makes a cell, or some of its operators, compute in 16 bits."""
    flags = cell.get_flags()
    return bool(flags.get("fp16") or flags.get("bf16") or "amp_strategy" in vars(cell) or is_rewritten(cell))


def casts_its_output(cell: nn.Cell) -> bool:
    """Returns whether amp's O2, or a black list, made this cell to cast the output of one that stays in float32."""
    return isinstance(cell, _OutputTo16)


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
    for _, each in cell.cells_and_names():
        each.compile_cache.clear()
