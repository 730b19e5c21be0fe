"""Chooses the stages of a step."""

import itertools
from functools import partial

from mindspore import PYNATIVE_MODE, ParameterTuple, get_context, nn, ops

from ms_lossscale._mindspore import Compiled
from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.overflow_detector import NoCheck
from ms_lossscale.step.check_of_call import CheckOfCall
from ms_lossscale.step.clipping import make_clip, make_clipping
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
from ms_lossscale.step.retries import AttemptCheck, EndOfRetriedCall, RetriedStep
from ms_lossscale.step.scaling import CycleScaling, OwnScaling, Scaling, Unscale
from ms_lossscale.step.stage import Alone, Clipping
from ms_lossscale.step.step import Check, Decision, End, Step
from ms_lossscale.step.trial import Trial
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
        _forward_backwards(owner, networks, stages.weights, settings.has_aux, may_return_tuple, number),
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
    stages = _Stages(owner, networks, optimizers, loss_scales, settings, ranks, "", restores_calls=True)
    step = stages.step(OwnForward(networks, stages.packing, stages.overflow_detector), _as_it_is)
    held = HeldCall(stages.forward_state, stages.scale_shape)
    return step, ManualStages(held, BeginCall(step, held), EndCall(step, held), stages.compiled)


class _Stages:
    """
    Makes the stages of a step. Arguments as in :func:`build_step`; with `restores_calls`, a call of a cycle can be
    undone alone.
    """

    def __init__(self, owner, networks, optimizers, loss_scales, settings, ranks, prefix, restores_calls=False):
        _refuse_sparse(owner, networks)
        self._networks, self._settings, self._ranks = networks, settings, ranks
        self._has_own_scales = isinstance(loss_scales, list)
        loss_scales = loss_scales if self._has_own_scales else [loss_scales]
        self.scale_shape = (len(loss_scales),) if self._has_own_scales else ()
        self.checks = _check_loss_scales(owner, loss_scales, settings.max_retries)
        self.weights = [optimizer.parameters for optimizer in optimizers]
        self.overflow_detector = settings.overflow_detector if self.checks else NoCheck()
        all_weights = ParameterTuple([weight for its in self.weights for weight in its])
        steps = settings.gradient_accumulation_steps
        self._cycle_state = CycleState(steps, all_weights, prefix, self.scale_shape) if steps > 1 else None
        self.compiled = _compiler(optimizers, loss_scales, self.overflow_detector, settings)
        names = [parameter.name for optimizer in optimizers for parameter in optimizer.get_parameters()]
        restores_calls = restores_calls or settings.max_retries > 0
        self.forward_state = self._make_forward_state(owner, prefix, names, restores_calls)
        # A user's own cells get the gradients unpacked, and so do the operators that exchange them.
        transforms = settings.gradient_transforms
        packs = self.checks and not ranks.exchanges and _is_library_cell(self.overflow_detector) and not any(transforms)
        self.packing = make_packing(self.weights, packs)
        self._before_check = stages_before_check(owner, ranks, transforms, self.packing, self.checks)
        self._clipping = _clipping(settings, self.weights, self.packing, ranks, prefix)
        self._scaling = self._make_scaling(loss_scales, prefix)
        step_counters = StepCounters(all_weights, prefix, settings.max_retries > 0)
        averages = zip(settings.ema_decay, self.weights)
        self._update = Update(
            self._clipping,
            self.packing,
            Optimizers(optimizers),
            [] if settings.after_update is None else [settings.after_update],
            [MovingAverage(decay, its) for decay, its in averages if decay is not None],
            step_counters,
        )
        undo = Undo(self.forward_state, self.packing, step_counters)
        self._decision = Decision(self._scaling, self._update, undo, self.checks)

    def step(self, forwards_and_backwards, compiled=None):
        """Makes the step, given the stage that runs its networks. `compiled` makes one graph of its end."""
        compiled = compiled or self.compiled
        stages = {
            "scaling": self._scaling,
            "forward_state": self.forward_state,
            "forwards_and_backwards": forwards_and_backwards,
            "end": compiled(self._end() if self._cycle_state is None else self._end_in_cycle()),
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
            return self._decision
        return End(self.forward_state, self._unscale(), self._check(), self._decision)

    def _end_in_cycle(self):
        is_retried = self._settings.max_retries > 0
        accumulation = Accumulation(
            self._cycle_state,
            self.packing,
            self.forward_state,
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
        # In a cycle, the sum is reduced and transformed, not each call.
        if self._cycle_state is not None:
            check = self._check_of_gradients(self._ranks)
        elif measures:
            check = self._check()
        else:
            check = self._check_of_gradients(self._ranks, self._before_check)
        return CheckOfCall(forward_state, self._unscale(), check)

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
        # Like the forward, a transform and a detector run before the verdict, so what they write is restored as well.
        cells = list(dict.fromkeys(itertools.chain(*self._settings.gradient_transforms)))
        if not _is_library_cell(self.overflow_detector):
            cells.append(self.overflow_detector)
        return make_forward_state(
            owner,
            (*self._networks, *cells),
            self._settings.forward_state,
            state_of(cells, self._networks),
            self.checks,
            names_of_others,
            self._cycle_state,
            prefix,
            restores_calls,
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


def _forward_backwards(owner, networks, weights, has_aux, may_return_tuple, number):
    if len(networks) == len(weights):
        return [
            ForwardBackward(network, its_weights, its_has_aux, owner, i, may_return_tuple)
            for i, (network, its_weights, its_has_aux) in enumerate(zip(networks, weights, has_aux), number)
        ]
    return [SharedForwardBackward(networks[0], weights, has_aux[0], owner)]


def _compiler(optimizers, loss_scales, detector, settings):
    """
    Returns the function that makes a cell one compiled graph in PyNative mode, as MindSpore's nn optimizers are there.
    If a cell is the user's own, or an optimizer reads its settings in each step, they run in Python as they are.
    """
    optimizers = [updating(optimizer) for optimizer in optimizers]
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
