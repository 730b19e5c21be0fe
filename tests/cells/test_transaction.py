"""A skipped step changes nothing but the loss scale and the step counters, also of what the configurations lack."""

import pytest
from conftest import quick_in_pynative_mode
from mindspore import mint, nn
from support.networks import FEATURES, Normalised, batch, overflowing_batch
from support.training import bookkeeping, changed, state

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell


@quick_in_pynative_mode
def test_batch_norm_of_mint(mode):
    network = Normalised(mint.nn.BatchNorm1d(FEATURES))
    try:
        network.set_train()(*batch()).asnumpy()
    except (RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"mint.nn.BatchNorm1d does not run here: {str(error).strip().splitlines()[0]}")
    network = Normalised(mint.nn.BatchNorm1d(FEATURES))
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.01, weight_decay=0.1)
    cell = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(2.0**10)).set_train()
    start = state(cell)
    cell(*batch())
    before = state(cell)
    moved = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed(start, before) > {"weight", *moved}
    assert bool(cell(*overflowing_batch())[1])
    assert changed(before, state(cell)) == bookkeeping(changed(before, state(cell)))
    assert not bool(cell(*batch(seed=1))[1])
    assert changed(before, state(cell)) > moved
