"""Cells that write by conditions, by loops, and by what they call and are given; run as `ways_to_write`."""

import functools

from mindspore import Parameter, Tensor, load_param_into_net, nn, ops

from support.forward_writing_networks import passing_on
from support.ways_to_write import PYNATIVE, Way, moved, state, write


class ByChoice(Way):
    def construct(self, x):
        memory = None
        if x.shape[0] > 1:
            memory = self.u
        if memory is not None:
            ops.assign(memory, self.following(x))
        return x * self.trained


class ByDefaultThatIsOverridden(Way):
    def update(self, x, enabled=False):
        if enabled:
            ops.assign(self.u, self.following(x))
        return x

    def construct(self, x):
        return self.update(x) * self.update(self.trained, enabled=True)


class InLoops(Way):
    def construct(self, x):
        memory = self.trained
        for _ in range(2):
            if memory is not self.trained:
                ops.assign(memory, self.following(x))
            memory = self.u
        return x * self.trained


class ByZip(Way):
    def construct(self, x):
        for memory, _ in zip((self.u, self.u), (self.trained,)):
            ops.assign(memory, self.following(x))
        return x * self.trained


class ByClosureThatCallsItself(Way):
    def construct(self, x):
        def count(n):
            if n == 0:
                ops.assign(self.u, self.following(x))
                return x
            return count(n - 1)

        return count(2) * self.trained


class ByImport(Way):
    modes = PYNATIVE

    def construct(self, x):
        from mindspore import ops as operators

        operators.assign(self.u, self.following(x))
        return x * self.trained


class ByFunctionThatItWasGiven(Way):
    def __init__(self, function=write):
        super().__init__()
        self.function = function

    def construct(self, x):
        self.function(self.u, self.following(x))
        return x * self.trained


@functools.singledispatch
def write_any(value, memory):
    raise NotImplementedError


@write_any.register
def _(value: Tensor, memory):
    ops.assign(memory, value)


class BySingleDispatch(Way):
    modes = PYNATIVE

    def construct(self, x):
        write_any(self.following(x), self.u)
        return x * self.trained


class BySingleDispatchMethod(Way):
    modes = PYNATIVE

    @functools.singledispatchmethod
    def update(self, value):
        raise NotImplementedError

    @update.register
    def _(self, value: Tensor):
        ops.assign(self.u, value)

    def construct(self, x):
        self.update(self.following(x))
        return x * self.trained


class ByLoading(Way):
    modes = PYNATIVE

    def construct(self, x):
        load_param_into_net(self, {self.u.name: Parameter(self.following(x), name=self.u.name)})
        return x * self.trained


class ByStateDict(Way):
    modes = PYNATIVE

    def construct(self, x):
        self.load_state_dict({"u": Parameter(self.following(x))}, strict=False)
        return x * self.trained


class ByConstructOfTheObject(Way):
    modes = PYNATIVE

    def __init__(self):
        super().__init__()
        self.construct = functools.partial(_construct, self)


def _construct(cell, x):
    ops.assign(cell.u, cell.following(x))
    return x * cell.trained


class Writer(nn.Cell):
    def construct(self, memory, value):
        memory.copy_(value)
        return value


class ByCellThatIsGivenIt(Way):
    def __init__(self):
        super().__init__()
        self.writer = Writer()

    def construct(self, x):
        self.writer(self.u, self.following(x))
        return x * self.trained


class ByCellInAListThatIsGivenIt(Way):
    def __init__(self):
        super().__init__()
        self.writers = [Writer()]

    def construct(self, x):
        self.writers[0](self.u, self.following(x))
        return x * self.trained


class ByCellOfTheMoment(Way):
    def construct(self, x):
        Writer()(self.u, self.following(x))
        return x * self.trained


class Keeper(nn.Cell):
    def __init__(self):
        super().__init__()
        self.memory = state("Keeper.memory")

    def construct(self, x):
        return x


class OfAnotherCell(Way):
    def __init__(self):
        super().__init__()
        self.keeper = Keeper()

    def construct(self, x):
        ops.assign(self.keeper.memory, moved(self.keeper.memory, x))
        return x * self.trained


class Decorated(Way):
    @passing_on
    def update(self, x):
        ops.assign(self.u, self.following(x))

    @passing_on
    def construct(self, x):
        self.update(x)
        return x * self.trained


class WithinALoopOfMindSpore(Way):
    modes = PYNATIVE

    def construct(self, x):
        def body(i):
            ops.assign(self.u, self.following(x))
            return i + 1

        ops.WhileLoop()(lambda i: i < 1, body, 0)
        return x * self.trained
