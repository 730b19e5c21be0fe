"""Cells that reach the state that they write, each in a different way of Python's; run as `ways_to_write`."""

import contextlib
import functools
import linecache
import operator
import sys

from mindspore import ops

from support.ways_to_write import PYNATIVE, Way, write


class BySwapsInALoop(Way):
    def construct(self, x):
        a, b, c = self.trained, self.trained * 2, self.u
        for _ in range(2):
            a, b, c = b, c, a
        ops.assign(a, self.following(x))
        return x * self.trained


class ByAttrgetter(Way):
    def construct(self, x):
        ops.assign(operator.attrgetter("u")(self), self.following(x))
        return x * self.trained


class ByMethodcaller(Way):
    modes = PYNATIVE

    def construct(self, x):
        operator.methodcaller("copy_", self.following(x))(self.u)
        return x * self.trained


class ByNonlocalAlias(Way):
    modes = PYNATIVE

    def construct(self, x):
        memory = self.trained

        def choose():
            nonlocal memory
            memory = self.u

        choose()
        ops.assign(memory, self.following(x))
        return x * self.trained


class ByClosure(Way):
    def construct(self, x):
        memory = self.u

        def update(value):
            ops.assign(memory, value)

        update(self.following(x))
        return x * self.trained


class ByLambdaWithADefault(Way):
    def construct(self, x):
        update = lambda value, memory=self.u: ops.assign(memory, value)  # noqa: E731
        update(self.following(x))
        return x * self.trained


class ByLambdaThatIsKept(Way):
    def __init__(self):
        super().__init__()
        self.keep = lambda memory, value: ops.assign(memory, value)

    def construct(self, x):
        self.keep(self.u, self.following(x))
        return x * self.trained


class ByLambdaThatKeepsIt(Way):
    modes = PYNATIVE

    def __init__(self):
        super().__init__()
        self.keep = lambda value, memory=self.u: ops.assign(memory, value)

    def construct(self, x):
        self.keep(self.following(x))
        return x * self.trained


class ByPartial(Way):
    def construct(self, x):
        functools.partial(write, self.u)(self.following(x))
        return x * self.trained


class ByStarred(Way):
    def construct(self, x):
        write(*[self.u], **{"value": self.following(x)})
        return x * self.trained


WRITING = False


class ByModuleFlag(Way):
    """Writes if a flag of the module is set, which happens after the training cell was made."""

    @staticmethod
    def begin():
        global WRITING
        WRITING = True

    def __init__(self):
        global WRITING
        super().__init__()
        WRITING = False

    def construct(self, x):
        if WRITING:
            ops.assign(self.u, self.following(x))
        return x * self.trained


class ByOwnFlag(Way):
    def __init__(self):
        super().__init__()
        self.writing = False

    def begin(self):
        self.writing = True

    def construct(self, x):
        if self.writing:
            ops.assign(self.u, self.following(x))
        return x * self.trained


class Memory:
    """Keeps a Parameter in an object that is no Cell, and writes it through Python's protocols."""

    def __init__(self, parameter):
        self.parameter = parameter

    def __call__(self, value):
        ops.assign(self.parameter, value)

    def __setitem__(self, key, value):
        ops.assign(self.parameter, value)

    def __iadd__(self, value):
        ops.assign(self.parameter, self.parameter + value)
        return self

    def __enter__(self):
        ops.assign(self.parameter, self.parameter * 0.5)
        return self.parameter

    def __exit__(self, *_):
        ops.assign(self.parameter, self.parameter + 1)

    def __getattr__(self, name):
        return functools.partial(ops.assign, self.parameter)


class ByMemory(Way):
    def __init__(self):
        super().__init__()
        self.memory = Memory(self.u)


class ByObjectThatIsCalled(ByMemory):
    modes = PYNATIVE

    def construct(self, x):
        self.memory(self.following(x))
        return x * self.trained


class BySetitemOfItsOwn(ByMemory):
    modes = PYNATIVE

    def construct(self, x):
        self.memory["a"] = self.following(x)
        return x * self.trained


class ByIaddOfItsOwn(ByMemory):
    modes = PYNATIVE

    def construct(self, x):
        memory = self.memory
        memory += ops.stop_gradient(x.mean(0))
        return x * self.trained


class Holder:
    """Writes its Parameter when a property is set."""

    def __init__(self, parameter):
        self.parameter = parameter

    @property
    def value(self):
        return self.parameter * 2

    @value.setter
    def value(self, value):
        ops.assign(self.parameter, value)


class BySetterOfAProperty(Way):
    # In graph mode, MindSpore calls a setter in the first step only.
    modes = PYNATIVE

    def __init__(self):
        super().__init__()
        self.holder = Holder(self.u)

    def construct(self, x):
        self.holder.value = self.following(x)
        return x * self.trained


class ByEnter(ByMemory):
    modes = PYNATIVE

    def construct(self, x):
        with self.memory as u:
            y = x * u
        return y * self.trained


class ByExitStack(ByMemory):
    modes = PYNATIVE

    def construct(self, x):
        with contextlib.ExitStack() as stack:
            stack.callback(ops.assign, self.u, self.following(x))
        return x * self.trained


class ByGetattrOfItsOwn(ByMemory):
    modes = PYNATIVE

    def construct(self, x):
        self.memory.whatever(self.following(x))
        return x * self.trained


class ByCallOfItsOwn(Way):
    """The cell overrides `__call__`."""

    modes = PYNATIVE

    def __call__(self, x):
        ops.assign(self.u, self.following(x))
        return super().__call__(x)

    def construct(self, x):
        return x * self.trained


class ByProperty(Way):
    @property
    def gain(self):
        ops.assign(self.u, self.u * 0.5 + 1)
        return self.trained

    def construct(self, x):
        return x * self.gain


class ByNameInParts(Way):
    def construct(self, x):
        ops.assign(getattr(self, "{}".format("u")), self.following(x))
        return x * self.trained


class ByAllParameters(Way):
    modes = PYNATIVE

    def construct(self, x):
        for parameter in self.get_parameters():
            if not parameter.requires_grad:
                ops.assign(parameter, self.following(x))
        return x * self.trained


MATCH = """
def construct(self, x):
    match (self.trained, self.u):
        case (_, memory):
            ops.assign(memory, self.following(x))
    return x * self.trained
"""


NAMESPACE = {"ops": ops}


def _from_source(source):
    # Given as text, since Python 3.9 has no `match`. The package and MindSpore read the lines through `linecache`.
    name = f"<{__name__}.match>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), NAMESPACE)
    return NAMESPACE["construct"]


if sys.version_info >= (3, 10):

    class ByMatch(Way):
        modes = PYNATIVE
        construct = _from_source(MATCH)
