"""What a step costs, counted: operators of the compiled graph, and reads by the host."""

import json
from pathlib import Path

import pytest
from support import operator_counts
from support.python_process import check_python


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    return json.loads(check_python(Path(operator_counts.__file__), folder, cwd=folder, timeout=900).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords, most",
    # One multiplication unscales and one clips. Of a skipped step, whether it overflowed and where is asked once. With
    # `clip_norm` there are three sums of squares, by rows and of these: two are for norms that leave float32's range.
    [
        ("", {"Mul": 1, "ReduceSum": 2, "IsFinite": 2}),
        (", clip_norm", {"Mul": 5, "ReduceSum": 6, "Square": 3, "IsFinite": 1}),
    ],
)
def test_what_one_more_large_gradient_costs(counts, keywords, most):
    less, more = counts[f"4 large{keywords}"], counts[f"5 large{keywords}"]
    grows = {name: more.get(name, 0) - less.get(name, 0) for name in {*less, *more}}
    assert 0 < sum(grows.values()) <= sum(most.values()) + 2
    assert {name: grows[name] for name in most if grows[name] > most[name]} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, most",
    [("4 large", 85), ("4 large, clip_norm", 131), ("4 large, clip_norm, ema, cycle", 230), ("4 large, retried", 180)],
)
def test_what_a_step_costs_beside_the_stock_cell(counts, case, most):
    assert 0 < sum(counts[case].values()) <= most


@pytest.mark.slow
def test_the_forward_of_a_gan_runs_once_and_each_loss_goes_back_to_its_own_weights_only(counts):
    # Forward: the generator's one, and the discriminator's two for real and for fake samples. Backward: for each run of
    # the discriminator its two weights and what is between them; then what is between them, the samples, and the
    # generator's weight.
    products = (1 + 2 + 2) + (3 + 3) + 3
    assert counts["GAN, a tuple of losses"]["MatMul"] == products
    # Once more runs all that comes after the generator's BatchNorm: its statistics move in each forward.
    assert counts["GAN, two loss cells"]["MatMul"] <= products + 2
