"""A skipped step changes nothing but the loss scale and the step counters, also of what the configurations lack."""

import pytest
from conftest import quick_in_pynative_mode
from mindspore import mint, nn
from support.networks import FEATURES, Mlp, Normalised, batch, overflowing_batch
from support.training import bookkeeping, changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


def check_transaction(network, must_move=(), learning_rate=0.01, **keywords):
    """Trains a clean step, two overflows, and a clean step, which must move what is named."""
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=learning_rate, weight_decay=0.1)
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10), **keywords).set_train()
    start = state(cell)
    assert not bool(cell(*batch())[1])
    before = state(cell)
    moved = changed(start, before)
    assert moved > {parameter.name for parameter in network.trainable_params()}
    assert moved > set(must_move)
    for _ in range(2):
        assert bool(cell(*overflowing_batch())[1])
        skipped = changed(before, state(cell))
        assert skipped == bookkeeping(skipped)
        assert skipped >= {"loss_scale.scale_value", "step_counters.skipped_steps"}
    assert not bool(cell(*batch(seed=1))[1])
    assert changed(before, state(cell)) >= set(must_move)


@quick_in_pynative_mode
def test_a_learning_rate_schedule(mode):
    schedule = nn.ExponentialDecayLR(0.01, decay_rate=0.5, decay_steps=1)
    check_transaction(Mlp(), must_move=["global_step"], learning_rate=schedule)


@quick_in_pynative_mode
def test_batch_norm_of_mint(mode):
    network = Normalised(mint.nn.BatchNorm1d(FEATURES))
    try:
        network.set_train()(*batch()).asnumpy()
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"mint.nn.BatchNorm1d does not run here: {str(error).strip().splitlines()[0]}")
    network = Normalised(mint.nn.BatchNorm1d(FEATURES))
    check_transaction(network, must_move=["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"])
