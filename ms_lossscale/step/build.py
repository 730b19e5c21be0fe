"""Chooses the stages of a step."""

import itertools
from functools import partial

from mindspore import PYNATIVE_MODE, ParameterTuple, get_context, nn, ops

from ms_lossscale._mindspore import Compiled
from ms_lossscale.forward_state.find import may_write_inputs
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.overflow_detector import NoCheck
from ms_lossscale.step.accumulation import Accumulation, CycleState, EveryCall, Flush
from ms_lossscale.step.attempts import Attempt, AttemptCheck, Attempts, CopyOfInputs, GradientCheck
from ms_lossscale.step.clipping import NoClipping, make_clip, make_clipping
from ms_lossscale.step.forward_backward import ForwardBackward, ForwardsAndBackwards, SharedForwardBackward
from ms_lossscale.step.forward_state import make_forward_state
from ms_lossscale.step.found_overflow import (
    FoundOverflow,
    KnownOverflow,
    OfAll,
    OfEach,
    asks_gradients_only,
    make_looks,
)
from ms_lossscale.step.gradient_transforms import Complete, make_before_check, state_of
from ms_lossscale.step.moving_average import MovingAverage
from ms_lossscale.step.optimizers import Optimizers
from ms_lossscale.step.packing import make_packing
from ms_lossscale.step.parameter_names import network_prefix
from ms_lossscale.step.ranks import Alone
from ms_lossscale.step.scaling import CycleScaling, OwnScaling, Scaling, Unscale, UnscaleInClipping
from ms_lossscale.step.step import AfterAttempts, AfterBackward, Decision, Step
from ms_lossscale.step.step_counters import StepCounters
from ms_lossscale.step.trial import Trial
from ms_lossscale.step.update import AlwaysUpdate, Nothing, Undo, Update, UpdateOrUndo


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
    update = stages.update
    accumulation, flush = stages.accumulation_and_flush()
    forward_backwards = _forward_backwards(owner, networks, stages.weights, settings.has_aux, may_return_tuple, number)
    forwards_and_backwards = ForwardsAndBackwards(
        owner, forward_backwards, network_inputs, stages.packing, stages.scale_shape
    )
    attempt = Attempt(stages.detector, forwards_and_backwards, stages.forward_state.memory)
    if settings.max_retries:
        check = stages.compiled(stages.attempt_check())
        attempts = Attempts(
            settings.max_retries,
            attempt,
            check,
            stages.scaling,
            stages.forward_state,
            update.step_counters,
            stages.keep(),
        )
        after_backward = AfterAttempts(accumulation)
    else:
        attempts = attempt
        after_backward = AfterBackward(stages.forward_state, stages.unscale, accumulation)
    return Step(
        scaling=stages.scaling,
        forward_state=stages.forward_state,
        attempts=attempts,
        attempt=attempt,
        after_backward=stages.compiled(after_backward),
        accumulation=accumulation,
        flush_cycle=flush,
        update=update,
        make_trial=partial(stages.trial, attempt),
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
        self._cycle_state = CycleState(steps, all_weights, prefix, self.scale_shape) if steps > 1 else None
        self.forward_state = self._make_forward_state(owner, prefix)
        # A user's own cells get the gradients as they are, and so do the operators that exchange them.
        transforms = settings.gradient_transforms
        packs = not ranks.exchanges and _is_library_cell(self.detector) and not any(transforms)
        self.packing = make_packing(self.weights, packs)
        self._before_check = make_before_check(owner, transforms, self.packing, self._checks)
        self._clipping = _clipping(settings, self.weights, self.packing, ranks, prefix)
        self.scaling = self._make_scaling(loss_scales, prefix)
        self.unscale = self._make_unscale()
        self.update = Update(
            self._clipping,
            self.packing,
            Optimizers(optimizers),
            settings.after_update or Nothing(),
            [MovingAverage(decay, its) for decay, its in zip(settings.ema_decay, self.weights) if decay is not None],
            StepCounters(all_weights, prefix, settings.max_retries > 0),
        )
        self._found_overflow = self._make_found_overflow()
        self.compiled = _compiler(optimizers, loss_scales, self.detector, settings)

    def accumulation_and_flush(self):
        """Which calls make a step, and what ends a cycle before its last call."""
        if self._cycle_state is None:
            return EveryCall(self._decision()), Nothing()
        decision = self._decision()
        of_call = KnownOverflow() if self._settings.max_retries else self._found_in_call(Alone())
        accumulation = Accumulation(self._cycle_state, decision, of_call, self.forward_state, self.packing)
        flush = Flush(self._cycle_state, decision, self.scaling, self.detector, self.packing)
        return accumulation, self.compiled(flush)

    def keep(self):
        """Copies the inputs, where they are run more than once."""
        return CopyOfInputs() if may_write_inputs(self._networks) else nn.Identity()

    def attempt_check(self):
        """Checks attempts, and completes their gradients, in the place of the decision where each call is a step."""
        # In a cycle it is the sum of the calls that is measured.
        found_overflow = self._found_overflow if self._cycle_state is None else self._found_in_call(self._ranks)
        check = self._check(self.forward_state, found_overflow)
        return AttemptCheck(check, self._ranks, self.scaling, self._cycle_state, self._unscaled_losses())

    def trial(self, attempt):
        """What asks whether a call would overflow, and measures nothing."""
        forward_state = self.forward_state.of_one_call()
        check = self._check(forward_state, self._found_in_call(self._ranks))
        scalings = [Scaling(loss_scale) for loss_scale in self.scaling.loss_scales]
        scaling = OwnScaling(scalings) if self._has_own_scales else scalings[0]
        return Trial(scaling, forward_state, attempt, self.compiled(check), self.keep())

    def _check(self, forward_state, found_overflow):
        # In a cycle it is the sum of the calls that is reduced and transformed.
        complete = self._complete() if self._cycle_state is None else Complete(Alone(), [])
        return GradientCheck(forward_state, self.unscale, complete, found_overflow)

    def _unscaled_losses(self):
        # One network may return all losses, and one scale may be that of all.
        losses = zip(
            range(len(self.weights)), itertools.cycle(self._networks), itertools.cycle(self.scaling.loss_scales)
        )
        return tuple(i for i, network, loss_scale in losses if not holds_input_gradient((network,), loss_scale))

    def _make_found_overflow(self):
        looks = make_looks(self.detector, self.packing, self._whose(), norms_suffice=self._clipping.finds_overflow)
        # Where nothing is checked there is nothing to agree on.
        return FoundOverflow(self._clipping, looks, self._ranks if self._checks else Alone())

    def _found_in_call(self, ranks):
        return FoundOverflow(
            NoClipping(len(self.weights)), make_looks(self.detector, self.packing, self._whose()), ranks
        )

    def _whose(self):
        # A new one for each place: of one that stands in two, graph mode forgets how many gradients there are.
        return OfEach(self.packing) if self._has_own_scales and self._checks else OfAll()

    def _complete(self):
        return Complete(self._ranks, self._before_check)

    def _decision(self):
        complete, found_overflow, update_or_undo = self._complete(), self._found_overflow, AlwaysUpdate(self.update)
        if self._settings.max_retries and self._cycle_state is None:
            complete, found_overflow = Complete(Alone(), []), KnownOverflow()
        if self._checks:
            undo = Undo(self.forward_state, self.packing, self.update.step_counters)
            update_or_undo = UpdateOrUndo(self.update, undo)
        return Decision(complete, found_overflow, self.scaling, update_or_undo)

    def _make_forward_state(self, owner, prefix):
        # A transform runs before the overflow check, as the forward does: what it writes is restored alike.
        transforms = tuple(dict.fromkeys(itertools.chain(*self._settings.gradient_transforms)))
        declared = (*self._settings.forward_state, *state_of(transforms, self._networks))
        return make_forward_state(
            owner,
            (*self._networks, *transforms),
            declared,
            self._checks,
            self._cycle_state,
            prefix,
            restores_calls=self._settings.max_retries > 0,
        )

    def _make_scaling(self, loss_scales, prefix):
        scalings = []
        for i, loss_scale in enumerate(loss_scales):
            if self._cycle_state is None:
                scalings.append(Scaling(loss_scale))
            else:
                its_prefix = network_prefix(i) if self._has_own_scales else prefix
                steps = self._settings.gradient_accumulation_steps
                scalings.append(CycleScaling(loss_scale, self._cycle_state, steps, its_prefix))
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
