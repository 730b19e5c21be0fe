"""Which cells are in training mode, and what keeps a frozen sub-network's statistics still."""

import warnings

import numpy as np
import pytest
from conftest import quick_in_pynative_mode
from mindspore import Model, Tensor, mint, nn
from mindspore.dataset import NumpySlicesDataset

import ms_lossscale as ls

X = np.random.default_rng(0).normal(3, 1, (8, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
BATCH = Tensor(X), Tensor(Y)


def dataset():
    return NumpySlicesDataset((X, Y), shuffle=False).batch(8)


def frozen_backbone():
    backbone = nn.SequentialCell(nn.Dense(4, 4), nn.BatchNorm1d(4))
    for parameter in backbone.get_parameters():
        parameter.requires_grad = False
    return backbone


def make(backbone, make_cell=ls.ScaledTrainOneStepCell, several=False):
    head = nn.Dense(4, 1)
    network = nn.WithLossCell(nn.SequentialCell(backbone, head), nn.MSELoss())
    optimizer = nn.SGD(head.trainable_params(), 0.01)
    return make_cell(*([network], [optimizer]) if several else (network, optimizer), 128.0)


@pytest.mark.parametrize(
    "make_cell", [ls.ScaledTrainOneStepCell, ls.SimultaneousTrainOneStepCell, ls.AlternatingTrainOneStepCell]
)
def test_no_constructor_sets_it(make_cell):
    cell = make(frozen_backbone(), make_cell, make_cell is not ls.ScaledTrainOneStepCell)
    assert not any(each.training for _, each in cell.cells_and_names())


@quick_in_pynative_mode
@pytest.mark.parametrize("stays", [False, True])
def test_set_train_reaches_frozen_cells_and_can_be_taken_back(mode, stays):
    backbone = frozen_backbone()
    cell = make(backbone).set_train()
    if stays:
        backbone.set_train(False)
    before = backbone[1].moving_mean.asnumpy().copy()
    cell(*BATCH)
    assert np.array_equal(before, backbone[1].moving_mean.asnumpy()) == stays


def cell_of(*layers):
    network = nn.SequentialCell(nn.Dense(4, 4), *layers, nn.Dense(4, 1))
    optimizer = nn.SGD(network.trainable_params(), 0.01)
    return ls.ScaledTrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, ls.DynamicLossScale(128.0))


def warnings_of(*calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call(*BATCH)
    return [each for each in caught if "set_train" in str(each.message)]


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Dropout(p=0.5), lambda: nn.BatchNorm1d(4), lambda: mint.nn.Dropout(0.5)],
    ids=["p", "bn", "mint"],
)
def test_a_training_without_set_train_is_warned_of_once(mode, layer):
    cell = cell_of(layer(), nn.ReLU())
    (warning,) = warnings_of(cell, cell, cell.find_loss_scale)
    assert f"_backbone.1 ({type(layer()).__name__}). Call cell.set_train() before" in str(warning.message)
    assert warning.filename == __file__
    cell = cell_of(layer())
    assert len(warnings_of(cell.find_loss_scale, cell)) == 1


@quick_in_pynative_mode
def test_modes_that_were_chosen_are_not(mode):
    for layers in ((), (nn.LayerNorm([4]),)):
        assert not warnings_of(cell_of(*layers))
    assert not warnings_of(cell_of(nn.Dropout(p=0.5), nn.BatchNorm1d(4)).set_train())
    chosen = cell_of(nn.BatchNorm1d(4), nn.Dropout(p=0.5)).set_train()
    for _, each in chosen.network.cells_and_names():
        if isinstance(each, (nn.BatchNorm1d, nn.Dropout)):
            each.set_train(False)
    assert not warnings_of(chosen)
    by_model = cell_of(nn.BatchNorm1d(4))
    assert not warnings_of(lambda *_: Model(by_model).train(1, dataset(), dataset_sink_mode=False))
