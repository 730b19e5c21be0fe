"""Whatever refers to state, in whatever holder: it is found, and nothing of the user's is executed."""

import importlib
import sys
import types
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn
from support.holders_of_state import HOLDERS

from ms_lossscale.forward_state import find, reachable, reading
from ms_lossscale.forward_state.find import find_forward_state, may_write_inputs


class Holding(nn.Cell):
    def __init__(self, held):
        super().__init__()
        # As an ordinary attribute, whatever it is.
        object.__setattr__(self, "held", held)

    def construct(self, x):
        return x


def found_in(held):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_forward_state("cell", (Holding(held),)).names


def state():
    return Parameter(Tensor([1.0]), name="state", requires_grad=False)


@pytest.mark.parametrize("name", HOLDERS)
def test_state_in_a_holder(name):
    assert found_in(HOLDERS[name](state())) == ["unregistered_0.state"]


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(list(HOLDERS)), min_size=2, max_size=6))
def test_state_in_holders_within_holders(names):
    # MindSpore itself asks what it is given.
    assume(not any("refuses" in one and other in ("Cell", "CellList", "Model") for one, other in zip(names, names[1:])))
    held = state()
    for name in names:
        held = HOLDERS[name](held)
    # A weight that holds it counts as written where a holder has methods without source.
    assert {name.partition(".")[2] for name in found_in(held)} - {"with an attribute"} == {"state"}


PACKAGE = """
import {imported}

HELD = []


class Lazy:
    def __getattr__(self, name):
        raise AssertionError("code of others was run")

    @property
    def computed(self):
        raise AssertionError("code of others was run")


class Wrapper:
    def __init__(self, wrapped):
        self.wrapped = wrapped


def held():
    return HELD[0]


def write(state):
    state.copy_(state * 2)


LAZY = Lazy()
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Returns a function that installs a package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def install(name, imported):
        (folder / f"{name}.py").write_text(PACKAGE.format(imported=imported))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return install


class UsingPackage(nn.Cell):
    def __init__(self, package, held=None):
        super().__init__()
        self.package, self.held, self.lazy = package, held, package.LAZY
        self.weight = Parameter(Tensor([1.0]), name="weight")

    def construct(self, x):
        self.package.write(self.weight)
        return self.package.held() * self.lazy.anything * self.lazy.computed


@pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")
@pytest.mark.parametrize("imported, is_entered", [("json", False), ("mindspore.nn", True), ("package_0", True)])
def test_only_packages_that_know_mindspore_are_entered(install, imported, is_entered):
    install("package_0", "mindspore.nn as nn")
    package = install("package_1", imported)
    package.HELD.append(state())
    names = find_forward_state("cell", (UsingPackage(package),)).names
    assert names == ["weight", *["unregistered_0.state"][: int(is_entered)]]


@pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")
def test_objects_of_packages_that_do_not_know_mindspore_may_hold_state(install):
    package = install("package_1", "json")
    network = UsingPackage(package, package.Wrapper(state()))
    assert find_forward_state("cell", (network,)).names == ["weight", "unregistered_0.state"]


class WithMuchInReach(nn.Cell):
    def __init__(self):
        super().__init__()
        self.much = [[[i]] for i in range(2000)]
        self.u = state()
        self.weight = Parameter(Tensor([1.0]), name="weight")
        self.loose = types.SimpleNamespace(u=Parameter(Tensor([1.0]), name="loose", requires_grad=False))
        self.large = Parameter(Tensor([1.0, 2.0, 3.0]), name="large")

    def construct(self, x):
        return self.weight * x


@pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")
def test_the_walk_is_limited(monkeypatch):
    monkeypatch.setattr(reachable, "_LOOKS", 300)
    network = WithMuchInReach()
    with pytest.warns(RuntimeWarning, match=r"so many objects .* only the first \d+ were looked at.*forward_state="):
        assert find_forward_state("cell", (network,)).names == ["state", "unregistered_0.loose"]


@pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")
def test_the_walk_of_cells_is_not_limited(monkeypatch):
    monkeypatch.setattr(reachable, "_LOOKS", 300)
    network = WithMuchInReach()
    object.__setattr__(network, "much", [Holding([i]) for i in range(2000)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* were looked at")
        assert find_forward_state("cell", (network,)).names == ["state", "unregistered_0.loose"]


@pytest.mark.filterwarnings("ignore:.*no checkpoint has them:RuntimeWarning")
def test_what_the_reading_does_not_reach_is_doubted(monkeypatch):
    monkeypatch.setattr(reading, "_LOOKS", 1)
    monkeypatch.setattr(reading, "_LOOKS_FOR_A_CELL", 0)
    monkeypatch.setattr(find, "_FEW", 3)
    network = WithMuchInReach()
    with pytest.warns(RuntimeWarning, match="whether the forward writes large, since there is too much source to read"):
        names = find_forward_state("cell", (network,)).names
    assert names == ["state", "weight", "unregistered_0.loose"]
    assert may_write_inputs((network,))
