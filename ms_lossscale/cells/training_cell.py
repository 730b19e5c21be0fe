"""The base class of the training cells: how they are built, and what happens around a call."""

from typing import Any, Generic, Union

from mindspore import nn

from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._training_hooks import TrainingHooks
from ms_lossscale.cells.call_types import Aux
from ms_lossscale.cells.find_loss_scale import LossScaleSearch
from ms_lossscale.cells.first_call import CallCheck
from ms_lossscale.cells.fixed_arguments import fixed_arguments
from ms_lossscale.cells.guard import explaining_errors
from ms_lossscale.cells.inner_gradients import InnerGradients
from ms_lossscale.cells.rank_comparison import check_parallel
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.loss_scale import as_loss_scale
from ms_lossscale.step.build import build_step
from ms_lossscale.step.forward_backward import check_network_inputs, noticing_gradients
from ms_lossscale.step.gradient_transforms import prefix_own_states
from ms_lossscale.step.optimizers import Optimizers, check_optimizers, prefix_states


class TrainingCell(TrainingState, TrainingHooks, Generic[Aux]):
    """
    Base class of the training cells. It has one step, with one loss scale, for several networks. What is different in
    a cell, its class answers: the methods around the constructor, and `construct`.
    """

    def __init__(self, networks, optimizers, loss_scales, settings, *, network_inputs=None, may_return_tuple=False):
        owner = type(self).__name__
        check_optimizers(owner, optimizers, networks)
        network_inputs = check_network_inputs(owner, network_inputs, networks)
        loss_scales = [self._accepted(owner, loss_scale) for loss_scale in loss_scales]
        check_parallel(owner, settings)
        prefix_states(optimizers)
        prefix_own_states([its for each in settings for its in each.gradient_transforms], networks)
        prefix_own_states([its.skip_conditions for its in settings], networks, "condition")
        super().__init__(
            networks[0] if len(networks) == 1 else nn.CellList(list(networks), auto_prefix=False),
            optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers),
        )
        self.network_inputs = network_inputs
        self._owner = owner
        self._settings = settings
        self._has_aux = any(any(its.has_aux) for its in settings)
        steps = self._build_steps(networks, optimizers, loss_scales, may_return_tuple)
        self._look_after(steps, optimizers, settings)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))
        self._check_call = CallCheck(self)
        self._inner_gradients = InnerGradients(owner, self.several_networks)
        # Those of `find_loss_scale`. What refers to this cell itself would keep it, and its memory, after its last use.
        self._trials = []
        self.fix(*fixed_arguments(type(self), TrainingCell))

    @staticmethod
    def _accepted(owner, loss_scale):
        """Returns the loss scale of a step, a list of them if each of its networks has its own."""
        return as_loss_scale(owner, loss_scale)

    def _build_steps(self, networks, optimizers, loss_scales, may_return_tuple):
        step = build_step(
            self._owner,
            networks,
            optimizers,
            loss_scales[0],
            self._settings[0],
            self._ranks(self.grad_reducer, self._settings[0]),
            network_inputs=self.network_inputs,
            may_return_tuple=may_return_tuple,
        )
        return [step]

    def _described_networks(self):
        networks = len(self.network) if isinstance(self.network, nn.CellList) else 1
        return {"networks": networks, "network_inputs": self.network_inputs}

    def _inputs_of_step(self, i, inputs):
        """Returns the inputs of a call that step `i` takes."""
        return inputs

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
        self._refuse_on_averages("a step")
        self._before_step(args, kwargs)
        with explaining_errors(self), noticing_gradients(self._inner_gradients.notice):
            output = super().__call__(*args, **kwargs)
        if self._inner_gradients.taken_in is not None:
            self._inner_gradients.warn()
        self._guard.after(lambda i: output[1].asnumpy().reshape(-1)[i])
        self.warnings.after_call()
        return self._returned(output)

    def _before_step(self, inputs, keywords=()):
        if keywords or len(inputs) not in self._check_call.fitting_counts:
            self._check_call(inputs, keywords)
        if not self._are_compared:
            self.compare_ranks()
        self._guard.before(self.parameters_dict)

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
        return LossScaleSearch(self, self._trials).find(inputs)


def or_none(aux):
    """Returns aux, but None for an empty tuple, which graph mode can't return within another one."""
    return aux if len(aux) else None
