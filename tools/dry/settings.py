"""Settings of ms_lossscale's steps: the keywords of each, by its name."""

from mindspore import Parameter, Tensor, nn, ops

from ms_lossscale import NormSpike, SkipCondition


class HugeLoss(SkipCondition):
    """A condition that is never true, whatever a loss that nothing computed may be."""

    def __init__(self):
        super().__init__()
        self.armed = Parameter(Tensor(False), name="armed", requires_grad=False)

    def construct(self, loss, norm):
        return ops.logical_and(loss > 1e9, self.armed)


class WithAux(nn.Cell):
    """A network that returns something beside its loss."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        loss = self.network(*inputs)
        return loss, loss * 2


SETTINGS = {
    "clip_norm": lambda: {"clip_norm": 1.0},
    "clip_value": lambda: {"clip_value": 1.0},
    "ema_decay": lambda: {"ema_decay": 0.9},
    "clip_norm and ema_decay": lambda: {"clip_norm": 1.0, "ema_decay": 0.9},
    "max_retries=3": lambda: {"max_retries": 3},
    "accumulation of 4": lambda: {"gradient_accumulation_steps": 4},
    "has_aux": lambda: {"has_aux": True},
    "NormSpike": lambda: {"skip_conditions": [NormSpike(z_score=6.0)]},
    "a condition on the loss": lambda: {"skip_conditions": [HugeLoss()]},
    "two conditions": lambda: {"skip_conditions": [NormSpike(z_score=6.0), HugeLoss()]},
}


def with_settings(network, *names):
    """Returns the network as these settings want it, and their keywords."""
    keywords = {}
    for name in names:
        keywords.update(SETTINGS[name]())
    return (WithAux(network) if "has_aux" in keywords else network), keywords
