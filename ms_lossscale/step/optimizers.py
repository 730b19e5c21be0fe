"""The optimizers of a training cell: what is required of them, and the names of their Parameters in a checkpoint."""

import inspect
import itertools

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale._arguments import check_cell
from ms_lossscale._mindspore import unlisted_state
from ms_lossscale._output import written_scale
from ms_lossscale.function_network import names_of_functions
from ms_lossscale.sharding.sharded_optimizer import ShardedOptimizer


def network_prefix(i):
    """Returns the prefix for the names of Parameters that each of several networks has."""
    return f"network_{i}."


def add_prefix(prefix, parameters):
    """Puts the prefix before the parameters' names, once."""
    for parameter in parameters:
        if not parameter.name.startswith(prefix):
            parameter.name = prefix + parameter.name


def check_unique_names(owner, parameters):
    """Raises a ValueError if two parameters share a name: a checkpoint would silently keep one of them."""
    seen = {}
    for parameter in parameters:
        if seen.setdefault(parameter.name, parameter) is not parameter:
            raise ValueError(
                f"For '{owner}', every parameter must have a name of its own, since a checkpoint would silently keep "
                f"one of two, but two are named '{parameter.name}'. Rename the parameters of one network before its "
                f"optimizer is constructed: network.update_parameters_name('discriminator.'), say, or hold both "
                f"networks in one cell with auto_prefix=True."
            )


def _check_states(owner, optimizer):
    """Raises a ValueError if two states of an optimizer share a name, as those of two in one Cell do."""
    weights = {id(weight) for weight in optimizer.parameters}
    seen = {}
    for state in optimizer.get_parameters():
        if id(state) not in weights and seen.setdefault(state.name, state) is not state:
            raise ValueError(
                f"For '{owner}', the {type(optimizer).__name__} holds two states named '{state.name}', of which a "
                f"checkpoint would silently keep one. If there are two optimizers in it, construct it with "
                f"auto_prefix=False and rename the states of one of them, but not the weights, whose names earlier "
                f"checkpoints have: weights = {{id(weight) for weight in network.trainable_params()}}, and for each "
                f"state in muon.get_parameters(), say, unless id(state) in weights: state.name = 'muon.' + state.name."
            )


def _own_loss_scale(optimizer):
    """Returns the loss scale that an optimizer divides by itself, 1.0 if it does not."""
    for _, cell in optimizer.cells_and_names():
        scale = float(getattr(cell, "loss_scale", 1.0))
        if scale != 1.0:
            return scale
        # Some optimizers of other packages show only here that they divide.
        reciprocal = getattr(cell, "reciprocal_scale", 1.0)
        reciprocal = float(reciprocal.asnumpy() if isinstance(reciprocal, Tensor) else np.asarray(reciprocal))
        if reciprocal != 1.0:
            return 1.0 / reciprocal
    return 1.0


def check_optimizers(owner, optimizers, networks, are_pairs=True):
    """
    Raises unless the optimizers can train the networks. If there are as many and `are_pairs`, each trains its own.
    """
    check_unique_names(owner, (weight for optimizer in optimizers for weight in getattr(optimizer, "parameters", ())))
    owners = {}
    for optimizer in optimizers:
        _check_optimizer(owner, optimizer, networks)
        for parameter in optimizer.parameters:
            other = owners.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                raise ValueError(
                    f"For '{owner}', no two optimizers may own the same parameter, but '{parameter.name}' belongs to "
                    f"the {type(other).__name__} and to the {type(optimizer).__name__}. Pass each optimizer the "
                    f"parameters of its own network: generator.trainable_params(), say, and not those of a loss cell "
                    f"that holds both."
                )
    if are_pairs and len(networks) == len(optimizers):
        _check_pairs(owner, optimizers, networks)


def _check_pairs(owner, optimizers, networks):
    """Raises if no gradient can flow from a network's loss to the weights of its optimizer."""
    for i, (network, optimizer) in enumerate(zip(networks, optimizers)):
        own = {id(parameter) for parameter in network.get_parameters()}
        if not any(id(parameter) in own for parameter in optimizer.parameters):
            raise ValueError(
                f"For '{owner}', loss i trains the parameters of optimizer i, but none of the parameters of "
                f"optimizers[{i}] ({type(optimizer).__name__}: {optimizer.parameters[0].name}, ...) belongs to "
                f"networks[{i}]. Pass networks and optimizers in the same order."
            )


def _check_optimizer(owner, optimizer, networks):
    check_cell(owner, "optimizer", optimizer, "Pass an optimizer of mindspore.nn.optim, say.")
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.check_ranks(owner)
    name = type(optimizer).__name__
    parameters = tuple(getattr(optimizer, "parameters", ()))
    if not parameters:
        raise ValueError(
            f"For '{owner}', the argument 'optimizer' must have parameters to train, but the {name} has none. Pass it "
            f"network.trainable_params(), and check that not all of them are frozen."
        )
    if type(optimizer).construct is nn.Cell.construct:
        raise ValueError(
            f"For '{owner}', the argument 'optimizer' must be one that can be called, but the {name} has no "
            f"'construct': it holds others, as that of mindspore.boost that freezes layers does. Pass one of them."
        )
    scale = _own_loss_scale(optimizer)
    if scale != 1.0:
        raise ValueError(
            f"For '{owner}', the argument 'optimizer' must not divide by a loss scale, since the cell does, but the "
            f"{name} divides by {written_scale(scale)}. Construct it with loss_scale=1.0."
        )
    wanted = _wants_besides_gradients(updating(optimizer))
    if wanted:
        raise ValueError(
            f"For '{owner}', the argument 'optimizer' must be one that is called with the gradients only, but "
            f"'construct' of the {name} also requires {', '.join(map(repr, wanted))}. Derive a Cell from it whose "
            f"construct(self, gradients) gives it that: the cell calls it only where nothing overflowed."
        )
    _check_states(owner, optimizer)
    known = {id(parameter) for network in networks for parameter in network.get_parameters()}
    strangers = [parameter.name for parameter in parameters if id(parameter) not in known]
    if strangers:
        functions = names_of_functions(networks)
        cure = "Pass it the parameters of the network that computes the loss."
        if functions:
            cure += (
                f" A function ({', '.join(functions)}) has those of the Cells that it reaches: by a name in its code "
                f"that is global or in its closure, by a default argument, or from the 'self' of a method. If it gets "
                f"its network otherwise, pass a Cell instead, or [function, network] to a ManualStep."
            )
        raise ValueError(
            f"For '{owner}', the {name} must own parameters of the networks only, but {', '.join(strangers[:5])}"
            f"{' and others' if len(strangers) > 5 else ''} belong to none of the cell's networks. {cure}"
        )


def _wants_besides_gradients(optimizer):
    """Returns the names of the arguments that the optimizer's `construct` requires besides the gradients."""
    parameters = inspect.signature(optimizer.construct).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in (*positional[1:], *by_keyword) if p.default is p.empty]


def updating(optimizer):
    """Returns the optimizer that computes the update: that of the shards for a :class:`ShardedOptimizer`."""
    return optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer


def prefix_states(optimizers):
    """Makes the names of several optimizers' states unique: MindSpore gives all the same ones."""
    if len(optimizers) > 1:
        for i, optimizer in enumerate(optimizers):
            weights = {id(weight) for weight in optimizer.parameters}
            parameters = (*optimizer.get_parameters(), *unlisted_state(optimizer))
            add_prefix(f"optimizer_{i}.", (state for state in parameters if id(state) not in weights))


class Optimizers(nn.Cell):
    """Calls the optimizers of a step, or of a training cell, with one flat tuple of the gradients for all of them."""

    def __init__(self, optimizers):
        super().__init__(auto_prefix=False)
        self.optimizers = nn.CellList(list(optimizers), auto_prefix=False)
        ends = list(itertools.accumulate(len(optimizer.parameters) for optimizer in optimizers))
        self._slices = tuple(zip([0, *ends], ends))
        self.parameters = ParameterTuple([p for optimizer in optimizers for p in optimizer.parameters])
        updated = [p for optimizer in optimizers for p in updating(optimizer).parameters]
        all_float32 = all(parameter.dtype == mstype.float32 for parameter in updated)
        unlisted = [state for optimizer in optimizers for state in unlisted_state(optimizer)]
        if unlisted:
            self.unlisted_state = ParameterTuple(unlisted)
        # Optimizers require gradients of the dtype of their weights.
        self._cast_to = None if all_float32 else ParameterTuple(updated)

    def construct(self, grads):
        if self._cast_to is not None:
            grads = gradients.cast_like(grads, self._cast_to)
        # Returned, since MindSpore drops some optimizers (mint's Adam) in a method that returns nothing.
        done = ()
        for i, optimizer in enumerate(self.optimizers):
            done += (optimizer(grads[self._slices[i][0] : self._slices[i][1]]),)
        return done

    # Callbacks read these from the `optimizer` of a training cell, and expect one: they get those of the first.
    @property
    def global_step(self):
        return self.optimizers[0].global_step

    @property
    def learning_rate(self):
        learning_rate = self.optimizers[0].learning_rate
        if len(self.optimizers) > 1 and isinstance(learning_rate, Parameter):
            raise RuntimeError(
                f"A callback asked a training cell with {len(self.optimizers)} optimizers for its learning rate, and "
                f"would change only that of the first optimizer. Put a callback ExposeOptimizer(optimizer) before it, "
                f"with the optimizer whose learning rate it should change; one such pair for each optimizer. For "
                f"a callback that only shows the learning rate, give the first optimizer a schedule, not a constant."
            )
        return learning_rate

    @property
    def dynamic_lr(self):
        return self.optimizers[0].dynamic_lr

    @property
    def is_group_lr(self):
        return self.optimizers[0].is_group_lr

    def shared_state(self):
        """
        Returns the small Parameters that must have the same values on all ranks: those of one element, without the
        weights and without what each rank has its own part of.
        """
        weights = {id(weight) for weight in self.parameters}
        return [p for p in self.get_parameters() if p.size == 1 and not p.layerwise_parallel and id(p) not in weights]
