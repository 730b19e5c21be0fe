"""
Cells whose forward writes state, each in a different way.

Each is run in `modes`, in both if it does not say. In the other mode, MindSpore refuses to compile it, or the write
does not last. They take a batch of shape (4, 3) and return a tensor.
"""

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

FEATURES = 3
GRAPH, PYNATIVE = ("graph",), ("pynative",)


def state(name, trainable=False):
    return Parameter(Tensor([0.5, 1.0, 1.5]), name=name, requires_grad=trainable)


def moved(value, x):
    """Returns another value that shows an inf of the batch."""
    return ops.stop_gradient(value * 0.5 + x.mean(0))


def write(memory, value):
    ops.assign(memory, value)


class Way(nn.Cell):
    """Base class, with a frozen Parameter `u`, and others that are only read."""

    modes = ("graph", "pynative")

    def __init__(self):
        super().__init__()
        name = type(self).__name__
        self.u = state(f"{name}.u")
        self.trained = state(f"{name}.trained", trainable=True)

    def following(self, x):
        return moved(self.u, x)


class ByAssign(Way):
    def construct(self, x):
        ops.assign(self.u, self.following(x))
        return x * self.trained


class ByAttribute(Way):
    """Assigns an attribute, as is usual in PyNative mode."""

    def construct(self, x):
        self.u = self.following(x)
        return x * self.trained


class ByAttributeAndView(Way):
    def construct(self, x):
        self.u = ops.stop_gradient(x)[0]
        return x * self.trained


class BySetattr(Way):
    def construct(self, x):
        setattr(self, "u", self.following(x))  # noqa: B010
        return x * self.trained


class BySetData(Way):
    modes = PYNATIVE

    def construct(self, x):
        self.u.set_data(self.following(x))
        return x * self.trained


class ByAugmentedAttribute(Way):
    def construct(self, x):
        self.u += ops.stop_gradient(x.mean(0))
        return x * self.trained


class ByEllipsis(Way):
    modes = PYNATIVE

    def construct(self, x):
        self.u[...] = self.following(x)
        return x * self.trained


class ByIndex(Way):
    def construct(self, x):
        self.u[0] = self.following(x)[0]
        return x * self.trained


class BySetitem(Way):
    modes = PYNATIVE

    def construct(self, x):
        self.u.__setitem__(0, self.following(x)[0])
        return x * self.trained


class ByCopy(Way):
    def construct(self, x):
        self.u.copy_(self.following(x))
        return x * self.trained


class ByLocalName(Way):
    def construct(self, x):
        memory, trained = self.u, self.trained
        ops.assign(memory, moved(memory, x))
        return x * trained


class ByWalrus(Way):
    modes = PYNATIVE

    def construct(self, x):
        ops.assign((memory := self.u), moved(memory, x))
        return x * self.trained


class ByView(Way):
    modes = PYNATIVE

    def construct(self, x):
        ops.depend(self.u, x).view(-1).copy_(self.following(x))
        return x * self.trained


class ByPartOfATuple(Way):
    """Writes an element of a tuple of Parameters."""

    def __init__(self):
        super().__init__()
        self.all = ParameterTuple([self.u, state(f"{type(self).__name__}.other")])

    def construct(self, x):
        ops.assign(self.all[0], self.following(x))
        return x * self.trained


class ByAugmentedPartOfAList(Way):
    modes = GRAPH

    def __init__(self):
        super().__init__()
        self.all = [self.u]

    def construct(self, x):
        self.all[0] += ops.stop_gradient(x.mean(0))
        return x * self.trained


class ByAugmentedPartOfADict(Way):
    modes = GRAPH

    def __init__(self):
        super().__init__()
        self.by_name = {"a": self.u}

    def construct(self, x):
        by_name = self.by_name
        by_name["a"] += ops.stop_gradient(x.mean(0))
        return x * self.trained


class ByPartOfADict(Way):
    def __init__(self):
        super().__init__()
        self.by_name = {"a": self.u}

    def construct(self, x):
        ops.assign(self.by_name["a"], self.following(x))
        return x * self.trained


namespace = {"ops": ops}
exec("def unreadable(memory, value):\n    ops.assign(memory, value)", namespace)
unreadable = namespace["unreadable"]


class ByFunctionWithoutSource(Way):
    modes = PYNATIVE

    def construct(self, x):
        unreadable(self.u, self.following(x))
        return x * self.trained


class OfATrainableParameter(Way):
    """Writes a trainable Parameter that is in no optimizer: in a clean step, only the forward changes it."""

    def __init__(self):
        super().__init__()
        self.loose = state(f"{type(self).__name__}.loose", trainable=True)

    def construct(self, x):
        ops.assign(self.loose, moved(self.loose, x))
        return x * self.loose


class OfATrainableParameterByFunctionWithoutSource(OfATrainableParameter):
    modes = PYNATIVE

    def construct(self, x):
        unreadable(self.loose, moved(self.loose, x))
        return x * self.loose
