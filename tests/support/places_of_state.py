"""Places where a network may keep a cell that writes, or its state; run as `ways_to_write`, with any cell inside."""

import sys

from mindspore import grad, jit, nn, ops

from support import modules_of_state
from support.hidden import forget_hidden, hide
from support.modules_of_state import imported, inner
from support.ways_to_write import PYNATIVE, moved, state

# State of one test's networks in a module. Graph mode compiles with what is there at that time.
GLOBAL_CELLS, GLOBAL_PARAMETERS, GLOBALS_BY_NAME = [], [], []


def forget_globals():
    """Clears the globals before the networks of the next test are made."""
    GLOBAL_CELLS.clear()
    GLOBAL_PARAMETERS.clear()
    GLOBALS_BY_NAME.clear()
    inner.STATE.clear()
    imported.STATE.clear()
    forget_hidden()


class Place(nn.Cell):
    modes = ("graph", "pynative")

    def __init__(self, part):
        super().__init__()
        part.update_parameters_name(f"{type(self).__name__}.")
        # MindSpore does not see what is in a list, so it does not set its mode.
        self.keep(part.set_train())


class InACell(Place):
    def keep(self, part):
        self.part = part

    def construct(self, x):
        return self.part(x)


class InAList(Place):
    def keep(self, part):
        self.parts = [part]

    def construct(self, x):
        return self.parts[0](x)


class InACellDict(Place):
    def keep(self, part):
        self.parts = nn.CellDict({"a": part})

    def construct(self, x):
        return self.parts["a"](x)


class InAModule(Place):
    def keep(self, part):
        self.position = len(GLOBAL_CELLS)
        GLOBAL_CELLS.append(part)

    def construct(self, x):
        return GLOBAL_CELLS[self.position](x)


class Kept(nn.Cell):
    """Base class: the subclass alone decides where the Parameter is kept."""

    modes = ("graph", "pynative")

    def __init__(self):
        super().__init__()
        parameter = state(f"{type(self).__name__}.u")
        self.keep(parameter)
        hide(self, parameter)


class ParameterInAList(Kept):
    def keep(self, parameter):
        self.all = [parameter]

    def construct(self, x):
        ops.assign(self.all[0], moved(self.all[0], x))
        return x * 2


class ParameterInATuple(ParameterInAList):
    def keep(self, parameter):
        self.all = (parameter, parameter)


class ParameterInADict(Kept):
    def keep(self, parameter):
        self.all = {"a": parameter}

    def construct(self, x):
        ops.assign(self.all["a"], moved(self.all["a"], x))
        return x * 2


class ParameterInALoopOverADict(ParameterInADict):
    def construct(self, x):
        for memory in self.all.values():
            ops.assign(memory, moved(memory, x))
        return x * 2


class ParameterInAModule(Kept):
    def keep(self, parameter):
        GLOBAL_PARAMETERS.append(parameter)

    def construct(self, x):
        ops.assign(GLOBAL_PARAMETERS[0], moved(GLOBAL_PARAMETERS[0], x))
        return x * 2


class Object:
    """An object that is not a cell."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class ParameterInAnObject(Kept):
    modes = PYNATIVE

    def keep(self, parameter):
        self.object = Object(u=parameter)

    def construct(self, x):
        ops.assign(self.object.u, moved(self.object.u, x))
        return x * 2


class ParameterOfAJitFunction(Kept):
    def keep(self, parameter):
        @jit
        def follow(x):
            ops.assign(parameter, moved(parameter, x))
            return x * 2

        self.follow = follow

    def construct(self, x):
        return self.follow(x)


class ParameterOfAGradient(Kept):
    def keep(self, parameter):
        def follow(x):
            ops.assign(parameter, moved(parameter, x))
            return x * x

        self.gradient = grad(follow)

    def construct(self, x):
        return ops.stop_gradient(self.gradient(x))


class AttributeOfAParameter(Kept):
    modes = PYNATIVE

    def keep(self, parameter):
        self.weight = state("AttributeOfAParameter.weight", trainable=True)
        self.weight.average = parameter

    def construct(self, x):
        ops.assign(self.weight.average, moved(self.weight.average, x))
        return x * self.weight


class ParameterInAModuleOfAPackage(Kept):
    def keep(self, parameter):
        modules_of_state.inner.STATE.append(parameter)

    def construct(self, x):
        memory = modules_of_state.inner.STATE[0]
        ops.assign(memory, moved(memory, x))
        return x * 2


class ParameterThatIsImported(Kept):
    modes = PYNATIVE

    def keep(self, parameter):
        # Named by the import alone.
        module = sys.modules[f"{modules_of_state.__name__}.imported"]
        vars(module)["STATE"].append(parameter)

    def construct(self, x):
        from support.modules_of_state.imported import STATE

        ops.assign(STATE[0], moved(STATE[0], x))
        return x * 2


class ParameterAmongGlobals(Kept):
    modes = PYNATIVE

    def keep(self, parameter):
        GLOBALS_BY_NAME.append(parameter)

    def construct(self, x):
        memory = globals()["GLOBALS_BY_NAME"][0]
        ops.assign(memory, moved(memory, x))
        return x * 2
