"""
Runs loss cells that write state through clean and overflowed steps, and compares all state that can be reached.

A batch overflows either by the scale alone or by an inf in the data. By the scale, float16 can't hold a scaled
gradient, while all that the forward computes and writes is finite.
"""

import functools
import itertools
import re
import sys

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import (
    AlternatingTrainOneStepCell,
    DynamicLossScale,
    ScaledTrainOneStepCell,
    SimultaneousTrainOneStepCell,
)
from support.hidden import hidden
from support.networks import weight
from support.training import changed

FEATURES, BATCH = 3, 4
# At SCALE and at the floor, a quarter of it, the gradients of a steep loss are infinite in float16.
SCALE, STEEP, GENTLE = 2.0**12, 2.0**10, 1.0

# What a skipped step may change: the state of the loss scale, the counters, and what the step keeps for the next one.
# That is copies of what the forward writes, the turns, the cycle's scale and the measured norm.
_MAY_CHANGE = re.compile(
    r"(network_\d\.)?"
    r"((loss_scale|step_counters|forward_state|alternation|clipping)\.|accumulation\.(loss_scale|scale_is_set))"
)


class Loss(nn.Cell):
    """The loss of cells that write. Each gets the batch separately, so that one cell's output reaches no other."""

    def __init__(self, parts, name="loss"):
        super().__init__()
        self.gain = weight(FEATURES, name=f"{name}.gain")
        self.weight = weight(FEATURES, 1, name=f"{name}.weight")
        self.parts = nn.CellList(parts)

    def construct(self, x, slope):
        x = x * self.gain
        outputs = ops.matmul(x, self.weight)
        for part in self.parts:
            outputs = outputs + part(x).mean() * 2.0**-6
        return scaled_loss(outputs, slope)


def scaled_loss(outputs, slope):
    product = outputs.astype(mstype.float16) * slope.astype(mstype.float16)
    return product.astype(mstype.float32).mean()


def at_top(way):
    """Returns the class of a network that is itself the writing cell, rather than holding it."""

    class Top(way):
        def __init__(self):
            super().__init__()
            self.gain = weight(FEATURES, name="top.gain")

        def construct(self, x, slope):
            return scaled_loss(super().construct(x * self.gain).mean(), slope)

    return Top


class Reach:
    """The Parameters and registered buffers that can be reached from some objects, wherever they are kept."""

    def __init__(self, *things):
        self._read, self._seen = {}, {}
        for i, thing in enumerate(things):
            self._add(str(i), thing)

    def values(self):
        return {name: read().asnumpy().copy() for name, read in self._read.items()}

    def _add(self, path, thing):
        if id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Parameter):
            self._read[path if thing.name in self._read else thing.name] = lambda: thing
        elif isinstance(thing, nn.Cell):
            self._add_cell(path, thing)
        elif isinstance(thing, dict):
            for key, value in thing.items():
                if not str(key).startswith("__"):
                    self._add(f"{path}.{key}", value)
        elif isinstance(thing, (list, tuple)):
            self._add(path, dict(enumerate(thing)))
        elif type(thing).__module__.startswith("support."):
            self._add(path, vars(thing))

    def _add_cell(self, path, cell):
        for name, _ in cell.named_buffers(recurse=False):
            # Read each time, since the cell may have got another one.
            self._read[f"{path}.{name}"] = functools.partial(getattr, cell, name)
        for cls in type(cell).__mro__:
            if cls.__module__.startswith("support."):
                self._add(cls.__module__, vars(sys.modules[cls.__module__]))
        self._add(path, vars(cell))
        self._add(path, hidden(cell))


class Training:
    """
    A training cell, and all state that can be reached from its networks, its optimizers and itself.

    Args:
        kind (str): "single", "simultaneous" or "alternating". The latter two have a second network, which writes
            nothing. It alone overflows in a step that overflows by "other".
        network (Cell): The first network.
        writing (list[Cell]): Those of its cells that must change something in a clean step.
        keywords: For the training cell.
    """

    def __init__(self, kind, network, writing, **keywords):
        networks = [network] if kind == "single" else [network, Loss([], name="other")]
        optimizers = [nn.Momentum(trained(network), 2.0**-10, 0.9) for network in networks]
        loss_scale = DynamicLossScale(SCALE, min_loss_scale=SCALE / 4)
        if kind == "single":
            cell = ScaledTrainOneStepCell(network, optimizers[0], loss_scale, **keywords)
        else:
            cls = {"simultaneous": SimultaneousTrainOneStepCell, "alternating": AlternatingTrainOneStepCell}[kind]
            cell = cls(networks, optimizers, loss_scale, network_inputs=[(0, 1), (0, 2)], **keywords)
        self.cell = cell.set_train()
        self._kind = kind
        self._calls = keywords.get("gradient_accumulation_steps", 1)
        self._all = Reach(networks, optimizers, cell.parameters_dict())
        self._each = [Reach(*of_one) for of_one in zip(networks, optimizers)]
        self._written = [(part, Reach(part)) for part in writing]
        self._weights = {weight.name for network in networks for weight in trained(network)}
        self._seeds = itertools.count()
        for part in writing:
            getattr(part, "begin", int)()

    def make(self, step):
        """
        Makes a step and checks its effects.

        Args:
            step (str): "clean", or what overflows: "data", "scale" (of all networks), "own" or "other" (the scale of
                the first or of the second network alone). A number after it is that of the call in the cycle.
        """
        kind, call = step.rstrip("0123456789"), int(re.search(r"\d*$", step).group() or 0) % self._calls
        kind = "own" if kind == "other" and self._kind == "single" else kind
        self.cell.set_loss_scale(SCALE)
        before, written = self._all.values(), [reach.values() for _, reach in self._written]
        for i in range(self._calls):
            overflow = self.cell(*self._batch(kind if i == call else "clean"))[1].asnumpy()
        overflowed = [self._overflows(kind, i) for i in range(overflow.size)]
        assert overflow.reshape(-1).tolist() == overflowed, f"whether {step} is {overflow}"
        moved = {name for name in changed(before, self._all.values()) if not _MAY_CHANGE.match(name)}
        if all(overflowed):
            assert not moved, f"a step that overflowed by {step} left {sorted(moved)} behind"
            return
        for i, reach in enumerate(self._each):
            if overflowed[min(i, overflow.size - 1)]:
                its = moved & set(reach.values())
                assert not its, f"a turn that overflowed by {step} left {sorted(its)} behind"
        if not overflowed[0]:
            for (part, reach), values in zip(self._written, written):
                its = changed(values, reach.values()) - self._weights
                assert its, f"a clean step left nothing of what {type(part).__name__} writes"

    def _batch(self, kind):
        x = np.random.default_rng(next(self._seeds)).uniform(0.5, 1.5, size=(BATCH, FEATURES)).astype(np.float32)
        if kind == "data":
            x[1, 2] = np.inf
        slopes = [STEEP if kind in each else GENTLE for each in (("scale", "own"), ("scale", "other"))]
        return Tensor(x), *(Tensor(np.float32(slope)) for slope in slopes[: len(self._each)])

    def _overflows(self, kind, i):
        if self._kind == "alternating":
            return kind in ("data", "scale", ("own", "other")[i])
        return kind != "clean"


def trained(network):
    """Returns the weights for an optimizer, not those that are written instead or are an inner optimizer's."""
    return [weight for weight in network.trainable_params() if not re.search("loose|inner", weight.name)]
