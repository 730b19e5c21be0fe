"""From profiles at several stages of training to a schedule of loss scales."""

from collections.abc import Sequence
from typing import Union

from ms_lossscale._arguments import check_positive_int, describe
from ms_lossscale.diagnosis.gradient_report import GradientReport, check_headroom
from ms_lossscale.loss_scale import ScheduledLossScale


def suggest_schedule(
    reports: Union[Sequence[GradientReport], dict[int, GradientReport]], headroom: int = 2
) -> ScheduledLossScale:
    """
    A loss scale for each stage of training, from the step of each report to that of the next one: the smaller of the
    scales that the two recommend, since gradients move from one to the other in between.

    Args:
        reports (Union[list[GradientReport], dict]): Reports of a training cell, which know at which step they were
            taken; or a dict from steps (ints, 0 for before the first) to reports. At least one.
        headroom (int): As for :meth:`GradientReport.recommend`. Default: ``2`` .

    Returns:
        ScheduledLossScale. What comes before the first report's step has that report's scale, too.

    Raises:
        TypeError: If `reports` holds something else, or `headroom` is no number.
        ValueError: If there are no reports, a report of a list does not know its step, two are of one step, a report
            can't recommend a loss scale, or `headroom` is out of range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import nn
        >>> from ms_lossscale import profile_gradients, suggest_schedule
        >>> net = nn.Dense(2, 1, weight_init="ones", has_bias=False)
        >>> network = nn.WithLossCell(net, nn.MSELoss())
        >>> reports = {
        ...     step: profile_gradients(network, net.trainable_params(), [(x, np.zeros((4, 1), np.float32))])
        ...     for step, x in ((0, np.full((4, 2), 1.0, np.float32)), (1000, np.full((4, 2), 0.1, np.float32)))
        ... }
        >>> schedule = suggest_schedule(reports)
        >>> schedule.milestone, schedule.loss_scales
        ([1000, 1001], [2048.0, 262144.0])
    """
    owner = "suggest_schedule"
    headroom = check_headroom(owner, headroom)
    stages = sorted(_by_step(owner, reports).items())
    loss_scales = []
    for step, report in stages:
        try:
            loss_scales.append(report.recommend(headroom).loss_scale)
        except ValueError as error:
            raise ValueError(f"For '{owner}', the report of step {step} is of no use. {error}") from None
    loss_scales = [min(ends) for ends in zip(loss_scales, loss_scales[1:] + loss_scales[-1:])]
    stages = [(step, scale) for (step, _), scale in zip(stages, loss_scales)]
    stages = stages[:1] + [stage for before, stage in zip(stages, stages[1:]) if stage[1] != before[1]]
    starts = [step for step, _ in stages[1:]]
    # A stage ends where the next one begins; the last one's end, which a schedule wants too, changes nothing.
    return ScheduledLossScale([*starts, (starts[-1] if starts else 0) + 1], [scale for _, scale in stages])


def _by_step(owner, reports):
    what = f"For '{owner}', the argument 'reports' must be a list of GradientReports, or a dict from steps to them"
    if not isinstance(reports, (dict, list, tuple)):
        raise TypeError(f"{what}, but got {describe(reports)}.")
    if not reports:
        raise ValueError(f"{what}, but it is empty.")
    pairs = reports.items() if isinstance(reports, dict) else [(getattr(each, "step", None), each) for each in reports]
    by_step = {}
    for step, report in pairs:
        if not isinstance(report, GradientReport):
            raise TypeError(f"{what}, but it holds {describe(report)}.")
        if step is None:
            raise ValueError(
                f"{what}, but a report of a plain network does not know its step. Pass a dict, {{0: report, ...}}, or "
                f"profile the training cell."
            )
        if step != 0:
            step = check_positive_int(owner, "reports", step)
        if step in by_step:
            raise ValueError(f"{what}, but two are of step {step}.")
        by_step[step] = report
    return by_step
