"""What is refused before anything is compiled: each call, the error, and words of it, which name the argument, the
value, and what to do. What only compiled code sees is in own_process/refused_by_compiled_code.py."""

import copy
import functools

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Model, Parameter, ParameterTuple, Tensor, amp, nn, ops
from mindspore import dtype as mstype
from support.gan_networks import ClipWeights, TupleOf, WithAux, renamed
from support.linear_pair import CELLS, Trained
from support.manual_training import batch as manual_batch
from support.manual_training import manual
from support.networks import Around, Linear, LinearWithBias, batch
from support.refused import refused, table
from support.training import changed, state

import ms_lossscale as ls

INF, NAN = float("inf"), float("nan")
OF_ONE = [ls.ScaledTrainOneStepCell, ls.ManualStep]
SEVERAL = [ls.SimultaneousTrainOneStepCell, ls.AlternatingTrainOneStepCell]


def sgd(network, **keywords):
    return nn.SGD(network.trainable_params(), 0.01, **keywords)


def one(loss_scale=None, network=None, optimizer=None, make=ls.ScaledTrainOneStepCell, **keywords):
    network = network or Linear()
    return make(network, optimizer or sgd(network), loss_scale, **keywords)


def pair():
    return [renamed(f"{i}.", Linear(seed=i)) for i in range(2)]


def two(make=ls.SimultaneousTrainOneStepCell, loss_scale=None, networks=None, **keywords):
    networks = networks or pair()
    return make(networks, list(map(sgd, networks)), loss_scale, **keywords)


two_with, alternating = (functools.partial(two, make) for make in SEVERAL)
DROPPED = {"gradient_accumulation_steps": 2, "drop_overflowed_calls": True}


# Loss scales.

NO_SCALES = [
    *((value, ValueError, shown) for value, shown in ((0, "0"), (-1.0, "-1"), (INF, "inf"), (NAN, "nan"))),
    *((1e300, ValueError, "1e+300"), (1e-45, ValueError, "1e-45")),
    *((True, TypeError, "True"), ("1024", TypeError, "'1024'"), ([1024], TypeError, "[1024]")),
]


@pytest.mark.parametrize("value, error, shown", NO_SCALES)
def test_what_is_no_scale(value, error, shown):
    loss_scale = ls.DynamicLossScale()
    for call, argument in (
        (lambda: ls.FixedLossScale(value), "'loss_scale'"),
        (lambda: ls.DynamicLossScale(value), "'init_loss_scale'"),
        (lambda: ls.ScheduledLossScale([1, 2], [1.0, value]), "'loss_scales[1]'"),
        (lambda: loss_scale.set_loss_scale(value), "'value'"),
        (lambda: one(value), "'loss_scale'"),
        (lambda: ls.InputGradient(Linear(), value), "'loss_scale'"),
    ):
        refused(call, error, "For '", argument, shown)
    assert loss_scale.get_loss_scale() == 2.0**16


@pytest.mark.parametrize(
    "keyword, values, of_wrong_types",
    [
        ("scale_factor", (1.0, 0.5, -2.0, INF, NAN), (True, "2")),
        ("scale_window", (0, -5, 2**31), (2.5, 2.0, True)),
        ("backoff_factor", (0.0, 1.0, -0.5, NAN), ("0.5",)),
        ("hysteresis", (0,), (1.5, True)),
        ("min_loss_scale", (0.0, -1.0, NAN), ()),
        ("max_loss_scale", (INF,), (None,)),
        ("backoff_if_loss_not_finite", (), (1,)),
    ],
)
def test_of_a_dynamic_loss_scale(keyword, values, of_wrong_types):
    for error, wrong in ((ValueError, values), (TypeError, of_wrong_types)):
        for value in wrong:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            call = functools.partial(ls.DynamicLossScale, **{keyword: value})
            refused(call, error, "Dynamic", f"'{keyword}'", shown)


class WithoutARule(ls.LossScale):
    pass


class WithAWrongRule(ls.LossScale):
    def next_scale(self, overflow):
        return overflow


class AnswersYesOrNo(ls.LossScale):
    def next_scale(self, loss_scale, overflow):
        return overflow


OF_LOSS_SCALES = [
    (lambda: ls.FixedLossScale(8.0, 1), TypeError, "'drop_overflow_update'", "1"),
    (lambda: ls.ScheduledLossScale([1], [8.0], None), TypeError, "'drop_overflow_update'", "None"),
    (lambda: ls.DynamicLossScale(min_loss_scale=16.0, max_loss_scale=4.0), ValueError, "'min_loss_scale'", "16", "4"),
    (lambda: ls.DynamicLossScale(0.5), ValueError, "'init_loss_scale'", "0.5", "2**24"),
    (lambda: ls.DynamicLossScale(2.0**25), ValueError, "'init_loss_scale'", "2**25", "2**24"),
    (lambda: ls.ScheduledLossScale([5, 3], [1.0, 2.0]), ValueError, "'milestone'", "increase", "5", "3"),
    (lambda: ls.ScheduledLossScale([0, 3], [1.0, 2.0]), ValueError, "milestone[0]", "0"),
    (lambda: ls.ScheduledLossScale([1.5, 3], [1.0, 2.0]), TypeError, "milestone[0]", "1.5"),
    (lambda: ls.ScheduledLossScale([1, 2, 3], [1.0, 2.0]), ValueError, "'milestone'", "'loss_scales'", "3", "2"),
    (lambda: ls.ScheduledLossScale([], []), ValueError, "'milestone'"),
    (lambda: ls.ScheduledLossScale(3, [1.0]), TypeError, "'milestone'", "3"),
    (lambda: ls.ScheduledLossScale([3], 1.0), TypeError, "'loss_scales'", "1.0"),
    (lambda: one(WithoutARule(8.0)), TypeError, "WithoutARule", "next_scale"),
    (lambda: one(WithAWrongRule(8.0)), TypeError, "'loss_scale'", "Define next_scale(self, loss_scale, overflow)"),
    (lambda: AnswersYesOrNo(8.0).adjust(Tensor(True)), TypeError, "must return the next step's scale"),
    (lambda: one("dynamic"), TypeError, "'loss_scale'", "'dynamic'"),
    (lambda: one([ls.DynamicLossScale()]), TypeError, "'loss_scale'"),
    (lambda: one(amp.DynamicLossScaler(2**20, 4, 50)), TypeError, "'loss_scale'", "DynamicLossScale("),
    (lambda: one(amp.StaticLossScaler(512)), TypeError, "'loss_scale'", "512"),
    (lambda: one(Tensor([1024.0])), TypeError, "'loss_scale'", "1024"),
]

# Keywords of all cells.


class WithoutACheck(ls.OverflowDetector):
    pass


def made(base, method, function):  # A Cell of a new class with the method.
    return type(f"Own{base.__name__}", (base,), {method: function})()


EMA = made(nn.Cell, "update", lambda self, weights: weights)
SPIKE = ls.NormSpike(max_norm=1.0)
# For each keyword, wrong values, and what must be in the message beside its name.
KEYWORDS = {
    "gradient_accumulation_steps": [
        *((value, ValueError, str(value)) for value in (0, -1, 2**31)),
        *((value, TypeError, str(value)) for value in (1.5, 2.0, True, "2", None, [2])),
    ],
    "clip_norm": [(0, ValueError, "0"), (-1.0, ValueError, "-1"), (NAN, ValueError, "nan"), (True, TypeError, "True")],
    "clip_value": [(0, ValueError, "0"), (-INF, ValueError, "-inf"), ("1", TypeError, "1")],
    "ema_decay": [
        *((value, ValueError, str(value)) for value in (0, 1, -0.1, 1.1, NAN)),
        *((value, TypeError, str(value)) for value in (True, "0.9")),
    ],
    "forward_state": [(3, TypeError, "3"), ([Tensor(1.0)], TypeError, "Tensor")],
    "after_update": [
        (print, TypeError, "print"),
        (nn.Dense(2, 2), TypeError, "Dense"),
        (EMA.update, TypeError, "weights"),
        (EMA, TypeError, "'construct(self)'"),
    ],
    "overflow_detector": [
        (nn.ReLU(), TypeError, "ReLU"),
        ("gradients", TypeError, "str"),
        (ls.OverflowDetector(), TypeError, "must define 'construct(self, grads)'"),
        (WithoutACheck(), TypeError, "WithoutACheck"),
        (made(ls.OverflowDetector, "construct", lambda self, grads, scale: grads), TypeError, "OwnOverflowDetector"),
    ],
    "gradient_transforms": [
        (nn.ReLU(), TypeError, "[cell]"),
        ([nn.ReLU], TypeError, "Cell"),
        ([nn.MSELoss()], TypeError, "MSELoss"),
        ([nn.Cell()], TypeError, "'construct(self, grads)'"),
    ],
    "skip_conditions": [
        (SPIKE, TypeError, "list"),
        ([1.0], TypeError, "SkipCondition"),
        ([SPIKE, nn.ReLU()], TypeError, "ReLU"),
        ([ls.SkipCondition()], TypeError, "construct(self, loss, norm)"),
        ([made(ls.SkipCondition, "construct", lambda self, loss: loss)], TypeError, "OwnSkipCondition"),
        ([SPIKE] * 2, ValueError, "twice"),
    ],
    **{name: [(1, TypeError, "1"), (None, TypeError, "None")] for name in ("gradients_reduced", "has_aux")},
    "weighted": [(1, TypeError, "1")],
    "max_retries": [(-1, ValueError, "-1"), (1.0, TypeError, "1.0"), (True, TypeError, "True")],
}
ONLY_OF_TRAINING_CELLS = ("has_aux", "weighted", "max_retries")


@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize("make", [ls.ScaledTrainOneStepCell, *SEVERAL, ls.ManualStep])
def test_a_keyword(make, keyword):
    for value, error, word in KEYWORDS[keyword]:
        build = two if make in SEVERAL else one
        if make is ls.ManualStep and keyword in ONLY_OF_TRAINING_CELLS:
            error, word = TypeError, keyword
        call = functools.partial(build, make=make, loss_scale=ls.DynamicLossScale(), **{keyword: value})
        refused(call, error, make.__name__, word)


OF_KEYWORDS = [
    *((lambda name=name: one(make=ls.ManualStep, name=name), TypeError, "'name' must be a str that is not empty")
      for name in ("", 3, b"critic", ["critic"])),
    (lambda: two(every=(1, 2)), TypeError, "every"),
    (lambda: one(make=ls.ManualStep, network_inputs=[(0,)]), TypeError, "network_inputs"),
    (lambda: one(clip_norm=1.0, clip_value=0.5), ValueError, "'clip_norm'", "'clip_value'", "1.0", "0.5"),
    (lambda: two(clip_norm=1.0, clip_value=[None, 0.5]), ValueError, "'clip_norm'", "'clip_value'"),
    (lambda: alternating(clip_norm=[None, 1.0], clip_value=[None, 0.5]), ValueError, "'clip_norm'", "'clip_value'"),
    *((lambda given=given: one(given, max_retries=1), ValueError, "'max_retries'", "never backs off")
      for given in (None, 128.0, ls.FixedLossScale(8.0, False), ls.ScheduledLossScale([2, 4], [8, 4]))),
    (lambda: two(loss_scale=[ls.DynamicLossScale(), 128.0], max_retries=1), ValueError, "'max_retries'"),
    *((lambda build=build, given=given: build(given, **DROPPED), ValueError, "'drop_overflowed_calls' must be False",
       "True and a loss scale with drop_overflow_update=False" if given else "True and no loss scale")
      for build in (one, functools.partial(one, make=ls.ManualStep), two_with, alternating)
      for given in (None, ls.FixedLossScale(8.0, False))),
    (lambda: alternating([8.0, None], **DROPPED), ValueError, "'drop_overflowed_calls'", "loss scale that checks"),
    (lambda: ls.LossScaleMonitor(every=10), TypeError, "'every'"),
    (lambda: ls.NormSpike(), ValueError, "'max_norm'", "'z_score'"),
    (lambda: ls.NormSpike(6.0), TypeError, "positional"),
    (lambda: ls.NormSpike(max_norm=0), ValueError, "'max_norm'", "0"),
    (lambda: ls.NormSpike(max_norm="1"), TypeError, "'max_norm'"),
    (lambda: ls.NormSpike(z_score=NAN), ValueError, "'z_score'", "nan"),
    (lambda: ls.NormSpike(z_score=1.0, window=0), ValueError, "'window'", "0"),
    (lambda: ls.NormSpike(z_score=1.0, window=2.5), TypeError, "'window'", "2.5"),
]  # fmt: skip


# Networks and optimizers.


class ReciprocalScale(nn.Optimizer):
    """As mindcv's AdamW and Lion: it divides by a loss scale, but says that its `loss_scale` is 1."""

    def __init__(self, params, loss_scale):
        super().__init__(0.01, params)
        self.reciprocal_scale = Tensor(1.0 / loss_scale)


class HoldsOthers(nn.Cell):  # As the FreezeOpt of mindspore.boost.
    def __init__(self, weights):
        super().__init__()
        self.opts, self.parameters = nn.CellList([nn.SGD(weights)]), ParameterTuple(weights)


class TwoOptimizers(nn.Cell):  # Two optimizers for one network, whose states have the same names.
    def __init__(self, weights):
        super().__init__(auto_prefix=False)
        self.first, self.second = (nn.Momentum([each], 0.1, 0.9) for each in weights)
        self.parameters = ParameterTuple(weights)

    def construct(self, grads):
        return self.first(grads[:1]), self.second(grads[1:])


def named(name="stranger.weight"):
    network = Linear()
    network.weight.name = name
    return network


def with_optimizer(make, network=None, **keywords):
    network = network or Linear()
    return one(network=network, optimizer=make(network.trainable_params(), **keywords))


def nothing_reached(x, y):
    return ops.square(x - y).mean()


class WithTarget(nn.Cell):  # A network and its frozen copy, whose names are equal.
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.net, self.target = (nn.BatchNorm1d(2) for _ in range(2))
        for weight in self.target.trainable_params():
            weight.requires_grad = False

    def construct(self, x, y):
        return ops.square(self.net(x) - ops.stop_gradient(self.target(y))).mean()


def soft_target(network):  # Moves a copy of the network, whose names are equal.
    target = copy.deepcopy(network)
    weights, targets = (ParameterTuple(each.get_parameters()) for each in (network, target))

    class Soft(nn.Cell):
        def construct(self):
            for weight, its in zip(weights, targets):
                ops.assign(its, 0.5 * its + 0.5 * weight)

    soft = Soft(auto_prefix=False)
    soft.targets = targets
    return soft


def with_soft_target(make):
    network = Linear()
    return one(8.0, network, make=make, after_update=soft_target(network))


OF_NETWORKS = [
    (lambda: ls.ScaledTrainOneStepCell(Linear(), "adam"), TypeError, "'optimizer'", "'adam'"),
    (lambda: one(optimizer=nn.ReLU()), ValueError, "an optimizer must have parameters", "ReLU"),
    (lambda: with_optimizer(HoldsOthers), ValueError, "an optimizer must be one that can be called", "HoldsOthers"),
    (lambda: with_optimizer(nn.SGD, learning_rate=0.1, loss_scale=512.0), ValueError, "SGD", "512", "loss_scale=1.0"),
    (lambda: with_optimizer(nn.Adam, loss_scale=512.0), ValueError, "an optimizer", "Adam", "512", "loss_scale=1.0"),
    (lambda: with_optimizer(lambda its: nn.LARS(nn.SGD(its, 0.1, loss_scale=512.0))), ValueError, "LARS", "512"),
    (lambda: with_optimizer(ReciprocalScale, loss_scale=1024.0), ValueError, "ReciprocalScale", "1024"),
    (lambda: one(optimizer=sgd(named())), ValueError, "SGD", "stranger.weight"),
    (lambda: one(optimizer=sgd(Linear())), ValueError, "SGD", "weight"),
    (lambda: with_optimizer(TwoOptimizers, LinearWithBias()), ValueError, "'global_step' already exists"),
    # The gradient of its table is a RowTensor.
    (lambda: one(network=nn.EmbeddingLookup(6, 2, sparse=True)), ValueError, "EmbeddingLookup", "nn.Embedding"),
    (lambda: one(network=named("loss_scale.scale_value")), ValueError, "name", "loss_scale.scale_value"),
    *((lambda make=make: with_soft_target(make), ValueError, "name of its own", "two are named 'weight'")
      for make in OF_ONE),
    *((lambda make=make: one(8.0, WithTarget(), make=make), ValueError, "name of its own", "two are named 'mean'")
      for make in OF_ONE),
    (lambda: ls.ScaledTrainOneStepCell(None, sgd(Linear())), TypeError, "'network", "a Cell or a", "None"),
    *((lambda value=value, make=make: make(value, sgd(Linear())), TypeError, "'network", "a Cell or a", shown)
      for make in OF_ONE for value, shown in (("net", "'net'"), (Linear, "Linear"), (len, "len"))),
    *((lambda make=make: make(nothing_reached, sgd(named("its.weight"))), ValueError, "its.weight", "nothing_reached")
      for make in OF_ONE),
    (lambda: ls.ScaledTrainOneStepCell(Linear(), ls.DynamicLossScale(), sgd(Linear())), TypeError, "'loss_scale'"),
    (lambda: ls.ManualStep([], sgd(Linear())), ValueError, "'networks' must not be empty"),
    (lambda: ls.ManualStep(Linear(), []), ValueError, "'optimizers' must not be empty"),
    (lambda: ls.ManualStep(Linear(), "adam"), TypeError, "'optimizers[0]' must be a Cell", "'adam'"),
    (lambda: one(network=named(), optimizer=sgd(Linear()), make=ls.ManualStep), ValueError, "SGD", "weight"),
    (lambda: one([1.0, 2.0], make=ls.ManualStep), ValueError, "'loss_scale'", "2"),
    (lambda: ls.InputGradient(None), TypeError, "'network' must be a Cell"),
    (lambda: ls.InputGradient([Linear()]), TypeError, "'network' must be a Cell"),
    (lambda: ls.InputGradient(Linear(), amp.DynamicLossScaleManager()), TypeError, "'loss_scale' must be"),
    (lambda: ls.InputGradient(Linear(), Tensor(8.0)), TypeError, "'loss_scale' must be"),
]  # fmt: skip


# A training cell in another place.


def built_with(manager):
    network = Linear()
    return ls.build_train_network(network, sgd(network), loss_scale_manager=manager)


OF_CASTS = "must stay in float32", "Cast the network before"
OF_OTHER_PLACES = [
    *((lambda make=make: make().to_float(mindspore.float16), ValueError, *OF_CASTS)
      for make in (one, lambda: one(make=ls.ManualStep), lambda: one(8.0).loss_scale, ls.FiniteGradients)),
    (lambda: Around(one()).to_float(mindspore.bfloat16), ValueError, *OF_CASTS),
    (lambda: amp.auto_mixed_precision(one(), "O2"), ValueError, *OF_CASTS),
    (lambda: Model(one(), optimizer=sgd(Linear())), ValueError, "which trains by itself", "without an optimizer"),
    (lambda: nn.TrainOneStepCell(one(), sgd(Linear())), ValueError, "which trains by itself"),
    (lambda: copy.deepcopy(one()), RuntimeError, "A ScaledTrainOneStepCell can't be copied", "load_state_dict"),
    (lambda: one(128.0).find_loss_scale(*batch()), RuntimeError, "'find_loss_scale()'", "moves by itself"),
    *((lambda its=its: one(ls.DynamicLossScale()).find_loss_scale(*its), TypeError, "'Linear', takes (x, y)", shown)
      for its, shown in (((), "gets 0 of 0"), ((None,), "gets 1 of 1"))),
    *((lambda kind=kind, name=name: getattr(Trained(kind).cell, name)(), RuntimeError, keyword) for kind in CELLS
      for name, keyword in (("grad_norm", "clip_norm"), ("ema_parameters", "ema_decay"), ("ema_weights", "ema_decay"))),
    (lambda: ls.build_train_network(Linear(), sgd(Linear()), boost_level="O1"), ValueError, "boost_level", "O1"),
    (lambda: ls.build_train_network(Linear(), sgd(Linear()), level="O4"), ValueError, "level", "O4"),
    (lambda: ls.build_train_network(Linear(), sgd(Linear()), loss_scale=1024), ValueError, "loss_scale"),
    (lambda: ls.build_train_network(Linear(), sgd(Linear()), has_ax=True), ValueError, "has_ax"),
    (lambda: ls.build_train_network(Linear(), sgd(Linear()), cast_model_type=mstype.int32), TypeError, "cast_mod"),
    (lambda: built_with("dynamic"), TypeError, "loss_scale", "dynamic"),
]  # fmt: skip

# Several networks.


class Measure(nn.Cell):  # Would measure the gradients, for an update rule.
    def __init__(self):
        super().__init__()
        self.norm = Parameter(Tensor(0.0), name="measured.norm", requires_grad=False)

    def construct(self, grads):
        return grads


class Penalised(Linear):
    def __init__(self, loss_scale):
        super().__init__()
        self.slope = ls.InputGradient(nn.ReLU(), loss_scale)


def with_optimizers(make, change):
    networks = pair()
    return make(networks, change(list(map(sgd, networks))))


def owned_by_two(optimizers):
    weights = [weight for its in optimizers for weight in its.parameters]
    return [optimizers[0], nn.Momentum(weights, 0.1, 0.9)]


def of_a_tuple(**keywords):
    networks = pair()
    return ls.SimultaneousTrainOneStepCell(TupleOf(*networks), list(map(sgd, networks)), **keywords)


def copied(rule):
    return lambda: ls.AlternatingTrainOneStepCell([Penalised(rule)], [sgd(Linear())], rule)


def of_each(make):
    one_for_each = "one entry for each of the 2 networks"
    shared = ls.DynamicLossScale()
    return [
        (lambda: make(pair(), list(map(sgd, pair()))[:1]), ValueError, "same length", "2", "1"),
        (lambda: make([], list(map(sgd, pair()))), ValueError, "'networks' must not be empty"),
        (lambda: make(pair(), []), ValueError, "'optimizers' must not be empty"),
        (lambda: with_optimizers(make, lambda its: its[0]), TypeError, "'optimizers' must be a list"),
        (lambda: with_optimizers(make, lambda its: [None, its[1]]), TypeError, "'optimizers[0]' must be a Cell"),
        (lambda: make([Linear(), 3], [sgd(Linear())] * 2), TypeError, "'networks[1]' must be a Cell or a function"),
        (lambda: with_optimizers(make, owned_by_two), ValueError, "'0.weight' belongs to the SGD and to the Momentum"),
        (lambda: with_optimizers(make, lambda its: its[::-1]), ValueError, "optimizers[0]", "1.weight", "networks[0]"),
        (lambda: two(make, networks=[Linear(), Linear()]), ValueError, "name", "'weight'"),
        (lambda: two(make, 8.0, [WithTarget(), Linear()]), ValueError, "name of its own", "two are named 'mean'"),
        (lambda: two(make, loss_scale=[ls.DynamicLossScale()]), ValueError, "'loss_scale'", one_for_each),
        (lambda: two(make, loss_scale=[shared, shared]), ValueError, "same Cell twice"),
        (lambda: two(make, loss_scale=[ls.DynamicLossScale(), "a"]), TypeError, "'loss_scale'"),
        *((lambda name=name, value=value: two(make, **{name: value}), ValueError, f"'{name}'", one_for_each)
          for name, value in (("clip_norm", [0.5]), ("clip_value", []), ("ema_decay", (0.5,)), ("has_aux", [True]),
                              ("weighted", [True]), ("gradient_transforms", [[nn.ReLU()]]))),
        *((lambda name=name: two(make, **{name: [None, True]}), TypeError, f"'{name}")
          for name in ("clip_norm", "clip_value", "ema_decay")),
        *((lambda value=value: two(make, network_inputs=value), TypeError, "'network_inputs'")
          for value in (1, "01", (0, 1), [(0,), 1], {0: (0,)}, [(0,), None], [(0, 1), (0, 1.5)], [(0, 1), (0, True)])),
        (lambda: two(make, network_inputs=[(0,)]), ValueError, "'network_inputs'", "of the 2 networks", "1"),
        (lambda: two(make, network_inputs=[(0, 1), (0, -1)]), ValueError, "'network_inputs", "-1"),
        (lambda: two(make, network_inputs=[(0, 1), (2,)])(*batch()), (TypeError, ValueError), "network 1"),
    ]  # fmt: skip


OF_SEVERAL = [
    *of_each(ls.SimultaneousTrainOneStepCell),
    *of_each(ls.AlternatingTrainOneStepCell),
    (lambda: two(loss_scale=[ls.DynamicLossScale(), None]), ValueError, "same 'drop_overflow_update'"),
    (lambda: two(after_update=[ClipWeights(pair()[0].trainable_params(), 1.0), None]), TypeError, "'after_update'"),
    (lambda: of_a_tuple(has_aux=[True, False]), *(TypeError, "'has_aux'", "True or False")),
    (lambda: of_a_tuple(weighted=True), *(ValueError, "'weighted' must be False")),
    (lambda: ls.AlternatingTrainOneStepCell(TupleOf(*pair()), []), TypeError, "'networks' must be a list"),
    (lambda: alternating(after_update=[None]), ValueError, "'after_update'", "one entry for each"),
    (copied(ls.DynamicLossScale()), ValueError, "'loss_scale' is copied for each network", "InputGradient"),
]

# What a compiled step would not hear of.
OF_SETTINGS = [
    (lambda: setattr(ls.DynamicLossScale(), "scale_window", 5), AttributeError, "'scale_window' is fixed"),
    (lambda: setattr(ls.DynamicLossScale(), "backoff_if_loss_not_finite", False), AttributeError, "is fixed"),
    (lambda: setattr(ls.ScheduledLossScale([2, 4], [8, 16]), "milestone", 5), AttributeError, "'milestone' is fixed"),
    (lambda: setattr(ls.NormSpike(max_norm=1.0), "max_norm", 2.0), AttributeError, "max_norm"),
    (lambda: setattr(one(ls.FixedLossScale()).loss_scale, "drop_overflow_update", False), AttributeError, "is fixed"),
]


NO_FILE = "must be a file in a folder that exists"
OF_CALLBACKS = [
    (lambda: ls.EvaluateAverages(3), TypeError, "'evaluate' must be a function without arguments, or None, but got 3"),
    (lambda: ls.EvaluateAverages(None, 3), TypeError, f"'save' {NO_FILE}, or None, but got 3"),
    (lambda: ls.EvaluateAverages(None, "nowhere/averages.ckpt"), ValueError, "'EvaluateAverages'", f"'save' {NO_FILE}"),
    *((lambda wrong=wrong: ls.ExposeOptimizer(wrong), TypeError, "'optimizer' must be an optimizer or None")
      for wrong in (3, nn.Adam, nn.Dense(2, 2), [sgd(Linear())])),
    (lambda: ls.LossScaleMonitor(every_n_steps=0), ValueError, "'every_n_steps' must be >= 1 and < 2", "but got 0"),
    (lambda: ls.LossScaleMonitor(max_consecutive_skips="3"), TypeError,
     "'max_consecutive_skips' must be an integer >= 1, but got '3'"),
    (lambda: ls.LossScaleMonitor(csv=3), TypeError, f"'csv' {NO_FILE}, or None, but got 3"),
    (lambda: ls.LossScaleMonitor(csv="nowhere/steps.csv"), ValueError, f"'csv' {NO_FILE}", "'nowhere/st"),
    (lambda: ls.LossScaleMonitor(csv="."), ValueError, "'csv' must be a file", "but got '.'"),
    (lambda: ls.LossScaleMonitor(save_batch="batch.npz"), ValueError,
     "'save_batch' is 'batch.npz', but needs 'max_consecutive_skips'"),
    (lambda: ls.LossScaleMonitor(save_batch=".", max_consecutive_skips=3), ValueError, "'save_batch' must be a file"),
]  # fmt: skip


@table(*OF_LOSS_SCALES, *OF_KEYWORDS, *OF_NETWORKS, *OF_OTHER_PLACES, *OF_SEVERAL, *OF_SETTINGS, *OF_CALLBACKS)
def test_it_is_refused(call, error, words):
    refused(call, error, *words)


def test_a_rule_that_is_copied_and_whose_state_a_transform_holds():
    rule = ls.DynamicLossScale()
    rule.measure = Measure()
    words = "'loss_scale' is copied for each network", "Pass a list"
    refused(lambda: alternating(rule, gradient_transforms=[rule.measure]), ValueError, *words)
    alternating([rule, ls.DynamicLossScale()], gradient_transforms=[[rule.measure], []])
    # One that shares nothing is copied.
    cell = alternating(rule, gradient_transforms=[Measure()])
    norms = [each.measure.norm for each in cell.loss_scale]
    assert len({id(norm) for norm in [*norms, rule.measure.norm]}) == 3


@pytest.mark.parametrize(
    "wrong, error, word",
    [
        *((wrong, ValueError, "one entry for each of the 2 networks") for wrong in ((1,), (1, 1, 1), ())),
        *(((1, wrong), ValueError, "'every[1]' must be >= 1") for wrong in (0, -5, 2**31)),
        *(((1, wrong), TypeError, "'every[1]' must be an integer") for wrong in (2.0, True, "2", None)),
        *((wrong, TypeError, "'every' must be a list or tuple") for wrong in (2, "12", {0: 1, 1: 2}, np.array([1, 2]))),
    ],
)
def test_every(wrong, error, word):
    refused(lambda: alternating(every=wrong), error, word)
    cell = alternating(every=(1, 5))
    before = state(cell)
    refused(lambda: cell.set_every(wrong), error, word)
    assert not changed(before, state(cell))


def test_aux_of_a_network_that_does_not_take_part():
    networks = [WithAux(network) for network in pair()]
    refused(lambda: alternating(networks=networks, every=(1, 2), has_aux=True), ValueError, "'every' must be 1", "2")
    cell = alternating(networks=[networks[0], renamed("other.", Linear())], every=(1, 1), has_aux=[True, False])
    refused(lambda: cell.set_every((2, 1)), ValueError, "'every' must be 1", "network 0")


@pytest.mark.parametrize("make", SEVERAL)
def test_scales_that_are_set(make):
    cell = two(make, [8.0, 4.0])
    for wrong in ([1.0], [1.0, 2.0, 3.0]):
        refused(lambda wrong=wrong: cell.set_loss_scale(wrong), ValueError, "'value'", "one entry for each of the 2")
    for wrong in (0.0, NAN, [1.0, -1.0], [2.0, INF]):
        refused(lambda wrong=wrong: cell.set_loss_scale(wrong), ValueError, "'value' must be a finite number > 0")
    refused(lambda: cell.set_loss_scale([2.0, True]), TypeError, "'value' must be a number")
    # A refused value changes nothing, not even the scales before the wrong one.
    assert cell.get_loss_scale() == [8.0, 4.0]


# Scales that are so large that the reciprocal, divided by the calls of a cycle, is no normal float32.
LARGEST = {2: 2.0**125, 3: 2.0**124, 4: 2.0**124, 5: 2.0**123}


@pytest.mark.parametrize("steps", LARGEST)
def test_scales_that_are_too_large_for_a_cycle(steps):
    for make, argument in (
        (lambda scale: scale, "'loss_scale'"),
        (lambda scale: ls.DynamicLossScale(scale, max_loss_scale=scale), "'init_loss_scale'"),
        (lambda scale: ls.DynamicLossScale(max_loss_scale=scale), "'max_loss_scale'"),
        (lambda scale: ls.ScheduledLossScale([1, 2, 3], [1.0, scale, 2.0]), "'loss_scales'"),
    ):
        cell = one(make(LARGEST[steps]), gradient_accumulation_steps=steps)
        scale = make(2 * LARGEST[steps])
        refused(lambda scale=scale: one(scale, gradient_accumulation_steps=steps), ValueError, argument)
    cell = one(ls.DynamicLossScale(), gradient_accumulation_steps=steps)
    cell.set_loss_scale(LARGEST[steps])
    for owner in (cell, cell.loss_scale):
        refused(lambda owner=owner: owner.set_loss_scale(2 * LARGEST[steps]), ValueError, "'value' must be at most")
    assert cell.get_loss_scale() == LARGEST[steps]


# Calls.


class Optional(Linear):
    def construct(self, x, y=None, z=None, *, w=None):
        return super().construct(x, x if y is None else y)


class OfTwo(nn.Dense):
    def construct(self, x, mask):
        return super().construct(x * mask)


X, Y = batch()


def function_of(network):
    def forward(x, y):
        return network(x, y)

    return forward


@pytest.mark.parametrize(
    "network, inputs, words",
    [
        (lambda: nn.Dense(3, 1), (X, Y), ["'Dense', takes (x)", "2", "nn.WithLossCell(network, loss_fn)"]),
        (Linear, (X,), ["'Linear', takes (x, y)", "gets 1", "Model(cell) without loss_fn"]),
        (Linear, ((X, Y),), ["takes (x, y)", "gets 1 of 1 inputs"]),
        (Optional, (X, Y, X, Y), ["takes (x, y=None, z=None, *, w=None)", "4"]),
        (lambda: nn.WithLossCell(OfTwo(3, 1), nn.MSELoss()), (X, X, Y), ["'WithLossCell', takes (data, label)"]),
        (lambda: nn.WithLossCell(OfTwo(3, 1), nn.MSELoss()), (X, Y), ["mask"]),
    ],
)
@quick_in_pynative_mode
def test_a_number_of_inputs_that_the_network_can_not_take(mode, network, inputs, words):
    cell = one(ls.DynamicLossScale(), network())
    for call in (cell, cell.find_loss_scale):
        refused(lambda call=call: call(*inputs), TypeError, *words)
    assert cell.counters()["applied_steps"] == 0


@quick_in_pynative_mode
def test_numbers_of_inputs_of_functions_and_of_several_networks(mode):
    network = Linear()
    cell = ls.ScaledTrainOneStepCell(function_of(network), sgd(network))
    refused(lambda: cell(X), TypeError, "'function_of.<locals>.forward', takes (x, y)", "1")
    refused(lambda: one(8.0)(x=X, y=Y), TypeError, "position", "keyword")
    for make in SEVERAL:
        refused(lambda make=make: two(make)(X, Y, X), TypeError, "takes (x, y)", "3", "network_inputs")
        call = functools.partial(two(make, network_inputs=[(0, 1), (1,)]), X, Y)
        refused(call, TypeError, "network 1", "takes (x, y)", "gets 1")


@quick_in_pynative_mode
def test_predict(mode):
    network = Linear()
    cell = one(2.0**10, network).set_train()
    model = Model(cell, eval_network=nn.WithEvalCell(Linear(), nn.MSELoss()), eval_indexes=[0, 1, 2])
    before = state(cell)
    for inputs in ((X,), (X, Y)):
        predict = functools.partial(model.predict, *inputs)
        refused(predict, RuntimeError, "Model.predict", "Model(network).predict(x)")
        assert (cell.phase, cell.training, network.training) == ("train", True, True)
    assert not changed(before, state(cell))
    assert not bool(cell(X, Y)[1])


# ManualStep.


def zeros(weights):
    return tuple(Tensor(np.zeros(weight.shape, np.float32)) for weight in weights)


def check_refused(step, call, error, *words):
    """Asserts that a call is refused in words that have all these in them, and changes nothing."""
    before = state(step)
    refused(call, error, *words)
    assert not changed(before, state(step))


@quick_in_pynative_mode
def test_a_manual_step(mode):
    step, networks, train_step = manual(ls.DynamicLossScale(2.0**10), ema_decay=0.9)
    train_step(*manual_batch(0))
    grads = zeros(step.parameters)
    check_refused(step, lambda: step.end(grads), RuntimeError, "'ManualStep.end'", "begin(*inputs)")
    check_refused(step, lambda: step(*manual_batch(1)), RuntimeError, "begin(*inputs)", "end(grads)")
    with step.ema_weights():
        check_refused(step, lambda: step.begin(*manual_batch(1)), RuntimeError, "ema_weights")
    step.begin(*manual_batch(1))
    with step.ema_weights():
        check_refused(step, lambda: step.end(grads), RuntimeError, "ema_weights")
    loss = Tensor(1.0)
    for call, error, *words in (
        (lambda: step.end(grads, weights=3), TypeError, "unexpected keyword argument 'weights'"),
        (lambda: step.end(grads, loss=(loss, loss)), TypeError, "'loss' must be a Tensor, but got ("),
        (lambda: step.end(grads, loss=1.5), TypeError, "'loss' must be a Tensor, but got 1.5"),
        (lambda: step.scale(1.0), TypeError, "'loss' must be a Tensor"),
        (lambda: step.scale(loss, 2), ValueError, "from 0 to 0, but got 2"),
        (lambda: copy.deepcopy(step), RuntimeError, "can't be copied", "load_state_dict"),
    ):
        check_refused(step, call, error, *words)
    of_tensors = "a tuple of Tensors, one for each weight"
    for wrong, error, *words in (
        ((grads[:-1],), ValueError, "each of the 1 optimizers", "'parameters'"),
        ((grads, grads), ValueError, "tuple of gradients for each of the 1 optimizers", "end(grads)"),
        (grads, TypeError, "must be a tuple of Tensors, one for each weight"),
        (grads[:1], TypeError, of_tensors, "'Tensor'"),
        (((None, *grads[1:]),), TypeError, of_tensors, "None"),
        (({"a": grads[0]},), TypeError, of_tensors, "'dict'"),
        (((grads[1], grads[0], *grads[2:]),), ValueError, "each of the 1 optimizers", "(6, 4)", "(6,)"),
    ):
        check_refused(step, lambda wrong=wrong: step.end(*wrong), error, "ManualStep", *words)
    # The step has not ended, and may still end.
    step.end(list(grads))
    assert step.counters()["applied_steps"] == 2
    # Or it is given up.
    before = state(networks[0])
    networks[0](*step.begin(*manual_batch(10, overflows=True)))
    check_refused(step, lambda: step.end(grads, ()), ValueError)
    step.begin(*manual_batch(2))
    assert not changed(before, state(networks[0]))


@quick_in_pynative_mode
def test_a_manual_step_of_two_optimizers(mode):
    step, *_ = manual(ls.DynamicLossScale(2.0**10), count=2)
    a, b = map(zeros, step.parameters)
    step.begin(*manual_batch(1))
    for wrong, error, *words in (
        ((a,), ValueError, "each of the 2 optimizers", "end(grads_0, grads_1)"),
        (((a, b),), TypeError, "must be a tuple of Tensors, one for each weight"),
        ((a, b[:-1]), ValueError, "each of the 2 optimizers"),
        ((a, 3), TypeError, "the gradients of optimizer 1 must be a tuple of Tensors", "3"),
        ((a, b[::-1]), ValueError, "each of the 2 optimizers", "(6, 4)", "(1,)"),
    ):
        check_refused(step, lambda wrong=wrong: step.end(*wrong), error, "ManualStep", *words)
    step.end(a, b)


@quick_in_pynative_mode
def test_losses_and_weights_of_a_manual_step(mode):
    high_loss = made(ls.SkipCondition, "construct", lambda self, loss, norm: loss > norm)
    for keywords, what in (
        ({"skip_conditions": [high_loss]}, "'skip_conditions'"),
        ({"loss_scale": ls.DynamicLossScale(backoff_if_loss_not_finite=False)}, "backoff_if_loss_not_finite=False"),
    ):
        step, *_ = manual(**{"loss_scale": ls.DynamicLossScale(), **keywords})
        step.begin(*manual_batch(0))
        grads = zeros(step.parameters)
        check_refused(step, lambda: step.end(grads), ValueError, "'loss'", what, "end(grads, loss=loss)")  # noqa: B023
    step, *_ = manual(ls.DynamicLossScale(), gradient_accumulation_steps=2)
    step.begin(*manual_batch(0))
    step.end(grads, weight=2)
    step.begin(*manual_batch(1))
    check_refused(step, lambda: step.end(grads), ValueError, "all calls must have a 'weight', or none")
    check_refused(step, lambda: step.end(grads, weight="2"), TypeError, "a weight must be a number or a Tensor")
    check_refused(step, lambda: step.end(grads, weight=-3), ValueError, "weight must be a finite number >= 0", "-3")
    of_complex = [Tensor(grad.asnumpy().astype(np.complex64)) for grad in grads]
    check_refused(step, lambda: step.end(tuple(of_complex)), TypeError, "gradients must be real")
    step, *_ = manual(ls.DynamicLossScale(), ema_decay=0.9, gradient_accumulation_steps=2)
    with step.ema_weights():
        check_refused(step, step.flush, RuntimeError, "'flush()'", "ema_weights")


class CellOfAUser(ls.ScaledTrainOneStepCell):  # Has attributes of its own, and repeats what stock subclasses do.
    def __init__(self, network, optimizer, loss_scale):
        super().__init__(network, optimizer, loss_scale)
        self.network, self.optimizer, self.loss_scale = network, optimizer, loss_scale
        self.every, self.metric = 5, nn.Identity()


@pytest.mark.parametrize("make", [ls.ScaledTrainOneStepCell, *SEVERAL, ls.ManualStep])
def test_what_was_given_at_construction_can_not_be_assigned(make):
    cell = (two if make in SEVERAL else one)(make=make, loss_scale=ls.DynamicLossScale(8.0))
    before = list(cell.parameters_dict())
    names = {"loss_scale", "clip_norm", "gradient_accumulation_steps", "skip_conditions", "optimizer", "grad_reducer"}
    of_manual, of_others = {"networks", "optimizers", "parameters", "name"}, {"network", "max_retries", "weights"}
    names |= of_manual if make is ls.ManualStep else of_others
    for name in names:
        for value in (2, None, [Tensor(2.0)]):
            words = (make.__name__, f"'{name}' is fixed", "Construct a new cell", "load_state_dict")
            if value is not getattr(cell, name, 0):
                refused(lambda name=name, value=value: setattr(cell, name, value), AttributeError, *words)
    refused(lambda: setattr(cell, "loss_scale", 2.0), AttributeError, "set_loss_scale(value)")
    refused(lambda: setattr(cell, "scale_sense", 2.0), AttributeError, "scale_sense")
    assert list(cell.parameters_dict()) == before
    assert cell.set_train().training and not cell.set_train(False).training
    if make is ls.ScaledTrainOneStepCell:
        assert CellOfAUser(cell.network, cell.optimizer, cell.loss_scale).every == 5


# What is loaded.

# Of a cycle of two calls of two networks, a window of two steps and no hysteresis.
IMPOSSIBLE = {
    "scale_value": [INF, NAN, 0.0, -2.0, 1e-40, 2.0**-127, 2.0**127],
    **{"clean_steps": [-1, -(2**31), 2, 2**31 - 1], "overflow_steps": [-1, 1], "applied_steps": [-5], "retries": [-1]},
    **{"micro_steps": [-1, 2, 99], "accumulation.dropped_calls": [-5, 1, 99], "step_counters.dropped_calls": [-1]},
    **{"windows": [-1], "every": [0], "next_network": [-1, 2]},
    "missing_losses": [-1],
}


def impossible(cell):  # Pairs of a name and an array with an impossible value, for scales and counts of a cell.
    return [
        (name, np.full_like(value, each))
        for name, value in state(cell).items()
        for last, values in IMPOSSIBLE.items()
        for each in values
        if f".{name}".endswith(f".{last}")
    ]


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["alternating", *slow("scaled", "simultaneous")])
def test_impossible_values_at_load_state_dict_or_at_the_next_call_after_stock_functions(mode, kind):
    trained = Trained(kind, steps=2, max_retries=1, drop_overflowed_calls=True)
    cell, all_before = trained.cell, state(trained.cell)
    assert len({name.rpartition(".")[2] for name, _ in impossible(cell)}) >= (10 if kind == "alternating" else 7)
    for name, value in impossible(cell):
        loaded = {key: Tensor(its) for key, its in {**all_before, name: value}.items()}
        shown = str(value.item() if value.size == 1 else value.tolist())
        load = functools.partial(cell.load_state_dict, loaded)
        check_refused(cell, load, ValueError, "Nothing was loaded", repr(name), shown)
        mindspore.load_param_into_net(cell, {name: Parameter(Tensor(value), name=name)})
        for go_on in (trained.call_cell, cell.flush):
            refused(go_on, ValueError, repr(name), shown)
        cell.parameters_dict()[name].set_data(Tensor(all_before[name]))
    trained.call_cell()
    cell.parameters_dict()[next(name for name in state(cell) if name.endswith("scale_value"))].set_data(Tensor(INF))
    refused(trained.call_cell, ValueError, "scale_value", "inf", "damaged")
    # Setting the scale mends it.
    cell.set_loss_scale(8.0)
    trained.call_cell()


@table(
    (lambda cell, its: cell.load_state_dict([1]), TypeError, "dict", "[1]"),
    (lambda cell, its: cell.load_state_dict({**its, "first.weight": 3}), TypeError, "'first.weight'", "3", "'int'"),
    (lambda cell, its: cell.load_state_dict({1: Tensor(1.0)}, strict=False), TypeError, "1", "'int'"),
    (lambda cell, its: cell.load_state_dict({}, 0), TypeError, "'strict' must be True or False", "0"),
    (lambda cell, its: cell.load_state_dict({**its, "first.weight": Tensor([1.0] * 2)}), ValueError,
     "'first.weight' must have the shape (3, 1)", "(2,)"),
    (lambda cell, its: cell.load_state_dict({**its, "stranger": Tensor(1.0)}), RuntimeError, "none is missing"),
)  # fmt: skip
def test_what_is_no_checkpoint(call, error, words):
    cell = Trained("scaled").cell
    before = state(cell)
    refused(lambda: call(cell, {name: Tensor(value) for name, value in before.items()}), error, *words)
    assert not changed(before, state(cell))


@quick_in_pynative_mode
@pytest.mark.parametrize("kind", ["alternating", *slow("scaled", "simultaneous")])
def test_within_ema_weights(mode, kind):
    trained = Trained(kind, ema_decay=0.9, steps=2)
    trained.call_cell(0)
    before = state(trained.cell)
    loaded = {name: Parameter(parameter + 1, name=name) for name, parameter in trained.cell.parameters_dict().items()}
    with trained.cell.ema_weights():
        refused(trained.cell.flush, RuntimeError, "'flush()'", "ema_weights")
        refused(lambda: trained.cell.load_state_dict(loaded), RuntimeError, "'load_state_dict()'", "ema_weights")
        refused(trained.call_cell, RuntimeError, "ema_weights")
    assert not changed(before, state(trained.cell))
