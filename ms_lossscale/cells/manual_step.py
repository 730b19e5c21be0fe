"""A training step around a forward and backward of the user's own."""

import weakref
from collections.abc import Sequence
from typing import Any, Optional, Union

import mindspore
from mindspore import Parameter, ParameterTuple, Tensor, nn

from ms_lossscale._arguments import AfterUpdate, OneOrEach, check_cells, check_int_from, describe
from ms_lossscale._gradients import of_network
from ms_lossscale._mindspore import Float32Cell
from ms_lossscale.cells.argument_order import check_order
from ms_lossscale.cells.guard import explaining_errors
from ms_lossscale.cells.rank_comparison import check_parallel
from ms_lossscale.cells.training_state import TrainingState
from ms_lossscale.loss_scale import AcceptedLossScale, as_loss_scale
from ms_lossscale.overflow_detector import OverflowDetector
from ms_lossscale.step.build import build_manual_step
from ms_lossscale.step.gradient_transforms import prefix_own_states
from ms_lossscale.step.optimizers import Optimizers, check_optimizers, prefix_states
from ms_lossscale.step.own_loss_scales import own_loss_scales
from ms_lossscale.step.scaling import scaled
from ms_lossscale.step.settings import check_settings, transforms_of_each


class ManualStep(TrainingState, Float32Cell):
    def __init__(
        self,
        networks: Union[nn.Cell, Sequence[nn.Cell]],
        optimizers: Union[nn.Cell, Sequence[nn.Cell]],
        loss_scale: OneOrEach[AcceptedLossScale] = None,
        *,
        gradient_accumulation_steps: int = 1,
        clip_norm: OneOrEach[Optional[float]] = None,
        clip_value: OneOrEach[Optional[float]] = None,
        ema_decay: OneOrEach[Optional[float]] = None,
        forward_state: Sequence[Parameter] = (),
        gradient_transforms: Union[Sequence[nn.Cell], Sequence[Sequence[nn.Cell]]] = (),
        after_update: Optional[AfterUpdate] = None,
        overflow_detector: Optional[OverflowDetector] = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        owner = type(self).__name__
        check_order(owner, networks=networks, optimizers=optimizers, loss_scale=loss_scale)
        self.several_networks = isinstance(optimizers, (list, tuple, nn.CellList))
        optimizers = check_cells(owner, "optimizers", optimizers if self.several_networks else [optimizers])
        networks = check_cells(owner, "networks", networks if _are_several(networks) else [networks])
        check_optimizers(owner, optimizers, networks, are_pairs=False)
        count = len(optimizers)
        settings = check_settings(
            owner,
            count,
            gradient_accumulation_steps=gradient_accumulation_steps,
            clip_norm=clip_norm,
            clip_value=clip_value,
            ema_decay=ema_decay,
            has_aux=False,
            forward_state=forward_state,
            gradient_transforms=transforms_of_each(owner, gradient_transforms, count),
            after_update=after_update,
            overflow_detector=overflow_detector,
            max_retries=0,
        )
        self.each_has_scale = isinstance(loss_scale, (list, tuple))
        loss_scales = (
            own_loss_scales(owner, loss_scale) if self.each_has_scale else as_loss_scale(owner, loss_scale)
        )
        check_parallel(owner, [settings])
        prefix_states(optimizers)
        prefix_own_states(settings.gradient_transforms, networks)
        self.networks = nn.CellList(list(networks), auto_prefix=False)
        self.optimizer = optimizers[0] if count == 1 else Optimizers(optimizers)
        weights = tuple(ParameterTuple(its.parameters) for its in optimizers)
        self.parameters = weights if self.several_networks else weights[0]
        self._join_ranks()
        ranks = self._ranks(self.grad_reducer)
        step, stages = build_manual_step(owner, networks, optimizers, loss_scales, settings, ranks)
        self._held, self._has_begun = stages.held, False
        self._look_after([step], optimizers, [settings])
        self.begin = Begin(self, stages.begin, stages.run_begin)
        self.end = End(self, stages.end, stages.run_end)

    def _join_ranks(self):
        """Takes MindSpore's reducer of the gradients."""
        self.parallel_mode = mindspore.get_auto_parallel_context("parallel_mode")
        self.reducer_flag, self.mean = self.parallel_mode != "stand_alone", None
        self.grad_reducer = nn.Identity()
        if self.reducer_flag:
            stock = nn.TrainOneStepCell(self.networks, self.optimizer)
            self.reducer_flag, self.mean, self.grad_reducer = stock.reducer_flag, stock.mean, stock.grad_reducer

    def scale(self, loss: Tensor, number: int = 0) -> Tensor:
        """
        Multiplies a loss by the loss scale of the step, to be differentiated.

        Args:
            loss (Tensor): The loss, of any shape.
            number (int): The number of the optimizer whose weights it trains, if each has its own scale.
                Default: ``0`` .

        Returns:
            Tensor, float32 of the loss's shape.
        """
        return scaled(loss, of_network(number, self._held.scale))

    def construct(self, *inputs):
        raise RuntimeError("A ManualStep is not called: call its begin(*inputs) and end(grads) around your own forward and backward.")

    def _begin_call(self, begin):
        self._refuse_on_averages("a step")
        if not self._are_compared:
            self.compare_ranks()
        self._guard.before(self.parameters_dict)
        if not self._held.fits():
            self._held.fit()
        with explaining_errors(self):
            begin(self._held.token)
        self._has_begun = True

    def _end_call(self, end, grads, loss):
        if not self._has_begun and not self._held.is_open.asnumpy():
            raise RuntimeError(
                f"For '{type(self).__name__}', 'end()' ends a step that 'begin()' has begun, but none has. Call "
                f"begin(*inputs) before the forward, in each step, and run the forward on what it returns."
            )
        flat = self._checked(grads)
        with explaining_errors(self):
            overflow = end(*flat)
        self._has_begun = False
        self._guard.after(lambda _: overflow.asnumpy())
        self.endless_skips.after_call((loss, overflow, self._held.scale))
        return overflow

    def _checked(self, grads):
        """Returns the gradients as one flat tuple. Raises unless there is one of its shape for each weight."""
        weights = self.parameters if self.several_networks else (self.parameters,)
        owner = f"{type(self).__name__}.end"
        if len(grads) != len(weights):
            raise ValueError(
                f"For '{owner}', there must be a tuple of gradients for each of the {len(weights)} optimizers, but got "
                f"{len(grads)}. Pass them in the order of the optimizers, each in the order of its parameters."
            )
        for i, (its_grads, its_weights) in enumerate(zip(grads, weights)):
            of_optimizer = f" of optimizer {i}" if self.several_networks else ""
            if not isinstance(its_grads, (tuple, list)) or not all(isinstance(its, Tensor) for its in its_grads):
                raise TypeError(
                    f"For '{owner}', the gradients{of_optimizer} must be a tuple of Tensors, one for each of its "
                    f"weights, but got {describe(its_grads)}."
                )
            if len(its_grads) != len(its_weights):
                raise ValueError(
                    f"For '{owner}', there must be a gradient for each of the {len(its_weights)} weights{of_optimizer}, "
                    f"but got {len(its_grads)}. Differentiate by the ParameterTuple 'parameters' of this step."
                )
            for grad, weight in zip(its_grads, its_weights):
                if grad.shape != weight.shape:
                    raise ValueError(
                        f"For '{owner}', the gradient of '{weight.name}' must have its shape {tuple(weight.shape)}, but "
                        f"got {tuple(grad.shape)}. Pass the gradients in the order of the step's 'parameters'."
                    )
        return [grad for its_grads in grads for grad in its_grads]


def _are_several(networks):
    return isinstance(networks, (list, tuple)) or type(networks) is nn.CellList


class _Part(nn.Cell):
    """The beginning or the end of a call. Compiled code knows only `construct`; `__call__` checks before and after."""

    def __init__(self, manual_step, part, run):
        super().__init__(auto_prefix=False)
        self.part = part
        # Hidden from MindSpore; and no reference that would keep the step itself alive.
        object.__setattr__(self, "_run", run)
        object.__setattr__(self, "_manual_step", weakref.ref(manual_step))


class Begin(_Part):
    def __call__(self, *inputs):
        self._manual_step()._begin_call(self._run)
        return inputs[0] if len(inputs) == 1 else inputs

    def construct(self, *inputs):
        inputs = self.part(*inputs)
        return inputs[0] if len(inputs) == 1 else inputs


class End(_Part):
    def __call__(self, *grads, loss=None, weight=None):
        return self._manual_step()._end_call(self._run, grads, loss)

    def construct(self, *grads, loss=None, weight=None):
        flat = ()
        for its in grads:
            flat += its
        return self.part(*flat)
