"""Chooses the stages of a step."""

from mindspore import PYNATIVE_MODE, ParameterTuple, get_context, nn

from ms_lossscale.input_gradient import holds_input_gradient
from ms_lossscale.overflow_detector import NoCheck
from ms_lossscale.step.clipping import make_clipping
from ms_lossscale.step.compiled import Compiled
from ms_lossscale.step.forward_backward import ForwardBackward, ForwardsAndBackwards, SharedForwardBackward
from ms_lossscale.step.forward_state import make_forward_state
from ms_lossscale.step.gradient_transforms import GradientTransforms
from ms_lossscale.step.moving_average import MovingAverage
from ms_lossscale.step.optimizers import Optimizers
from ms_lossscale.step.packing import make_packing
from ms_lossscale.step.ranks import Alone
from ms_lossscale.step.scaling import Scaling, WindowScaling
from ms_lossscale.step.step import AfterBackward, AfterTries, Decision, Step
from ms_lossscale.step.step_counters import StepCounters
from ms_lossscale.step.tries import Judge, Tries, Try
from ms_lossscale.step.update import AlwaysUpdate, Nothing, Undo, Update, UpdateOrUndo
from ms_lossscale.step.verdict import (
    Ask,
    AskOfCall,
    DetectorVerdict,
    KnownOfCall,
    KnownVerdict,
    asks_gradients_only,
    make_verdict,
)
from ms_lossscale.step.window import Accumulation, EveryCall, Flush, WindowState


def build_step(
    owner, networks, optimizers, loss_scale, settings, ranks, *, network_inputs=None, may_return_tuple=False, prefix=""
):
    """
    The step of N networks and N optimizers that share one loss scale, one verdict and one conditional update.

    Args:
        owner (str): The name of the user's cell, for error messages.
        networks (tuple[Cell]): One loss cell for each optimizer, or one cell that returns a loss for each.
        optimizers (tuple[Cell]): The optimizers, checked.
        loss_scale (LossScale): The loss scale.
        settings (Settings): All else that was passed.
        ranks (Union[Alone, Ranks]): Who else takes part.
        network_inputs (Union[tuple, None]): Positions of the inputs that each network takes; None means all.
        may_return_tuple (bool): Whether a network may return its one loss as a tuple of one.
        prefix (str): For the names of the Parameters that each of several steps has.

    Returns:
        Step.
    """
    weights = [optimizer.parameters for optimizer in optimizers]
    all_weights = ParameterTuple([weight for its in weights for weight in its])
    checks = loss_scale.drop_overflow_update
    _check_retries(owner, settings.max_retries, loss_scale)
    loss_scale.fix("drop_overflow_update")
    detector = settings.overflow_detector if checks else NoCheck()
    window_state = None
    if settings.gradient_accumulation_steps > 1:
        window_state = WindowState(settings.gradient_accumulation_steps, all_weights, prefix)
    forward_state = make_forward_state(owner, networks, settings, checks, window_state, prefix)
    # A user's own detector gets the gradients as they are, and so do the operators that exchange them.
    packing = make_packing(weights, packs=not ranks.exchanges and _is_library_cell(detector))
    transforms = _transforms(settings, weights, packing, ranks, prefix)
    counters = StepCounters(all_weights, prefix, settings.max_retries > 0)
    averages = [MovingAverage(decay, its) for decay, its in zip(settings.ema_decay, weights) if decay is not None]
    update = Update(transforms, packing, Optimizers(optimizers), settings.after_update or Nothing(), averages, counters)
    scaling = _scaling(loss_scale, settings, window_state, transforms, detector, ranks)
    verdict = make_verdict(checks, detector, transforms, ranks)
    tries_again = settings.max_retries > 0
    # A step of one call is decided by the verdict on its last try.
    is_judged = tries_again and window_state is None
    decision = Decision(
        Alone() if is_judged else ranks,
        KnownVerdict() if is_judged else verdict,
        scaling,
        UpdateOrUndo(update, Undo(forward_state, packing, counters)) if checks else AlwaysUpdate(update),
    )
    compiled = _compiler(optimizers, loss_scale, detector, settings, ranks)
    if window_state is None:
        window, flush = EveryCall(decision), Nothing()
    else:
        of_call = KnownOfCall() if tries_again else AskOfCall(Ask(detector))
        window = Accumulation(window_state, decision, of_call, forward_state, packing)
        flush = compiled(Flush(window_state, decision, detector, packing))
    forward_backwards = _forward_backwards(owner, networks, weights, settings.has_aux, may_return_tuple)
    one_try = Try(detector, ForwardsAndBackwards(owner, forward_backwards, network_inputs, packing))
    if tries_again:
        judge = _judge(networks, weights, scaling, verdict, detector, packing, forward_state, window_state, ranks)
        tries = Tries(settings.max_retries, one_try, compiled(judge), scaling, forward_state, counters)
        after_backward = compiled(AfterTries(window))
    else:
        tries = one_try
        after_backward = compiled(AfterBackward(forward_state, scaling.unscale, window))
    return Step(
        scaling=scaling,
        forward_state=forward_state,
        tries=tries,
        one_try=one_try,
        after_backward=after_backward,
        window=window,
        flush_window=flush,
        update=update,
    )


def _check_retries(owner, max_retries, loss_scale):
    if max_retries and not (loss_scale.drop_overflow_update and loss_scale.backs_off):
        raise ValueError(
            f"For '{owner}', the argument 'max_retries' must be 0 with a loss scale that never backs off, since a step "
            f"would overflow again, but got {max_retries} and a {type(loss_scale).__name__}. Pass a "
            f"DynamicLossScale, say."
        )


def _judge(networks, weights, scaling, verdict, detector, packing, forward_state, window_state, ranks):
    reduces = ranks
    if window_state is not None:
        # Of each call by itself: what is reduced and measured is the window's sum.
        reduces = Alone()
        verdict = DetectorVerdict(GradientTransforms([[] for _ in weights], packing), detector, ranks)
    return Judge(
        forward_state,
        scaling.unscale,
        reduces,
        verdict,
        ranks,
        scaling.loss_scale,
        window_state,
        scales_losses=holds_input_gradient(networks, scaling.loss_scale),
    )


def _transforms(settings, weights, packing, ranks, prefix):
    of_each = []
    for i, its_weights in enumerate(weights):
        its_prefix = prefix if len(weights) == 1 else f"network_{i}."
        clipping = make_clipping(settings.clip_norm[i], settings.clip_value[i], its_weights, ranks, its_prefix)
        of_each.append([*clipping, *settings.gradient_transforms])
    return GradientTransforms(of_each, packing)


def _scaling(loss_scale, settings, window_state, transforms, detector, ranks):
    if window_state is not None:
        return WindowScaling(loss_scale, window_state, settings.gradient_accumulation_steps)
    # A detector, and the other ranks, get gradients that are divided.
    return Scaling(
        loss_scale, leave_division=transforms.unscales and asks_gradients_only(detector) and not ranks.exchanges
    )


def _forward_backwards(owner, networks, weights, has_aux, may_return_tuple):
    if len(networks) == len(weights):
        return [ForwardBackward(*pair, has_aux, owner, may_return_tuple) for pair in zip(networks, weights)]
    return [SharedForwardBackward(networks[0], weights, has_aux, owner)]


def _compiler(optimizers, loss_scale, detector, settings, ranks):
    """
    What makes one compiled graph of a cell in PyNative mode, where what follows the gradients is compiled, too, as
    MindSpore's nn optimizers are.

    But a user's own cell runs in Python there, as it is written, and so does an optimizer that reads its settings in
    each step. What ranks exchange is MindSpore's to order.
    """
    in_python = (
        ranks.exchanges
        or settings.after_update is not None
        or not all(isinstance(optimizer, nn.Optimizer) for optimizer in optimizers)
        or not all(map(_is_library_cell, (*optimizers, loss_scale, detector, *settings.gradient_transforms)))
    )
    if get_context("mode") == PYNATIVE_MODE and not in_python:
        return Compiled
    return _as_it_is


def _as_it_is(cell):
    return cell


def _is_library_cell(cell):
    return type(cell).__module__.partition(".")[0] in ("mindspore", "ms_lossscale")
