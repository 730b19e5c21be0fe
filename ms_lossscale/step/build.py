"""Chooses the stages of a step."""

import itertools
from functools import partial

from mindspore import PYNATIVE_MODE, ParameterTuple, get_context, nn, ops

from ms_lossscale._mindspore import Compiled
from ms_lossscale.forward_state.find import may_write_inputs
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.overflow_detector import NoCheck
from ms_lossscale.step.accumulation import CycleState
from ms_lossscale.step.attempts import AttemptCheck, Attempts, CopyOfInputs, GradientCheck, Trial
from ms_lossscale.step.clipping import make_clip, make_clipping
from ms_lossscale.step.forward_backward import ForwardBackward, ForwardsAndBackwards, SharedForwardBackward
from ms_lossscale.step.forward_state import make_forward_state
from ms_lossscale.step.found_overflow import KnownOverflow, asks_gradients_only, make_found_overflow
from ms_lossscale.step.gradient_transforms import Complete, make_before_check, state_of
from ms_lossscale.step.optimizers import Optimizers, network_prefix
from ms_lossscale.step.packing import make_packing
from ms_lossscale.step.scaling import CycleScaling, OwnScaling, Scaling, Unscale, UnscaleInClipping
from ms_lossscale.step.stage import Alone, Clipping
from ms_lossscale.step.step import Accumulation, AfterAttempts, AfterBackward, Decision, Flush, Step
from ms_lossscale.step.update import MovingAverage, StepCounters, Undo, Update


def build_step(
    owner,
    networks,
    optimizers,
    loss_scales,
    settings,
    ranks,
    *,
    network_inputs=None,
    may_return_tuple=False,
    prefix="",
    number=0,
):
    """
    The step of N networks and N optimizers that share one overflow check and one conditional update.

    Args:
        owner (str): The name of the user's cell, for error messages.
        networks (tuple[Cell]): One loss cell for each optimizer, or one cell that returns a loss for each.
        optimizers (tuple[Cell]): The optimizers, checked.
        loss_scales (Union[LossScale, list[LossScale]]): One that the networks share, or a list with one for each.
        settings (Settings): All else that was passed.
        ranks (Union[Alone, Ranks]): Who else takes part.
        network_inputs (Union[tuple, None]): Positions of the inputs that each network takes; None means all.
        may_return_tuple (bool): Whether a network may return its one loss as a tuple of one.
        prefix (str): For the names of the Parameters that each of several steps has.
        number (int): The first network's number in the cell, for error messages.

    Returns:
        Step.
    """
    stages = _Stages(owner, networks, optimizers, loss_scales, settings, ranks, prefix)
    forward_backwards = _forward_backwards(owner, networks, stages.weights, settings.has_aux, may_return_tuple, number)
    forwards_and_backwards = ForwardsAndBackwards(
        owner,
        forward_backwards,
        network_inputs,
        stages.packing,
        stages.scale_shape,
        stages.detector,
        stages.forward_state.memory,
    )
    decision = stages.decision()
    after_backward, attempts = stages.after_backward_and_attempts(decision, forwards_and_backwards)
    return Step(
        scaling=stages.scaling,
        forward_state=stages.forward_state,
        forwards_and_backwards=forwards_and_backwards,
        attempts=attempts,
        after_backward=after_backward,
        decision=decision,
        cycle_state=stages.cycle_state,
        flush_cycle=stages.flush(decision),
        make_trial=partial(stages.trial, forwards_and_backwards),
    )


class _Stages:
    """The stages of a step that others are made with, and how those are made. Args as of :func:`build_step`."""

    def __init__(self, owner, networks, optimizers, loss_scales, settings, ranks, prefix):
        self._networks, self._settings, self._ranks = networks, settings, ranks
        self._has_own_scales = isinstance(loss_scales, list)
        loss_scales = loss_scales if self._has_own_scales else [loss_scales]
        self.scale_shape = (len(loss_scales),) if self._has_own_scales else ()
        self._checks = _check_loss_scales(owner, loss_scales, settings.max_retries)
        self.detector = settings.overflow_detector if self._checks else NoCheck()
        self.weights = [optimizer.parameters for optimizer in optimizers]
        _refuse_sparse(owner, networks)
        all_weights = ParameterTuple([weight for its in self.weights for weight in its])
        steps = settings.gradient_accumulation_steps
        self.cycle_state = CycleState(steps, all_weights, prefix, self.scale_shape) if steps > 1 else None
        self.forward_state = self._make_forward_state(owner, prefix)
        # A user's own cells get the gradients as they are, and so do the operators that exchange them.
        transforms = settings.gradient_transforms
        packs = not ranks.exchanges and _is_library_cell(self.detector) and not any(transforms)
        self.packing = make_packing(self.weights, packs)
        self._before_check = make_before_check(owner, transforms, self.packing, self._checks)
        self._clipping = _clipping(settings, self.weights, self.packing, ranks, prefix)
        self.scaling = self._make_scaling(loss_scales, prefix)
        self._unscale = self._make_unscale()
        self._step_counters = StepCounters(all_weights, prefix, settings.max_retries > 0)
        averages = zip(settings.ema_decay, self.weights)
        self._update = Update(
            clipping=self._clipping,
            packing=self.packing,
            optimizers=Optimizers(optimizers),
            after_update=[] if settings.after_update is None else [settings.after_update],
            moving_averages=[MovingAverage(decay, its) for decay, its in averages if decay is not None],
            step_counters=self._step_counters,
        )
        self._compiled = _compiler(optimizers, loss_scales, self.detector, settings)

    def after_backward_and_attempts(self, decision, forwards_and_backwards):
        """What follows the networks, and how often they run."""
        end_of_call = decision if self.cycle_state is None else self._accumulation(decision)
        if not self._settings.max_retries:
            after_backward = AfterBackward(
                forward_state=self.forward_state, unscale=self._unscale, end_of_call=end_of_call
            )
            return self._compiled(after_backward), forwards_and_backwards
        attempts = Attempts(
            self._settings.max_retries,
            forwards_and_backwards,
            self._compiled(self._attempt_check()),
            self.scaling,
            self.forward_state,
            self._step_counters,
            self._keep(),
        )
        return self._compiled(AfterAttempts(end_of_call=end_of_call)), attempts

    def decision(self):
        """What ends a step."""
        complete, clipping, found_overflow = self._complete(), self._clipping, self._found_overflow()
        if self._settings.max_retries and self.cycle_state is None:
            complete, clipping, found_overflow = nn.Identity(), self._no_clipping(), KnownOverflow()
        undo = None
        if self._checks:
            undo = Undo(forward_state=self.forward_state, packing=self.packing, step_counters=self._step_counters)
        return Decision(
            complete=complete,
            clipping=clipping,
            found_overflow=found_overflow,
            scaling=self.scaling,
            update=self._update,
            undo=undo,
        )

    def flush(self, decision):
        """What ends a cycle before its last call."""
        if self.cycle_state is None:
            return None
        flush = Flush(
            state=self.cycle_state,
            decision=decision,
            scaling=self.scaling,
            overflow_detector=self.detector,
            packing=self.packing,
        )
        return self._compiled(flush)

    def trial(self, attempt):
        """What asks whether a call would overflow, and measures nothing."""
        forward_state = self.forward_state.of_one_call()
        scalings = [Scaling(loss_scale) for loss_scale in self.scaling.loss_scales]
        check = self._check(forward_state, self._no_clipping(), self._found_in_call(self._ranks))
        return Trial(
            scaling=OwnScaling(scalings) if self._has_own_scales else scalings[0],
            forward_state=forward_state,
            attempt=attempt,
            check=self._compiled(check),
            keep=self._keep(),
        )

    def _accumulation(self, decision):
        return Accumulation(
            state=self.cycle_state,
            decision=decision,
            found_in_call=KnownOverflow() if self._settings.max_retries else self._found_in_call(Alone()),
            forward_state=self.forward_state,
            packing=self.packing,
        )

    def _keep(self):
        """Copies the inputs, where they are run more than once."""
        return CopyOfInputs() if may_write_inputs(self._networks) else nn.Identity()

    def _attempt_check(self):
        """Checks attempts, and completes their gradients, in the place of the decision where each call is a step."""
        clipping, found_overflow = self._clipping, self._found_overflow()
        if self.cycle_state is not None:
            # It is the sum of the calls that is measured.
            clipping, found_overflow = self._no_clipping(), self._found_in_call(self._ranks)
        return AttemptCheck(
            check=self._check(self.forward_state, clipping, found_overflow),
            ranks=self._ranks,
            scaling=self.scaling,
            cycle_state=self.cycle_state,
            unscaled_losses=self._unscaled_losses(),
        )

    def _check(self, forward_state, clipping, found_overflow):
        return GradientCheck(
            forward_state=forward_state,
            unscale=self._unscale,
            # In a cycle it is the sum of the calls that is reduced and transformed.
            complete=self._complete() if self.cycle_state is None else nn.Identity(),
            clipping=clipping,
            found_overflow=found_overflow,
        )

    def _unscaled_losses(self):
        # One network may return all losses, and one scale may be that of all.
        losses = zip(
            range(len(self.weights)), itertools.cycle(self._networks), itertools.cycle(self.scaling.loss_scales)
        )
        return tuple(i for i, network, loss_scale in losses if not holds_input_gradient((network,), loss_scale))

    # A new one for each place: of one that stands in two, graph mode forgets how many gradients there are.

    def _found_overflow(self):
        # Where nothing is checked there is nothing to agree on.
        ranks = self._ranks if self._checks else Alone()
        suffice = self._clipping.finds_overflow
        return make_found_overflow(self.detector, ranks, self.packing, self._tells_whose(), norms_suffice=suffice)

    def _found_in_call(self, ranks):
        return make_found_overflow(self.detector, ranks, self.packing, self._tells_whose())

    def _no_clipping(self):
        return Clipping(len(self.weights))

    def _tells_whose(self):
        return self._has_own_scales and self._checks

    def _complete(self):
        stages = [self._ranks.grad_reducer] if self._ranks.exchanges else []
        stages += self._before_check
        return Complete(stages=stages) if stages else nn.Identity()

    def _make_forward_state(self, owner, prefix):
        # A transform runs before the overflow check, as the forward does: what it writes is restored alike.
        transforms = tuple(dict.fromkeys(itertools.chain(*self._settings.gradient_transforms)))
        declared = (*self._settings.forward_state, *state_of(transforms, self._networks))
        return make_forward_state(
            owner,
            (*self._networks, *transforms),
            declared,
            self._checks,
            self.cycle_state,
            prefix,
            restores_calls=self._settings.max_retries > 0,
        )

    def _make_scaling(self, loss_scales, prefix):
        scalings = []
        for i, loss_scale in enumerate(loss_scales):
            if self.cycle_state is None:
                scalings.append(Scaling(loss_scale))
            else:
                its_prefix = network_prefix(i) if self._has_own_scales else prefix
                steps = self._settings.gradient_accumulation_steps
                scalings.append(CycleScaling(loss_scale, self.cycle_state, steps, its_prefix))
        return OwnScaling(scalings) if self._has_own_scales else scalings[0]

    def _make_unscale(self):
        # A cycle's sum, a detector, the other ranks and what comes before the check get gradients that are divided.
        steps = self._settings.gradient_accumulation_steps
        if (
            self._clipping.unscales
            and asks_gradients_only(self.detector)
            and not self._ranks.exchanges
            and not self._before_check
            and steps == 1
        ):
            return UnscaleInClipping()
        return Unscale(1.0 / steps, self.packing if self._has_own_scales else None)


def _check_loss_scales(owner, loss_scales, max_retries):
    """Whether anything is checked, which all loss scales say alike."""
    for loss_scale in loss_scales:
        if max_retries and not (loss_scale.drop_overflow_update and loss_scale.backs_off):
            raise ValueError(
                f"For '{owner}', the argument 'max_retries' must be 0 with a loss scale that never backs off, since a "
                f"step would overflow again, but got {max_retries} and a {type(loss_scale).__name__}. Pass a "
                f"DynamicLossScale, say."
            )
        loss_scale.fix("drop_overflow_update")
    return loss_scales[0].drop_overflow_update


def _refuse_sparse(owner, networks):
    """Where this operator is, graph mode does not know what any gradient is until it has compiled the whole step."""
    for _, cell in itertools.chain(*(network.cells_and_names() for network in networks)):
        if any(isinstance(each, ops.SparseGatherV2) for each in vars(cell).values()):
            raise ValueError(
                f"For '{owner}', all gradients must be dense, but a network has a '{type(cell).__name__}', whose "
                f"operator SparseGatherV2 makes sparse ones (RowTensor). Use nn.Embedding instead."
            )


def _clipping(settings, weights, packing, ranks, prefix):
    clips = []
    for i, its_weights in enumerate(weights):
        its_prefix = prefix if len(weights) == 1 else network_prefix(i)
        clips.append(make_clip(settings.clip_norm[i], settings.clip_value[i], its_weights, ranks, its_prefix))
    return make_clipping(clips, packing)


def _forward_backwards(owner, networks, weights, has_aux, may_return_tuple, number):
    if len(networks) == len(weights):
        return [
            ForwardBackward(network, its_weights, its_has_aux, owner, i, may_return_tuple)
            for i, (network, its_weights, its_has_aux) in enumerate(zip(networks, weights, has_aux), number)
        ]
    return [SharedForwardBackward(networks[0], weights, has_aux[0], owner)]


def _compiler(optimizers, loss_scales, detector, settings):
    """
    What makes one compiled graph of a cell in PyNative mode, where what follows the gradients is compiled, too, as
    MindSpore's nn optimizers are.

    But a user's own cell runs in Python there, as it is written, and so does an optimizer that reads its settings in
    each step.
    """
    cells = (*optimizers, *loss_scales, detector, *itertools.chain(*settings.gradient_transforms))
    in_python = (
        settings.after_update is not None
        or not all(isinstance(optimizer, nn.Optimizer) for optimizer in optimizers)
        or not all(map(_is_library_cell, cells))
    )
    if get_context("mode") == PYNATIVE_MODE and not in_python:
        return Compiled
    return _as_it_is


def _as_it_is(cell):
    return cell


def _is_library_cell(cell):
    return type(cell).__module__.partition(".")[0] in ("mindspore", "ms_lossscale")
