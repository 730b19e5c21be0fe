"""Of a function, the Cells are held that its code reaches, and no code of the user's runs to find them."""

import enum
import functools
import types

import pytest
from conftest import quick_in_pynative_mode
from mindspore import nn, ops
from support import manual_training
from support.manual_training import adam, batch, dynamic, regression
from support.training import same_bits, weights

import ms_lossscale as ls


class WithHead(nn.Cell):
    def __init__(self):
        super().__init__()
        self.head = nn.Dense(4, 1)

    def construct(self, x, y):
        return ops.square(self.head(x) - y).mean()


def head_global():
    return nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4))


head = head_global()
used = WithHead()
used_in_a_function_inside = WithHead()


def names_an_attribute(x, y):
    return ops.square(used.head(x) - y).mean()


def holds_another_function(x, y):
    def inside():
        return [factor * used_in_a_function_inside(x, y) for factor in (1.0, 2.0)]

    return sum(inside())


def test_the_name_of_an_attribute_is_no_global(mode):
    head.set_train(False)
    cell = ls.ScaledTrainOneStepCell(names_an_attribute, adam(used), dynamic()).set_train()
    cell(*batch(0))
    assert not [name for name in cell.forward_state_names() if "moving" in name]
    assert not any(its.training for _, its in head.cells_and_names())
    assert not {its.name for its in head.get_parameters()} & {its.name for its in cell.get_parameters()}
    assert used.training


@quick_in_pynative_mode
def test_globals_of_functions_inside_are_reached(mode):
    cell = ls.ScaledTrainOneStepCell(holds_another_function, adam(used_in_a_function_inside), dynamic()).set_train()
    cell(*batch(0))
    assert used_in_a_function_inside.training
    assert cell.counters()["applied_steps"] == 1


def mean_square(x, y):
    return ops.square(normalise(x) - y).mean()


class Settings:
    """A class is used as a place for what a program has once; its attributes are set in the tests."""


class MoreSettings(Settings):
    def forward(self, x, y):
        return self.loss(self.network(x, y), y)

    def loss(self, loss, y):
        return loss + mean_square(y, y)

    @staticmethod
    def of_class(x, y):
        return Settings.networks[0](x, y)

    @classmethod
    def of_any_class(cls, x, y):
        return cls.network(x, y)


def of_base_class(x, y):
    return MoreSettings.network(x, y)


def of_module(x, y):
    return manual_training.network(x, y)


def names_another_attribute(x, y):
    return Settings.factor * of_settings(x, y)


def of_settings(x, y):  # When this one is found, the class has been looked at.
    return Settings.network(x, y)


class Called:
    def __call__(self, x, y):
        return of_base_class(x, y)


class WithProperty:
    @property
    def network(self):
        return Settings.networks[0]

    def forward(self, x, y):
        return self.network(x, y)


normalise = nn.BatchNorm1d(1)
REACHING = {
    "class that was looked at": lambda: names_another_attribute,
    "class": lambda: of_base_class,
    "static_method": lambda: MoreSettings.of_class,
    "method": lambda: MoreSettings().forward,
    "module": lambda: of_module,
}


@pytest.mark.parametrize("name", REACHING)
def test_attributes_of_classes_and_modules_that_code_names(mode, name, monkeypatch):
    network = Settings.network = regression()
    monkeypatch.setattr(manual_training, "network", network, raising=False)
    Settings.networks, Settings.unused, Settings.factor = [network], regression(prefix="unused."), 1.0
    network.set_train(False)
    cell = ls.ScaledTrainOneStepCell(REACHING[name](), adam(network), dynamic()).set_train()
    of_method = ["mean", "variance"] if name == "method" else []
    assert cell.forward_state_names() == ["1.moving_mean", "1.moving_variance", *of_method]
    assert network.training and not Settings.unused.training
    before = weights(network)
    assert not cell(*batch(0))[1]
    assert not any(map(same_bits, before, weights(network)))


PYTHON_ONLY = {"class method": MoreSettings.of_any_class, "object": Called(), "property": WithProperty().forward}


@pytest.mark.parametrize("function", PYTHON_ONLY.values(), ids=PYTHON_ONLY)
@pytest.mark.parametrize("mode", ["pynative"], indirect=True)
def test_what_graph_mode_does_not_compile(mode, function):
    """A class method, which it does not bind to its class, an object that is called, and a property."""
    network = Settings.network = regression()
    Settings.networks = [network]
    cell = ls.ScaledTrainOneStepCell(function, adam(network), dynamic()).set_train()
    assert not cell(*batch(0))[1]
    assert cell.forward_state_names() == ["1.moving_mean", "1.moving_variance"]


def refuse(*args):
    raise AssertionError("Code of the user's runs.")


class Slots:
    __slots__ = ("network", "without_value")
    __getattr__ = refuse

    def __init__(self, network):
        self.network = network


class Attributes:
    __class__ = property(refuse)
    __getattr__ = __getattribute__ = refuse

    def __init__(self, network):
        self.network = network


class OwnList(list):
    __iter__ = __len__ = __getitem__ = refuse


class OwnTuple(tuple):
    __slots__ = ()
    __iter__ = __len__ = __getitem__ = refuse


class OwnDict(dict):
    __iter__ = __len__ = __getitem__ = items = keys = values = refuse


class Key(enum.Enum):
    NETWORK = 1
    __str__ = __format__ = __repr__ = refuse


class Callable:
    __call__ = __getattr__ = refuse

    def __init__(self, network):
        self.network = network


class Methods:
    def __init__(self, network):
        self.network = network

    def forward(self, *inputs):
        return self.network(*inputs)


HELD = {
    "slots": Slots,
    "attributes": Attributes,
    "namespace": lambda network: types.SimpleNamespace(network=network),
    "list": lambda network: OwnList([network]),
    "tuple": lambda network: OwnTuple([network]),
    "dict": lambda network: OwnDict({"network": network}),
    "key": lambda network: {Key.NETWORK: network},
    "callable": Callable,
}


@pytest.mark.parametrize("name", HELD)
def test_no_code_of_the_users_runs_while_a_cell_is_built(mode, name):
    network = regression()
    held = HELD[name](network)

    def forward(x, y):
        return held(x, y)

    for function in (held, forward) if name == "callable" else (forward,):
        cell = ls.ScaledTrainOneStepCell(function, adam(network), dynamic()).set_train()
        assert network.training
        assert cell.forward_state_names() == ["1.moving_mean", "1.moving_variance"]
        network.set_train(False)


def take_all(*cells_and_inputs):
    *cells, x, y = cells_and_inputs
    return sum(cell(x, y) for cell in cells)


@quick_in_pynative_mode
def test_what_a_partial_binds_is_reached(mode):
    networks = [regression(i, f"network_{i}.") for i in range(3)]
    of_a_method = functools.partial(Methods(networks[0]).forward, networks[1])
    for function, count in ((functools.partial(take_all, *networks), 3), (of_a_method, 2)):
        cell = ls.ScaledTrainOneStepCell(function, adam(nn.CellList(networks[:count])), dynamic())
        assert len(cell.forward_state_names()) == 2 * count
