"""Chooses the stages of a step."""

import itertools
from functools import partial

import numpy as np
from mindspore import PYNATIVE_MODE, get_context, nn, ops

from ms_lossscale._mindspore import Compiled, is_library_cell
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.overflow_detector import NoCheck
from ms_lossscale.step.cause import Cause, CycleCause, PatientScales
from ms_lossscale.step.check_of_call import CheckOfCall
from ms_lossscale.step.clipping import make_clip, make_clipping
from ms_lossscale.step.conditions import AskedConditions
from ms_lossscale.step.cycle import Accumulation, EndOfCall, Flush
from ms_lossscale.step.cycle_state import CycleState
from ms_lossscale.step.forward_backward import ForwardBackward, ForwardsAndBackwards, SharedForwardBackward
from ms_lossscale.step.forward_state import make_forward_state
from ms_lossscale.step.found_overflow import make_found_overflow
from ms_lossscale.step.gradient_transforms import stages_before_check, state_of
from ms_lossscale.step.held_call import BeginCall, EndCall, HeldCall, ManualStages, OwnForward
from ms_lossscale.step.kept_inputs import KeptInputs
from ms_lossscale.step.optimizers import Optimizers, network_prefix, updating
from ms_lossscale.step.packing import make_packing
from ms_lossscale.step.retries import AttemptCheck, EndOfRetriedCall, EndOfRetriedStep, RetriedStep
from ms_lossscale.step.scaling import CycleScaling, OwnScaling, Scaling, Unscale
from ms_lossscale.step.stage import Alone, Clipping, Conditions, Mean
from ms_lossscale.step.step import Check, Decision, End, Step
from ms_lossscale.step.step_counters import StepCounters
from ms_lossscale.step.trial import Trial
from ms_lossscale.step.update import MovingAverage, Undo, Update
from ms_lossscale.step.weighting import WeightedMean


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
    Builds the step of N networks and N optimizers that share one overflow check and one conditional update.

    Args:
        owner (str): The name of the user's cell, for error messages.
        networks (tuple[Cell]): One loss cell for each optimizer, or one cell that returns a loss for each.
        optimizers (tuple[Cell]): The optimizers, checked.
        loss_scales (Union[LossScale, list[LossScale]]): One that the networks share, or a list with one for each.
        settings (Settings): All other settings.
        ranks (Alone): The ranks that train together.
        network_inputs (Union[tuple, None]): Positions of the inputs that each network takes; None means all.
        may_return_tuple (bool): Whether a network may return its one loss as a tuple of one.
        prefix (str): What the step's Parameter names begin with, if the cell has several steps.
        number (int): The first network's number in the cell, for error messages.
    """
    stages = _Stages(owner, networks, optimizers, loss_scales, settings, ranks, prefix)
    forwards_and_backwards = ForwardsAndBackwards(
        owner,
        _forward_backwards(owner, networks, stages.weights, settings, may_return_tuple, number),
        network_inputs,
        stages.packing,
        stages.scale_shape,
        stages.overflow_detector,
        stages.forward_state.memory,
    )
    return stages.step(forwards_and_backwards)


def build_manual_step(owner, networks, optimizers, loss_scales, settings, ranks):
    """
    Builds the step of N optimizers around a forward and backward of the user's own. Arguments as in
    :func:`build_step`, but `networks` are all that the forward runs. Returns the step, and how a call of it begins and
    ends.
    """
    stages = _Stages(owner, networks, optimizers, loss_scales, settings, ranks, "", is_manual=True)
    step = stages.step(OwnForward(networks, stages.packing, stages.overflow_detector), _as_it_is)
    held = HeldCall(stages.forward_state, stages.scale_shape)
    return step, ManualStages(held, BeginCall(step, held), EndCall(step, held), stages.compiled)


class _Stages:
    """
    Makes the stages of a step. Arguments as in :func:`build_step`. If it `is_manual`, a call of a cycle can be undone
    alone, and may come with one loss and with weights, or without.
    """

    def __init__(self, owner, networks, optimizers, loss_scales, settings, ranks, prefix, is_manual=False):
        _refuse_sparse(owner, networks)
        self._networks, self._settings, self._ranks = networks, settings, ranks
        self._has_own_scales = isinstance(loss_scales, list)
        loss_scales = loss_scales if self._has_own_scales else [loss_scales]
        self.scale_shape = (len(loss_scales),) if self._has_own_scales else ()
        self.checks = _check_loss_scales(owner, loss_scales, settings.max_retries)
        self.weights = [optimizer.parameters for optimizer in optimizers]
        self.overflow_detector = settings.overflow_detector if self.checks else NoCheck()
        self._weighted = (True,) * len(self.weights) if is_manual else settings.weighted
        self._cycles_weighted = None if is_manual else any(settings.weighted)
        self._losses = 1 if is_manual else len(self.weights)
        self._may_skip = self.checks or bool(settings.skip_conditions)
        self._cycle_state = self._make_cycle_state(prefix)
        self.compiled = _compiler(optimizers, loss_scales, self.overflow_detector, settings)
        names = [parameter.name for optimizer in optimizers for parameter in optimizer.get_parameters()]
        restores_calls = is_manual or settings.max_retries > 0
        self.forward_state = self._make_forward_state(owner, prefix, names, restores_calls)
        # A user's own cells get the gradients unpacked, and so do the operators that exchange them.
        transforms = settings.gradient_transforms
        packs = self.checks and not ranks.exchanges and is_library_cell(self.overflow_detector) and not any(transforms)
        self.packing = make_packing(self.weights, packs)
        self._before_check = stages_before_check(owner, ranks, transforms, self.packing, self.checks)
        self._clipping = _clipping(settings, self.weights, self.packing, ranks, prefix)
        self._scaling = self._make_scaling(loss_scales, prefix)
        self._mean = self._make_mean()
        self._cause = self._make_cause(loss_scales, prefix)
        conditions = self._make_conditions()
        all_weights = [weight for its in self.weights for weight in its]
        step_counters = StepCounters(all_weights, prefix, settings.max_retries > 0, conditions.asks)
        averages = zip(settings.ema_decay, self.weights)
        self._update = Update(
            self._clipping,
            self.packing,
            Optimizers(optimizers),
            [] if settings.after_update is None else [settings.after_update],
            [MovingAverage(decay, its) for decay, its in averages if decay is not None],
            conditions,
            step_counters,
        )
        undo = Undo(self.forward_state, self.packing, self._cause, step_counters)
        self._decision = Decision(conditions, self._cause, self._scaling, self._update, undo, self._may_skip)

    def step(self, forwards_and_backwards, compiled=None):
        """Makes the step, given the stage that runs its networks. `compiled` makes one graph of its end."""
        compiled = compiled or self.compiled
        stages = {
            "scaling": self._scaling,
            "forward_state": self.forward_state,
            "forwards_and_backwards": forwards_and_backwards,
            "end": compiled(self._end() if self._cycle_state is None else self._end_in_cycle()),
            "cause": self._cause,
            "update": self._update,
            "cycle_state": self._cycle_state,
            "flush_cycle": None if self._cycle_state is None else self.compiled(self._flush()),
            "make_trial": partial(self._trial, forwards_and_backwards),
        }
        if not self._settings.max_retries:
            return Step(**stages)
        check_attempt = AttemptCheck(
            self._check_of_call(self.forward_state, measures=self._cycle_state is None),
            self._ranks,
            self._scaling,
            self._cycle_state,
            self._unscaled_losses(),
        )
        return RetriedStep(
            self._settings.max_retries, self.compiled(check_attempt), KeptInputs(self._networks), **stages
        )

    def _end(self):
        if self._settings.max_retries:
            return EndOfRetriedStep(self._decision)
        return End(self.forward_state, self._unscale(), self._mean, self._check(), self._decision)

    def _end_in_cycle(self):
        is_retried = self._settings.max_retries > 0
        accumulation = Accumulation(
            self._cycle_state,
            self.packing,
            self.forward_state,
            self._mean,
            self._cause,
            None if is_retried else self._check_of_gradients(Alone()),
            self._check(),
            self._decision,
        )
        if is_retried:
            return EndOfRetriedCall(accumulation)
        return EndOfCall(self.forward_state, self._unscale(), accumulation)

    def _flush(self):
        return Flush(
            self._cycle_state,
            self.packing,
            self.forward_state,
            self._mean,
            self.overflow_detector,
            self._scaling,
            self._check(),
            self._decision,
        )

    def _trial(self, forwards_and_backwards):
        """Makes the stage that tells whether a call would overflow. It does not measure norms."""
        scalings = [Scaling(loss_scale) for loss_scale in self._scaling.loss_scales]
        forward_state = self.forward_state.of_one_call()
        return Trial(
            OwnScaling(scalings) if self._has_own_scales else scalings[0],
            forward_state,
            KeptInputs(self._networks),
            forwards_and_backwards,
            self.compiled(self._check_of_call(forward_state, measures=False)),
        )

    # Checks are made anew for each place: if one cell is used in two places, graph mode forgets how many gradients
    # there are.

    def _check_of_call(self, forward_state, measures):
        # In a cycle, the sum is divided by its weights, reduced and transformed, not each call.
        mean = self._mean
        if self._cycle_state is not None:
            mean, check = Mean(), self._check_of_gradients(self._ranks)
        elif measures:
            check = self._check()
        else:
            check = self._check_of_gradients(self._ranks, self._before_check)
        return CheckOfCall(forward_state, self._unscale(), mean, check)

    def _check_of_gradients(self, ranks, before_check=()):
        return Check(before_check, Clipping(len(self.weights)), self._found_overflow(False), ranks)

    def _check(self):
        # Where nothing is checked there is nothing to agree on.
        ranks = self._ranks if self.checks else Alone()
        found_overflow = self._found_overflow(self._clipping.finds_overflow)
        return Check(self._before_check, self._clipping, found_overflow, ranks)

    def _found_overflow(self, norms_suffice):
        tells_whose = self._has_own_scales and self.checks
        return make_found_overflow(self.overflow_detector, self.packing, tells_whose, norms_suffice)

    def _unscale(self):
        share = 1.0 / self._settings.gradient_accumulation_steps
        return Unscale(share, self.packing if self._has_own_scales else None)

    def _unscaled_losses(self):
        # One network may return all losses, and they may share one scale.
        losses = zip(
            range(len(self.weights)), itertools.cycle(self._networks), itertools.cycle(self._scaling.loss_scales)
        )
        return tuple(i for i, network, loss_scale in losses if not holds_input_gradient((network,), loss_scale))

    def _make_forward_state(self, owner, prefix, names_of_others, restores_calls):
        # Like the forward, transforms, detectors and conditions run before the verdict, so what they write is restored.
        cells = list(dict.fromkeys(itertools.chain(*self._settings.gradient_transforms)))
        own = (self.overflow_detector, *self._settings.skip_conditions)
        cells += [cell for cell in own if not is_library_cell(cell)]
        return make_forward_state(
            owner,
            (*self._networks, *cells),
            self._settings.forward_state,
            state_of(cells, self._networks),
            self._may_skip,
            self.checks,
            names_of_others,
            self._cycle_state,
            prefix,
            restores_calls,
        )

    def _make_cycle_state(self, prefix):
        steps = self._settings.gradient_accumulation_steps
        if steps == 1:
            return None
        keeps_losses = any(condition.needs_loss for condition in self._settings.skip_conditions)
        return CycleState(steps, self.weights, prefix, self.scale_shape, keeps_losses, self._cycles_weighted)

    def _make_mean(self):
        if not any(self._weighted):
            return Mean()
        return WeightedMean(self.packing, self._ranks, self._settings.gradient_accumulation_steps, self._weighted)

    def _make_cause(self, loss_scales, prefix):
        patient = self._patient_scales(loss_scales) if self.checks else None
        if self._cycle_state is None:
            return Cause(self._losses, self._ranks, patient)
        return CycleCause(self._losses, self._ranks, patient, prefix)

    def _patient_scales(self, loss_scales):
        """Returns which scales stand still if the forward was not finite, None if all back off."""
        if all(its.backoff_if_loss_not_finite for its in loss_scales):
            return None
        # Where an InputGradient works on a scale, a lower one may mend the forward.
        patient = [not its.backoff_if_loss_not_finite for its in loss_scales]
        mendable = [holds_input_gradient(self._networks, its) for its in loss_scales]
        losses = np.zeros((len(loss_scales), self._losses), bool)
        for i, j in itertools.product(range(len(loss_scales)), range(self._losses)):
            networks = self._networks if self._losses == 1 or len(self._networks) == 1 else (self._networks[j],)
            is_its = self._losses == 1 or len(loss_scales) == 1 or i == j
            losses[i, j] = patient[i] and is_its and not holds_input_gradient(networks, loss_scales[i])
        state = np.logical_and(patient, np.logical_not(mendable))
        # Each rank tells of its own calls in a cycle, unless a call's gradients show what other ranks' forwards did.
        are_common = self._settings.max_retries > 0 or self._settings.gradients_reduced
        ranks_of_call = self._ranks if are_common else Alone()
        return PatientScales(losses, state, self.scale_shape, ranks_of_call)

    def _make_conditions(self):
        conditions = self._settings.skip_conditions
        if not conditions:
            return Conditions()
        split = [part for its in self.weights for part in self._ranks.are_split(its)]
        return AskedConditions(conditions, self._ranks, split)

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


def _check_loss_scales(owner, loss_scales, max_retries):
    """Returns whether overflows are checked, which is the same for all loss scales. Raises if no retry could help."""
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
    """Raises if a network has SparseGatherV2: graph mode then knows no gradient's form until all is compiled."""
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


def _forward_backwards(owner, networks, weights, settings, may_return_tuple, number):
    if len(networks) == len(weights):
        return [
            ForwardBackward(network, its_weights, its_has_aux, owner, i, may_return_tuple, weighted)
            for i, (network, its_weights, its_has_aux, weighted) in enumerate(
                zip(networks, weights, settings.has_aux, settings.weighted), number
            )
        ]
    if any(settings.weighted):
        raise ValueError(
            f"For '{owner}', the argument 'weighted' must be False for one network that returns all losses, but got "
            f"{list(settings.weighted)}. Pass a list of networks, each of which returns (loss, weight)."
        )
    return [SharedForwardBackward(networks[0], weights, settings.has_aux[0], owner)]


def _compiler(optimizers, loss_scales, detector, settings):
    """
    Returns the function that makes a cell one compiled graph in PyNative mode, as MindSpore's nn optimizers are there.
    If a cell is the user's own, or an optimizer reads its settings in each step, they run in Python as they are.
    """
    optimizers = [updating(optimizer) for optimizer in optimizers]
    transforms = itertools.chain(*settings.gradient_transforms)
    cells = (*optimizers, *loss_scales, detector, *settings.skip_conditions, *transforms)
    in_python = (
        settings.after_update is not None
        or not all(isinstance(optimizer, nn.Optimizer) for optimizer in optimizers)
        or not all(map(is_library_cell, cells))
    )
    if get_context("mode") == PYNATIVE_MODE and not in_python:
        return Compiled
    return _as_it_is


def _as_it_is(cell):
    return cell
