"""Runs loss cells that write state through clean and overflowed steps, and compares all state.

A batch overflows either by the scale alone or by an inf in the data. By the scale, float16 can't hold a scaled
gradient, while all that the forward computes and writes is finite."""

import itertools
import re

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

import ms_lossscale as ls
from support.networks import weight
from support.training import cell_of, changed

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
        self.weight, self.parts = weight(FEATURES, 1, name=f"{name}.weight"), nn.CellList(parts)

    def construct(self, x, slope):
        x = x * self.gain
        outputs = ops.matmul(x, self.weight)
        for part in self.parts:
            outputs = outputs + part(x).mean() * 2.0**-6
        product = outputs.astype(mstype.float16) * slope.astype(mstype.float16)
        return product.astype(mstype.float32).mean()


def values_of(*cells):  # Copies of all Parameters and buffers of cells.
    values = {}
    for i, cell in enumerate(cells):
        values.update((parameter.name, parameter.asnumpy().copy()) for parameter in cell.get_parameters())
        values.update((f"{i}.{name}", buffer.asnumpy().copy()) for name, buffer in cell.named_buffers())
    return values


class Training:
    """A training cell on a network that writes.

    Args:
        kind (str): "single", "simultaneous" or "alternating". The latter two have a second network, which writes
            nothing. It alone overflows in a step that overflows by "other".
        parts (list[Cell]): The cells that write. Each must change something in a clean step.
        keywords: For the training cell."""

    def __init__(self, kind, parts, **keywords):
        networks = [Loss(parts)] if kind == "single" else [Loss(parts), Loss([], name="other")]
        optimizers = [nn.Momentum(network.trainable_params(), 2.0**-10, 0.9) for network in networks]
        loss_scale = ls.DynamicLossScale(SCALE, min_loss_scale=SCALE / 4)
        positions = {} if kind == "single" else {"network_inputs": [(0, 1), (0, 2)]}
        kind_of_cell = "scaled" if kind == "single" else kind
        self.cell = cell = cell_of(kind_of_cell, networks, optimizers, loss_scale, **positions, **keywords)
        self._kind, self._parts = kind, parts
        self._calls, self._all = keywords.get("gradient_accumulation_steps", 1), [*networks, *optimizers, cell]
        self._each = list(zip(networks, optimizers))
        self._weights = {weight.name for network in networks for weight in network.trainable_params()}
        self._seeds = itertools.count()

    def make(self, step):
        """Makes a step and checks its effects.

        Args:
            step (str): "clean", or what overflows: "data", "scale" (of all networks), "own" or "other" (the scale of
                the first or of the second network alone). A number after it is that of the call in the cycle."""
        kind, call = step.rstrip("0123456789"), int(re.search(r"\d*$", step).group() or 0) % self._calls
        kind = "own" if kind == "other" and self._kind == "single" else kind
        self.cell.set_loss_scale(SCALE)
        before, written = values_of(*self._all), [values_of(part) for part in self._parts]
        for i in range(self._calls):
            overflow = self.cell(*self._batch(kind if i == call else "clean"))[1].asnumpy()
        overflowed = [self._overflows(kind, i) for i in range(overflow.size)]
        assert overflow.reshape(-1).tolist() == overflowed, f"whether {step} is {overflow}"
        moved = {name for name in changed(before, values_of(*self._all)) if not _MAY_CHANGE.match(name)}
        if all(overflowed):
            assert not moved, f"a step that overflowed by {step} left {sorted(moved)} behind"
            return
        for i, of_one in enumerate(self._each):
            if overflowed[min(i, overflow.size - 1)]:
                its = {name for name in moved if name in values_of(*of_one) or name.startswith(f"{i}.")}
                assert not its, f"a turn that overflowed by {step} left {sorted(its)} behind"
        if not overflowed[0]:
            for part, values in zip(self._parts, written):
                its = changed(values, values_of(part)) - self._weights
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
