"""MindSpore's optimizers, listed from its modules, so that a new one is tested as soon as it appears."""

import inspect

import mindspore
from mindspore import nn
from mindspore.experimental.optim import lr_scheduler

MODULES = {"nn": mindspore.nn.optim, "experimental": mindspore.experimental.optim, "mint": mindspore.mint.optim}
OPTIMIZERS = [
    f"{module}.{name}"
    for module, contents in MODULES.items()
    for name in sorted(contents.__all__)
    if callable(getattr(contents, name)) and name != "Optimizer"  # The base class.
]

# These run on CPU in every supported MindSpore, so they must not be skipped.
RUN_EVERYWHERE = {
    "nn": "ASGD AdaFactor AdaMax Adadelta Adagrad Adam AdamOffload AdamWeightDecay FTRL LazyAdam Momentum "
    "ProximalAdagrad RMSProp Rprop SGD",
    "experimental": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
}
RUN_EVERYWHERE = {f"{module}.{name}" for module, names in RUN_EVERYWHERE.items() for name in names.split()}


def parameters_of(make):  # The names of a constructor's parameters, and whether each has a default.
    function = make.__init__ if inspect.isclass(make) else make
    # Most of MindSpore's constructors have a decorator that takes (*args, **kwargs), some have two.
    while True:
        around = inspect.getclosurevars(function).nonlocals
        inside = around.get("func", around.get("fn"))
        if inside is None:
            break
        function = inside
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return {p.name: p.default is not p.empty for p in parameters if p.kind is not p.VAR_KEYWORD}


def required_argument(name, network):
    """Returns a value for an argument without a default. A KeyError means that an optimizer wants something new."""
    return {
        "params": lambda: [{"params": [network.weight]}, {"params": [network.bias]}],
        **dict.fromkeys(("optimizer", "opt"), lambda: nn.Momentum(network.trainable_params(), 0.05, 0.9)),
        **dict.fromkeys(("learning_rate", "lr"), lambda: 0.05),
        "momentum": lambda: 0.9,
    }[name]()


def make_optimizer(name, network):
    """Returns the optimizer with two groups of parameters, weight decay in one of them, and a decreasing learning rate,
    as far as it takes them. Also returns the schedule that a user's loop steps, for the experimental optimizers."""
    module, class_name = name.split(".")
    make = getattr(MODULES[module], class_name)
    has_default = parameters_of(make)
    arguments = {
        argument: required_argument(argument, network) for argument in has_default if not has_default[argument]
    }
    if "params" in arguments and "weight_decay" in has_default:
        arguments["params"][0]["weight_decay"] = 0.1
    if "learning_rate" in has_default and name not in ("nn.FTRL", "nn.AdaFactor"):
        # FTRL refuses a changing learning rate, and AdaFactor computes its own.
        arguments["learning_rate"] = nn.ExponentialDecayLR(0.05, decay_rate=0.5, decay_steps=1)
    optimizer = make(**arguments)
    has_schedule_outside = isinstance(optimizer, mindspore.experimental.optim.Optimizer)
    return optimizer, lr_scheduler.ExponentialLR(optimizer, gamma=0.5) if has_schedule_outside else None
