"""suggest_schedule: from reports of several stages of training to the loss scale of each step."""

import pytest
from conftest import slow
from mindspore import nn
from support.linear_pair import CELLS, Trained, arrays
from support.networks import Linear, batch
from test_gradient_report import WHY_NOT, report_of

from ms_lossscale import ScaledTrainOneStepCell, ScheduledLossScale, profile_gradients, suggest_schedule
from ms_lossscale.diagnosis.gradient_report import NetworksReport


def report(largest, step=None):
    return report_of({"weight": [largest, largest / 4]}, step=step)


def report_of_networks(*largest):
    return NetworksReport(**vars(report_of({"weight": [1.0]})) | {"networks": [report(each) for each in largest]})


def used_scales(schedule, steps):
    """The loss scale of each of the first steps of a cell."""
    network = Linear()
    cell = ScaledTrainOneStepCell(network, nn.SGD(network.trainable_params(), 1e-3), schedule).set_train()
    return [float(cell(*batch(seed))[2]) for seed in range(steps)]


def test_of_reports_that_know_their_steps(mode):
    # In any order. At 1.0 the recommended scale is 2**13, with half the gradient twice as much.
    schedule = suggest_schedule([report(0.25, 5), report(1.0, 0), report(0.5, 2)])
    assert isinstance(schedule, ScheduledLossScale)
    expected = [2.0**13] * 2 + [2.0**14] * 3 + [2.0**15] * 3
    assert used_scales(schedule, 8) == expected


def test_of_a_dict():
    schedule = suggest_schedule({3: report(0.5), 0: report(1.0, step=7)})
    assert used_scales(schedule, 5) == [2.0**13] * 3 + [2.0**14] * 2


def test_networks_with_scales_of_their_own():
    reports = {step: report_of_networks(first, second) for step, first, second in ((0, 1.0, 0.5), (2, 0.25, 1.0))}
    assert [used_scales(each, 3) for each in suggest_schedule(reports)] == [[2.0**13] * 2 + [2.0**15], [2.0**13] * 3]
    with pytest.raises(ValueError, match="'reports' must hold reports of one training cell, but they are of 0 and 2"):
        suggest_schedule({0: report(1.0), 2: reports[2]})


def test_headroom():
    assert used_scales(suggest_schedule({0: report(1.0), 1: report(0.5)}, headroom=5), 2) == [2.0**10, 2.0**11]


@pytest.mark.parametrize("kind", [CELLS[0], *slow(*CELLS[1:])])
def test_of_a_training_cell_along_its_training(kind):
    trained = Trained(kind)
    reports = []
    for step in range(3):
        x0, x1, y = arrays(step)
        reports.append(profile_gradients(trained.cell, [(x0, y) if kind == "scaled" else (x0, x1, y)]))
        trained.call_cell(step)
    assert [each.step for each in reports] == [0, 1, 2]
    schedule = suggest_schedule(reports)
    recommended = [each.recommended_loss_scale for each in reports]
    if kind == "alternating":
        # One schedule for each network.
        assert [len(each) for each in (schedule, *recommended)] == [2] * 4
    else:
        schedule, recommended = [schedule], [[each] for each in recommended]
    for its_schedule, (first, second, third) in zip(schedule, zip(*recommended)):
        assert used_scales(its_schedule, 4) == [min(first, second), min(second, third), third, third]


def test_where_gradients_grow_the_stage_before_knows():
    schedule = suggest_schedule({0: report(2.0**-10), 2: report(2.0**-6), 3: report(2.0**-6), 5: report(2.0**-7)})
    assert used_scales(schedule, 7) == [2.0**19] * 5 + [2.0**20] * 2


@pytest.mark.parametrize(
    "reports, error, message",
    [
        ([], ValueError, "'reports' must be a list of GradientReports, or a dict .*, but it is empty"),
        ({}, ValueError, "but it is empty"),
        (report(1.0, 0), TypeError, "but got <ms_lossscale.*of type 'GradientReport'"),
        ([1.0], TypeError, "but it holds 1.0 of type 'float'"),
        ({0: None}, TypeError, "but it holds None"),
        ([report(1.0)], ValueError, r"a report of a plain network does not know its step\. Pass a dict, {0: report,"),
        ([report(1.0, 3), report(2.0, 3)], ValueError, "but two are of step 3"),
        ({-1: report(1.0)}, ValueError, "must be >= 1 and < 2.*31, but got -1"),
        ({"0": report(1.0)}, TypeError, "must be an integer >= 1, but got '0'"),
        (
            {0: report(1.0), 5: WHY_NOT["zeros"][0]},
            ValueError,
            r"the report of step 5 can't be used\. .*gradients are z",
        ),
        ({5: WHY_NOT["loss"][0]}, ValueError, r"the report of step 5 can't be used\. .*the loss is not finite"),
    ],
)
def test_wrong_reports(reports, error, message):
    with pytest.raises(error, match=f"For 'suggest_schedule', .*{message}"):
        suggest_schedule(reports)
