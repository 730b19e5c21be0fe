"""The base class of the training cells: how they are built, and what happens around a call."""

import inspect
from typing import Any, Union

from mindspore import nn

from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._training_hooks import TrainingHooks
from ms_lossscale.cells.find_loss_scale import find_loss_scale
from ms_lossscale.cells.first_call import check_inputs
from ms_lossscale.cells.guard import explaining_errors
from ms_lossscale.cells.rank_comparison import check_parallel
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.loss_scale import as_loss_scale, check_distinct
from ms_lossscale.step.build import build_step
from ms_lossscale.step.optimizers import Optimizers, add_prefix, check_optimizers, network_prefix, prefix_states
from ms_lossscale.step.own_cells import prefix_own_states
from ms_lossscale.step.ranks import ranks_of
from ms_lossscale.step.returned import check_network_inputs
from ms_lossscale.step.step import inputs_of


def own_loss_scales(owner, loss_scale, count):
    """Returns the LossScale that all networks share, or a list of theirs, with prefixes, if it is a list."""
    if not isinstance(loss_scale, (list, tuple)):
        return as_loss_scale(owner, loss_scale)
    if len(loss_scale) != count:
        raise ValueError(
            f"For '{owner}', the argument 'loss_scale', if it is a list, must have one entry for each of the {count} "
            f"networks, but got {len(loss_scale)}."
        )
    check_distinct(owner, loss_scale, "Construct one for each.")
    loss_scales = [as_loss_scale(owner, each) for each in loss_scale]
    for i, each in enumerate(loss_scales):
        add_prefix(network_prefix(i), each.get_parameters())
    return loss_scales


class TrainingCell(TrainingState, TrainingHooks):
    """Base class of the training cells. There is a `Settings`, and a loss scale or a list of them, for each step."""

    def __init__(self, networks, optimizers, settings, loss_scales, network_inputs=None, may_return_tuple=False):
        owner = self._owner = type(self).__name__
        check_optimizers(owner, optimizers, networks)
        self_inputs = check_network_inputs(owner, network_inputs, networks)
        check_parallel(owner, settings)
        prefix_states(optimizers)
        prefix_own_states([its for each in settings for its in each.gradient_transforms], networks)
        prefix_own_states([its.skip_conditions for its in settings], networks, "condition")
        super().__init__(
            networks[0] if len(networks) == 1 else nn.CellList(list(networks), auto_prefix=False),
            optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers),
        )
        self.network_inputs = self_inputs
        self._have_aux = tuple(has for its in settings for has in its.has_aux)
        self._has_aux = any(self._have_aux)
        steps = []
        for i, (its, loss_scale) in enumerate(zip(settings, loss_scales)):
            own = slice(i, i + 1) if self.each_decides else slice(None)
            reducer = self.grad_reducer
            if self.each_decides and self.parallel_mode != "stand_alone":
                reducer = nn.TrainOneStepCell(networks[i], optimizers[i]).grad_reducer
            ranks = ranks_of(self.parallel_mode, its.gradients_reduced, reducer)
            inputs, prefix = (None, network_prefix(i)) if self.each_decides else (self_inputs, "")
            of_step = networks[own], optimizers[own], loss_scale, its, ranks
            steps.append(build_step(owner, *of_step, inputs, may_return_tuple, prefix, i))
        if self.each_decides:  # Each step reduces its own gradients.
            self.grad_reducer = nn.Identity()
        self._add_parts(steps, settings)
        self._look_after(steps, optimizers, settings)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))
        self._fitting = set()
        # Those of `find_loss_scale`. What refers to this cell itself would keep it, and its memory, after its last use.
        self._trials = []
        own = [each for each in type(self).__mro__ if TrainingCell in each.__bases__]
        of = [inspect.signature(each.__init__).parameters for each in (*own, nn.TrainOneStepCell)]
        self.fix("weights", "grad_reducer", "scale_sense", *(name for its in of for name in its if name != "self"))

    def _add_parts(self, steps, settings):
        """Adds what a cell has besides its steps."""

    def _described_networks(self):
        networks = len(self.network) if isinstance(self.network, nn.CellList) else 1
        return {"networks": networks, "network_inputs": self.network_inputs}

    def _inputs_of_step(self, i, inputs):
        """Returns the inputs of a call that step `i` takes."""
        return inputs_of(self._owner, i, self.network_inputs, inputs) if self.each_decides else inputs

    def _returned(self, output):
        """Returns what a call returns: for a network without aux, graph mode can only return None."""
        if not self._has_aux:
            return output
        return (*output[:-1], tuple(() if aux is None else aux for aux in output[-1]))

    def set_inputs(self, *inputs: Any, **kwargs: Any) -> None:
        super().set_inputs(*inputs, **kwargs)
        for step in self.steps:
            step.forwards_and_backwards.set_inputs_of_compiled(inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before_step(args, kwargs)
        with explaining_errors(self):
            output = super().__call__(*args, **kwargs)
        self._guard.after(lambda i: output[1].asnumpy().reshape(-1)[i])
        return self._returned(output) if self.several_networks else output

    def _before_step(self, inputs, keywords=()):
        if self._holds_averages:
            self._refuse_on_averages("a step")
        if keywords or len(inputs) not in self._fitting:
            check_inputs(self, inputs, keywords)
            self._fitting.add(len(inputs))
        if not self._are_compared:
            self.compare_ranks()
        self._guard.before(self)

    def find_loss_scale(self, *inputs: Any) -> Union[float, list[float]]:
        """
        Finds the loss scale to begin with. It runs a batch at powers of two between the `min_loss_scale` and the
        `max_loss_scale` of the :class:`DynamicLossScale`. Then it sets the scale to half of the largest one at which
        nothing overflows, which leaves headroom, but not below `min_loss_scale`.

        Nothing else changes: no weight moves, no step is counted, the update rule takes no step, and side effects of
        the forward are undone. Each scale that is tried costs a forward and a backward. With the default range five are
        tried; graph mode adds one compilation.

        Call `set_train()` first: the networks run in their present mode, and `Model.train` sets it only later. Within
        an accumulation cycle, the scale applies from the next cycle on, as with
        :meth:`ScaledTrainOneStepCell.set_loss_scale`. Several loss scales are searched one after the other; those that
        never move stay as they are. In a parallel job, all ranks must call this, each with its own batch, and find the
        same scale.

        Args:
            *inputs (Any): The inputs of a step.

        Returns:
            float, the loss scale that was set; a list if each network has its own.

        Raises:
            RuntimeError: If the batch overflows at every one of these scales (the message says at which smaller one it
                does not, if any), or if no loss scale is a
                :class:`DynamicLossScale`. The scale then stays as it was.

        Examples:
            >>> import numpy as np
            >>> from mindspore import Tensor, nn
            >>> from mindspore import dtype as mstype
            >>> from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell
            >>> network = nn.Dense(4, 1, weight_init="zeros", bias_init="zeros").to_float(mstype.float16)
            >>> optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
            >>> cell = ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, DynamicLossScale())
            >>> x, y = Tensor(np.ones((8, 4), np.float32)), Tensor(np.full((8, 1), 10.0, np.float32))
            >>> cell.set_train().find_loss_scale(x, y)
            1024.0
            >>> cell.counters()
            {'applied_steps': 0, 'skipped_steps': 0, 'consecutive_skipped_steps': 0}
        """
        return find_loss_scale(self, inputs)


def or_none(aux):
    """Returns aux, but None for an empty tuple, which graph mode can't return within another one."""
    return aux if len(aux) else None
