"""Every wrong argument of the cells for several networks is refused, in words that say what would be right."""

import types

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.gan_networks import (
    ClipWeights,
    GanLosses,
    TupleOf,
    WithAux,
    generator_and_discriminator,
    renamed,
    two_losses,
)
from support.networks import Linear

from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, FiniteGradients, SimultaneousTrainOneStepCell

BOTH = pytest.mark.parametrize("make", [SimultaneousTrainOneStepCell, AlternatingTrainOneStepCell])


class Measure(nn.Cell):
    """Measures the first gradient, for an update rule."""

    def __init__(self):
        super().__init__()
        self.norm = Parameter(Tensor(0.0), name="measured.norm", requires_grad=False)
        self.zero = Tensor(0.0)

    def construct(self, grads):
        ops.assign(self.norm, ops.ReduceMax()(ops.abs(grads[0])))
        return grads

    def forget(self):
        return ops.assign(self.norm, self.zero)


class Measured(DynamicLossScale):
    """Would look at what its transform has measured."""

    def __init__(self):
        super().__init__()
        self.measure = Measure()


class Holds(FiniteGradients):
    def __init__(self, parameter):
        super().__init__()
        self.held = parameter


class Helper:
    """Is no Cell."""

    def __init__(self, held):
        self.held = held


def pair():
    return [renamed(f"{i}.", Linear(seed=i)) for i in range(2)]


def sgd(networks):
    return [nn.SGD(network.trainable_params(), learning_rate=0.1) for network in networks]


def cell_with(make, **arguments):
    networks = pair()
    return make(networks, sgd(networks), **arguments)


@BOTH
class TestNetworksAndOptimizers:
    @pytest.mark.parametrize("count", [1, 3])
    def test_of_different_numbers(self, make, count):
        networks = pair()
        others = [renamed(f"{i}.", Linear()) for i in range(count)]
        with pytest.raises(ValueError, match=f"must have the same length, but got 2 and {count}"):
            make(networks, sgd(others))
        with pytest.raises(ValueError, match=f"must have the same length, but got {count} and 2"):
            make(others, sgd(networks))

    def test_none_at_all(self, make):
        with pytest.raises(ValueError, match="'networks' must not be empty"):
            make([], sgd(pair()))
        with pytest.raises(ValueError, match="'optimizers' must not be empty"):
            make(pair(), [])

    def test_an_optimizer_that_is_not_in_a_list(self, make):
        networks = pair()
        with pytest.raises(TypeError, match="'optimizers' must be a list of Cells"):
            make(networks, sgd(networks)[0])

    @pytest.mark.parametrize("wrong", [None, 3, "network", nn.Dense, len, lambda x: x])
    def test_what_is_no_cell(self, make, wrong):
        networks = pair()
        if not isinstance(wrong, types.LambdaType):
            with pytest.raises(TypeError, match=r"'networks\[1\]' must be a Cell or a function"):
                make([networks[0], wrong], sgd(networks))
        with pytest.raises(TypeError, match=r"'optimizers\[0\]' must be a Cell"):
            make(networks, [wrong, sgd(networks)[1]])

    def test_one_parameter_owned_by_two_optimizers(self, make):
        networks = pair()
        weights = [*networks[0].trainable_params(), *networks[1].trainable_params()]
        optimizers = [nn.SGD(networks[0].trainable_params()), nn.Momentum(weights, 0.1, 0.9)]
        with pytest.raises(ValueError, match=r"'0\.weight' belongs to the SGD and to the Momentum"):
            make(networks, optimizers)

    def test_parameters_that_the_networks_share_and_no_optimizer_owns_are_fine(self, make):
        generator, discriminator = generator_and_discriminator()
        frozen = renamed("frozen.", Linear())
        losses = two_losses(generator, discriminator)
        for loss in losses:
            loss.perceptual = frozen
        assert "frozen.weight" in make(losses, sgd([generator, discriminator])).parameters_dict()


@BOTH
class TestNetworkInputs:
    @pytest.mark.parametrize("wrong", [[(0,)], [(0,), (1,), (0,)], []])
    def test_not_one_for_each_network(self, make, wrong):
        with pytest.raises(ValueError, match=f"of the 2 networks, but got {len(wrong)}"):
            cell_with(make, network_inputs=wrong)

    @pytest.mark.parametrize("wrong", [1, "01", (0, 1), [0, 1], [(0,), 1], {0: (0,)}, [(0,), None]])
    def test_no_list_of_tuples(self, make, wrong):
        with pytest.raises(TypeError, match=r"'network_inputs' must be None or a list.*\[\(0, 1\), \(1,\)\] say"):
            cell_with(make, network_inputs=wrong)

    @pytest.mark.parametrize("position", [0.0, 1.5, True, "0", None])
    def test_positions_that_are_no_integers(self, make, position):
        with pytest.raises(TypeError, match="integers >= 0"):
            cell_with(make, network_inputs=[(0, 1), (0, position)])

    def test_has_aux_has_one_entry_for_each_network(self, make):
        with pytest.raises(ValueError, match="'has_aux', if it is a list, must have one entry for each of the 2"):
            cell_with(make, has_aux=[True])

    def test_negative_positions(self, make):
        with pytest.raises(ValueError, match="counted from the first input, but got -1"):
            cell_with(make, network_inputs=[(0, 1), (0, -1)])


class TestSimultaneousOnly:
    def test_a_list_of_after_updates(self):
        networks = pair()
        clip = ClipWeights(networks[0].trainable_params(), 1.0)
        with pytest.raises(TypeError, match="'after_update' must be a Cell"):
            SimultaneousTrainOneStepCell(networks, sgd(networks), after_update=[clip, None])

    def test_a_list_of_has_aux_for_one_network(self):
        networks = pair()
        with pytest.raises(TypeError, match="True or False with one network that returns all losses"):
            SimultaneousTrainOneStepCell(TupleOf(*networks), sgd(networks), has_aux=[True, False])


class TestAlternatingOnly:
    def test_a_tuple_of_losses(self):
        networks = generator_and_discriminator()
        with pytest.raises(TypeError, match="'networks' must be a list of Cells"):
            AlternatingTrainOneStepCell(GanLosses(*networks), sgd(networks))

    @pytest.mark.parametrize(
        "wrong, error, message",
        [
            ((1,), ValueError, "one entry for each of the 2 networks, but got 1"),
            ((1, 1, 1), ValueError, "one entry for each of the 2 networks, but got 3"),
            ((), ValueError, "one entry for each of the 2 networks, but got 0"),
            ((1, 0), ValueError, r"'every\[1\]' must be >= 1"),
            ((-5, 1), ValueError, r"'every\[0\]' must be >= 1"),
            ((1, 2**31), ValueError, r"'every\[1\]' must be >= 1"),
            ((1, 2.0), TypeError, r"'every\[1\]' must be an integer"),
            ((1, 1.5), TypeError, r"'every\[1\]' must be an integer"),
            ((True, 1), TypeError, r"'every\[0\]' must be an integer"),
            ((1, "2"), TypeError, r"'every\[1\]' must be an integer"),
            ((1, None), TypeError, r"'every\[1\]' must be an integer"),
            (2, TypeError, "'every' must be a list or tuple, but got 2"),
            ("12", TypeError, "'every' must be a list or tuple, but got '12'"),
            ({0: 1, 1: 2}, TypeError, "'every' must be a list or tuple"),
            (np.array([1, 2]), TypeError, "'every' must be a list or tuple"),
        ],
    )
    def test_every(self, wrong, error, message):
        with pytest.raises(error, match=message):
            cell_with(AlternatingTrainOneStepCell, every=wrong)
        cell = cell_with(AlternatingTrainOneStepCell, every=(1, 5))
        with pytest.raises(error, match=message):
            cell.set_every(wrong)
        # A refused value changes nothing.
        np.testing.assert_array_equal(cell.parameters_dict()["alternation.every"].asnumpy(), [1, 5])

    def test_aux_of_a_network_that_does_not_take_part(self):
        networks = pair()
        losses = [WithAux(network) for network in networks]
        with pytest.raises(ValueError, match=r"'every' must be 1 for a network with aux.*got 2 for network 1"):
            AlternatingTrainOneStepCell(losses, sgd(networks), every=(1, 2), has_aux=True)
        cell = AlternatingTrainOneStepCell([losses[0], networks[1]], sgd(networks), every=(1, 1), has_aux=[True, False])
        with pytest.raises(ValueError, match=r"'every' must be 1 for a network with aux.*got 2 for network 0"):
            cell.set_every((2, 1))

    @pytest.mark.parametrize("length", [0, 1, 3])
    def test_loss_scales_of_the_wrong_length(self, length):
        loss_scales = [DynamicLossScale() for _ in range(length)]
        with pytest.raises(ValueError, match=f"'loss_scale'.*one entry for each of the 2 networks, but got {length}"):
            cell_with(AlternatingTrainOneStepCell, loss_scale=loss_scales)

    def test_the_same_loss_scale_twice(self):
        loss_scale = DynamicLossScale()
        with pytest.raises(ValueError, match=r"must not hold the same Cell twice.*copied for each"):
            cell_with(AlternatingTrainOneStepCell, loss_scale=[loss_scale, loss_scale])

    @pytest.mark.parametrize("holds", ["gradient_transforms", "after_update", "overflow_detector", "networks"])
    def test_one_that_is_copied_and_whose_state_something_else_holds(self, holds):
        rule, networks = Measured(), pair()
        keywords = {
            "gradient_transforms": {"gradient_transforms": [rule.measure]},
            "after_update": {"after_update": rule.measure.forget},
            "overflow_detector": {"overflow_detector": Holds(rule.measure.norm)},
            "networks": {},
        }[holds]
        if holds == "networks":
            networks[1].helper = Helper(rule)
        message = "'loss_scale' is copied for each network, but .* holds its '.*', too.*Pass a list"
        with pytest.raises(ValueError, match=message):
            AlternatingTrainOneStepCell(networks, sgd(networks), rule, **keywords)
        rules = [rule, DynamicLossScale()]
        AlternatingTrainOneStepCell(networks, sgd(networks), rules, **keywords)

    def test_one_that_shares_nothing_is_copied(self):
        rule = Measured()
        cell = cell_with(AlternatingTrainOneStepCell, loss_scale=rule, gradient_transforms=[Measure()])
        norms = [each.measure.norm for each in cell.loss_scale]
        assert len({id(norm) for norm in [*norms, rule.measure.norm]}) == 3

    @pytest.mark.parametrize("length", [0, 1, 3])
    def test_after_updates_of_the_wrong_length(self, length):
        with pytest.raises(ValueError, match=f"'after_update'.*one entry for each.*but got {length}"):
            cell_with(AlternatingTrainOneStepCell, after_update=[None] * length)

    def test_set_loss_scale(self):
        cell = cell_with(AlternatingTrainOneStepCell, loss_scale=[8.0, 4.0])
        for wrong in ([1.0], [1.0, 2.0, 3.0]):
            with pytest.raises(ValueError, match=r"'value'.*one entry for each of the 2 networks"):
                cell.set_loss_scale(wrong)
        for wrong in (0.0, float("nan"), [1.0, -1.0], [2.0, float("inf")]):
            with pytest.raises(ValueError, match="'value' must be a finite number > 0"):
                cell.set_loss_scale(wrong)
        with pytest.raises(TypeError, match="'value' must be a number"):
            cell.set_loss_scale([2.0, True])
        # A refused value changes nothing, not even the scales before the wrong one.
        assert cell.get_loss_scale() == [8.0, 4.0]
