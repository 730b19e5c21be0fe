"""Wrong arguments: a TypeError or ValueError at construction that names the argument and the value."""

from functools import partial

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.networks import Linear

from ms_lossscale import (
    DynamicLossScale,
    FixedLossScale,
    ScaledTrainOneStepCell,
    ScheduledLossScale,
    build_train_network,
)

INF, NAN = float("inf"), float("nan")


def check_refused(construct, error, *words):
    """Asserts that `construct()` raises the error, and that its message names the words."""
    with pytest.raises(error) as raised:
        construct()
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in the message: {raised.value}"


def sgd(network, **keywords):
    return nn.SGD(network.trainable_params(), learning_rate=0.01, **keywords)


WRONG_SCALES = [
    (0, ValueError, "0"),
    (-1.0, ValueError, "-1.0"),
    (INF, ValueError, "inf"),
    (-INF, ValueError, "-inf"),
    (NAN, ValueError, "nan"),
    (1e300, ValueError, "1e+300"),
    (1e-45, ValueError, "1e-45"),
    (True, TypeError, "True"),
    (np.bool_(True), TypeError, "True"),
    ("1024", TypeError, "'1024'"),
    (1j, TypeError, "1j"),
    ([1024], TypeError, "[1024]"),
]


class TestLossScales:
    @pytest.mark.parametrize("value, error, shown", [*WRONG_SCALES, (None, TypeError, "None")])
    def test_a_scale(self, value, error, shown):
        loss_scale = DynamicLossScale()
        for construct, words in (
            (lambda: FixedLossScale(value), ("FixedLossScale", "'loss_scale'")),
            (lambda: DynamicLossScale(value), ("DynamicLossScale", "'init_loss_scale'")),
            (lambda: ScheduledLossScale([1, 2], [1.0, value]), ("'loss_scales[1]'",)),
            (lambda: loss_scale.set_loss_scale(value), ("set_loss_scale", "'value'")),
        ):
            check_refused(construct, error, *words, shown)
        assert loss_scale.get_loss_scale() == 2.0**16

    @pytest.mark.parametrize("value, error, shown", WRONG_SCALES)
    def test_of_a_training_cell(self, value, error, shown):
        network = Linear()
        check_refused(lambda: ScaledTrainOneStepCell(network, sgd(network), value), error, "'loss_scale'", shown)

    @pytest.mark.parametrize("value, error, shown", [(1, TypeError, "1"), (None, TypeError, "None")])
    def test_drop_overflow_update(self, value, error, shown):
        check_refused(lambda: FixedLossScale(8.0, value), error, "'drop_overflow_update'", shown)
        check_refused(lambda: ScheduledLossScale([1], [8.0], value), error, "'drop_overflow_update'", shown)

    @pytest.mark.parametrize(
        "keyword, wrong_values, wrong_types",
        [
            ("scale_factor", (1.0, 0.5, -2.0, INF, NAN), (True, "2")),
            ("scale_window", (0, -5, 2**31), (2.5, 2.0, True)),
            ("backoff_factor", (0.0, 1.0, 2.0, -0.5, NAN), ("0.5",)),
            ("hysteresis", (0,), (1.5, True)),
            ("min_loss_scale", (0.0, -1.0, NAN), ()),
            ("max_loss_scale", (INF,), (None,)),
        ],
    )
    def test_dynamic(self, keyword, wrong_values, wrong_types):
        for error, values in ((ValueError, wrong_values), (TypeError, wrong_types)):
            for value in values:
                shown = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
                words = "DynamicLossScale", f"'{keyword}'", shown
                check_refused(partial(DynamicLossScale, **{keyword: value}), error, *words)

    def test_a_floor_above_the_ceiling(self):
        check_refused(
            lambda: DynamicLossScale(8.0, min_loss_scale=16.0, max_loss_scale=4.0),
            ValueError,
            "'min_loss_scale'",
            "'max_loss_scale'",
            "16",
            "4",
        )

    @pytest.mark.parametrize("init, written", [(0.5, "0.5"), (2.0**25, "2**25")])
    def test_an_initial_scale_outside_the_bounds(self, init, written):
        check_refused(lambda: DynamicLossScale(init), ValueError, "'init_loss_scale'", f"got {written}", "2**24")

    @pytest.mark.parametrize(
        "milestone, loss_scales, error, words",
        [
            ([2, 2], [1.0, 2.0], ValueError, ["'milestone'", "increase", "2"]),
            ([5, 3], [1.0, 2.0], ValueError, ["'milestone'", "increase", "5", "3"]),
            ([0, 3], [1.0, 2.0], ValueError, ["milestone[0]", "0"]),
            ([1.5, 3], [1.0, 2.0], TypeError, ["milestone[0]", "1.5"]),
            ([1, True], [1.0, 2.0], TypeError, ["milestone[1]", "True"]),
            ([1, 2, 3], [1.0, 2.0], ValueError, ["'milestone'", "'loss_scales'", "3", "2"]),
            ([1], [1.0, 2.0], ValueError, ["'milestone'", "'loss_scales'", "1", "2"]),
            ([], [], ValueError, ["'milestone'"]),
            (3, [1.0], TypeError, ["'milestone'", "3"]),
            ([3], 1.0, TypeError, ["'loss_scales'", "1.0"]),
            ("3", [1.0], TypeError, ["'milestone'", "'3'"]),
        ],
    )
    def test_schedule(self, milestone, loss_scales, error, words):
        check_refused(lambda: ScheduledLossScale(milestone, loss_scales), error, "ScheduledLossScale", *words)


class WantsOverflow(nn.SGD):
    """As AdamWeightDecayForBert of MindSpore's models does."""

    def construct(self, gradients, overflow, momentum=None, *, step):
        return super().construct(gradients)


class ReciprocalScale(nn.Optimizer):
    """As mindcv's AdamW and Lion: it divides by a loss scale, but says that its `loss_scale` is 1."""

    def __init__(self, params, loss_scale):
        super().__init__(0.01, params)
        self.reciprocal_scale = Tensor(1.0 / loss_scale)

    def construct(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients):
            ops.assign_add(parameter, -0.01 * self.reciprocal_scale * gradient)


class HoldsOthers(nn.Cell):
    """As the FreezeOpt of mindspore.boost."""

    def __init__(self, optimizer):
        super().__init__()
        self.opts = nn.CellList([optimizer])
        self.parameters = optimizer.parameters


class NoParameters(nn.Cell):
    def construct(self, gradients):
        return gradients


class TestOptimizers:
    def test_no_cell(self):
        check_refused(lambda: ScaledTrainOneStepCell(Linear(), "adam"), TypeError, "'optimizer'", "'adam'")

    def test_a_cell_without_parameters(self):
        check_refused(
            lambda: ScaledTrainOneStepCell(Linear(), NoParameters()), ValueError, "'optimizer'", "NoParameters"
        )

    def test_one_that_holds_others_and_cannot_be_called(self):
        network = Linear()
        optimizer = HoldsOthers(sgd(network))
        words = ("'optimizer'", "HoldsOthers has no 'construct'", "Pass one of them")
        check_refused(lambda: ScaledTrainOneStepCell(network, optimizer), ValueError, *words)

    @pytest.mark.parametrize("make", [nn.SGD, nn.Adam, nn.RMSProp], ids=lambda make: make.__name__)
    def test_one_with_a_loss_scale_of_its_own(self, make):
        network = Linear()
        optimizer = make(network.trainable_params(), learning_rate=0.01, loss_scale=1024.0)
        words = ("'optimizer'", make.__name__, "1024", "loss_scale=1.0")
        check_refused(lambda: ScaledTrainOneStepCell(network, optimizer), ValueError, *words)

    def test_one_that_hides_it_inside_of_another(self):
        network = Linear()
        optimizer = nn.LARS(sgd(network, loss_scale=512.0))
        check_refused(lambda: ScaledTrainOneStepCell(network, optimizer), ValueError, "'optimizer'", "LARS", "512")

    def test_one_that_shows_only_its_reciprocal(self):
        network = Linear()
        optimizer = ReciprocalScale(network.trainable_params(), 1024.0)
        assert optimizer.loss_scale == 1.0
        words = ("'optimizer'", "ReciprocalScale", "1024")
        check_refused(lambda: ScaledTrainOneStepCell(network, optimizer), ValueError, *words)

    def test_one_that_wants_more_than_gradients(self):
        network = Linear()
        optimizer = WantsOverflow(network.trainable_params(), learning_rate=0.01)
        words = ("'optimizer'", "WantsOverflow", "'overflow', 'step'")
        check_refused(lambda: ScaledTrainOneStepCell(network, optimizer), ValueError, *words)

    def test_one_that_owns_the_parameters_of_another_network(self):
        network, stranger = Linear(), Linear()
        stranger.weight.name = "stranger.weight"
        check_refused(lambda: ScaledTrainOneStepCell(network, sgd(stranger)), ValueError, "SGD", "stranger.weight")

    def test_one_that_owns_a_parameter_of_the_same_name_in_another_network(self):
        check_refused(lambda: ScaledTrainOneStepCell(Linear(), sgd(Linear())), ValueError, "SGD", "weight")


class TestNetworks:
    @pytest.mark.parametrize("value, shown", [(None, "None"), ("net", "'net'"), (Linear, "Linear"), (len, "len")])
    def test_no_cell(self, value, shown):
        check_refused(lambda: ScaledTrainOneStepCell(value, sgd(Linear())), TypeError, "'network'", shown)

    def test_two_parameters_of_one_name(self):
        class Twins(nn.Cell):
            def __init__(self):
                super().__init__(auto_prefix=False)
                self.one = Linear()
                self.two = Linear()
                self.one.update_parameters_name("", False)

            def construct(self, x, y):
                return self.one(x, y) + self.two(x, y)

        network = Twins()
        network.one.weight.name = network.two.weight.name = "twin.weight"
        optimizer = nn.SGD([network.one.weight], learning_rate=0.01)
        check_refused(lambda: ScaledTrainOneStepCell(network, optimizer), ValueError, "name", "twin.weight")

    def test_a_parameter_with_the_name_of_one_of_ours(self):
        network = Linear()
        network.weight.name = "loss_scale.scale_value"
        check_refused(
            lambda: ScaledTrainOneStepCell(network, sgd(network)), ValueError, "name", "loss_scale.scale_value"
        )


class TestOtherArguments:
    @pytest.mark.parametrize(
        "keyword, value, shown",
        [
            ("has_aux", 1, "1"),
            ("has_aux", None, "None"),
            ("after_update", print, "print"),
            ("forward_state", 3, "3"),
            ("forward_state", [Tensor(1.0)], "Tensor"),
            ("overflow_detector", nn.ReLU(), "ReLU"),
            ("overflow_detector", "gradients", "str"),
            ("overflow_detector", True, "bool"),
        ],
    )
    def test_of_the_wrong_type(self, keyword, value, shown):
        network = Linear()
        check_refused(
            lambda: ScaledTrainOneStepCell(network, sgd(network), **{keyword: value}),
            TypeError,
            "ScaledTrainOneStepCell",
            f"'{keyword}'",
            shown,
        )

    def test_an_unknown_keyword(self):
        network = Linear()
        check_refused(lambda: ScaledTrainOneStepCell(network, sgd(network), has_ax=True), TypeError, "has_ax")
        check_refused(lambda: build_train_network(network, sgd(network), has_ax=True), ValueError, "has_ax")


class Lookup(nn.Cell):
    """The gradient of its table is a RowTensor."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingLookup(6, 2, sparse=True)

    def construct(self, indices):
        return self.embedding(indices).sum()


def test_sparse_gradients_are_refused():
    network = Lookup()
    check_refused(
        lambda: ScaledTrainOneStepCell(network, sgd(network), DynamicLossScale()),
        ValueError,
        "'ScaledTrainOneStepCell'",
        "has a 'EmbeddingLookup'",
        "nn.Embedding ",
    )
