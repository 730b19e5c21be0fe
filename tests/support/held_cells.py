"""Training cells with all features, as attributes of other Cells. 0.5.0 saved those in tests/golden/held_0_5/."""

import mindspore
from mindspore import Parameter, Tensor, nn, ops

import ms_lossscale as ls
from support.manual_training import CYCLE, Halve, batch, regression
from support.training import cell_of

CALLS = 5  # They end within a cycle.


class Holder(nn.Cell):  # Holds one, or two.
    def __init__(self, critic_train, actor_train=None, auto_prefix=True):
        super().__init__(auto_prefix=auto_prefix)
        self.critic_train = critic_train
        if actor_train is not None:
            self.actor_train = actor_train
        self._has_two = actor_train is not None

    def construct(self, x, y):
        loss = self.critic_train(x, y)[0]
        return (loss, self.actor_train(ops.depend(x, loss), y)[0]) if self._has_two else loss


class ManualCall(nn.Cell):  # A call of a ManualStep as a Cell, which returns what training cells return.
    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step
        self.derivatives = [step.value_and_grad(network, i) for i, network in enumerate(step.networks)]

    def construct(self, x, y):
        x, y = self.step.begin(x, y)
        grads, total = (), 0.0
        for i in range(len(self.derivatives)):
            loss, its_grads = self.derivatives[i](x, y)
            grads, total = (*grads, its_grads), total + loss
        overflow = self.step.end(*grads, loss=total)
        return ops.depend(total, overflow), overflow


class Counting(nn.Cell):  # What runs after each update.
    def __init__(self):
        super().__init__()
        self.updates = Parameter(Tensor(0.0), name="updates", requires_grad=False)
        self.one = Tensor(1.0)

    def construct(self):
        ops.assign_add(self.updates, self.one)


def adam(network):  # Its learning rate is in a Cell inside.
    return nn.Adam(network.trainable_params(), [0.5, 0.25] * 8)


def experimental_adam(network):  # Its learning rate is in no list of MindSpore's.
    return mindspore.experimental.optim.Adam(network.trainable_params(), 0.25)


def scale():
    return ls.DynamicLossScale(2.0**10, scale_window=2, hysteresis=2, backoff_if_loss_not_finite=False)


def features(**others):
    own = {"gradient_transforms": [Halve()], "skip_conditions": [ls.NormSpike(z_score=9.0)], "after_update": Counting()}
    return {**CYCLE, **own, **others}


def one(kind, prefix, **keywords):
    network = regression(0, f"{prefix}net.")
    keywords = {"drop_overflowed_calls": True, **keywords}
    return cell_of(kind, [network], [adam(network)], scale(), **features(**keywords))


def two(kind, prefix, loss_scale, **keywords):
    networks = [regression(i, f"{prefix}{i}.") for i in range(2)]
    optimizers = [adam(networks[0]), experimental_adam(networks[1])]
    return cell_of(kind, networks, optimizers, loss_scale, **features(**keywords))


CELLS = {
    "scaled": lambda prefix="", **keywords: one("scaled", prefix, max_retries=1, **keywords),
    "simultaneous": lambda prefix="", **keywords: two("simultaneous", prefix, [scale(), scale()], **keywords),
    "alternating": lambda prefix="", **keywords: two("alternating", prefix, scale(), every=(1, 2), **keywords),
    "manual": lambda prefix="", **keywords: one("manual", prefix, **keywords),
    "manual_of_two": lambda prefix="", **keywords: two("manual", prefix, scale(), **keywords),
}


def call_of(cell):  # What makes a call of a cell, or of a ManualStep.
    return ManualCall(cell) if isinstance(cell, ls.ManualStep) else cell


def train(call, first=0, last=CALLS):  # Makes calls, of which the second overflows.
    for seed in range(first, last):
        call(*batch(seed, overflows=seed == 1))


def holds(cell):  # The values of all Parameters, in an order that does not depend on their names.
    return [parameter.asnumpy().copy() for parameter in cell.get_parameters()]


def names(cell):
    return [parameter.name for parameter in cell.get_parameters()]
