"""EvaluateAverages evaluates with the averages that NumPy computes, and leaves the trained weights alone."""

import mindspore
import numpy as np
import pytest
from conftest import quick_in_graph_mode
from mindspore import Model, Tensor, nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, Loss

from ms_lossscale import EvaluateAverages, ScaledTrainOneStepCell

DECAY, RATE, EPOCHS = 0.75, 0.125, 3
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
# Without a bias: the gradient of the mean squared error is 2 / n * X.T @ (X @ weight - Y).
Y = X.sum(1, keepdims=True)


def batches():
    return NumpySlicesDataset((X, Y), shuffle=False).batch(4)


def make(ema_decay=DECAY):
    net = nn.Dense(4, 1, weight_init="zeros", has_bias=False)
    loss_fn = nn.MSELoss()
    optimizer = nn.SGD(net.trainable_params(), RATE)
    cell = ScaledTrainOneStepCell(nn.WithLossCell(net, loss_fn), optimizer, 1024, ema_decay=ema_decay)
    model = Model(cell, eval_network=nn.WithEvalCell(net, loss_fn), metrics={"loss": Loss()}, eval_indexes=[0, 1, 2])
    return net, cell, model


def loss_with(weight):
    # The mean over the two batches, as MindSpore's metric has it.
    return np.mean([np.square(X[rows] @ weight - Y[rows]).mean() for rows in (np.s_[:4], np.s_[4:])])


def averages_in_numpy():  # After each epoch: the average, and the weight.
    weight, average, found = np.zeros((4, 1)), np.zeros((4, 1)), []
    for _ in range(EPOCHS):
        for rows in (np.s_[:4], np.s_[4:]):
            x, y = X[rows].astype(np.float64), Y[rows]
            weight = weight - RATE * 2 / len(x) * x.T @ (x @ weight - y)
            average = DECAY * average + (1 - DECAY) * weight
        found.append((average, weight))
    return found


class Seen(Callback):  # Keeps what each evaluation of Model.fit found, and the weight after the epoch.
    def __init__(self, net):
        super().__init__()
        self.net, self.losses, self.weights = net, [], []

    def on_train_epoch_end(self, run_context):
        self.losses.append(run_context.original_args().get("eval_results", {}).get("loss"))
        self.weights.append(self.net.weight.asnumpy().T.copy())


def assert_weights(weights):
    np.testing.assert_allclose(weights, [weight for _, weight in averages_in_numpy()], rtol=1e-5)


def test_a_function_is_called_at_the_end_of_each_epoch_and_what_it_returns_is_printed(mode, capsys, tmp_path):
    net, _, model = make()
    results = []

    def evaluate():
        # As a script may do, and does not undo.
        net.set_train(False)
        results.append(model.eval(batches())["loss"])
        return {"loss": results[-1], "epochs": len(results)}

    seen = Seen(net)
    save = tmp_path / "averages.ckpt"
    callbacks = [EvaluateAverages(evaluate, save=save), seen]
    model.train(EPOCHS, batches(), callbacks=callbacks, dataset_sink_mode=False)
    expected = averages_in_numpy()
    np.testing.assert_allclose(results, [loss_with(average) for average, _ in expected], rtol=1e-5)
    lines = [f"epoch {i + 1}, averages: loss {loss:.6g}, epochs {i + 1}" for i, loss in enumerate(results)]
    assert capsys.readouterr().out.splitlines() == lines
    assert_weights(seen.weights)
    # The file is for the network, which then computes with the last averages.
    other = nn.Dense(4, 1, has_bias=False)
    assert mindspore.load_param_into_net(other, mindspore.load_checkpoint(str(save))) == ([], [])
    np.testing.assert_allclose(other(Tensor(X)).asnumpy(), X @ expected[-1][0], rtol=1e-5, atol=1e-6)


def test_the_evaluations_of_fit_are_made_with_the_averages(mode):
    net, _, model = make()
    seen = Seen(net)
    callbacks = [EvaluateAverages(), seen]
    model.fit(EPOCHS, batches(), batches(), callbacks=callbacks, dataset_sink_mode=False, valid_frequency=2)
    losses = [loss_with(average) for average, _ in averages_in_numpy()]
    assert [loss is None for loss in seen.losses] == [True, False, True]
    assert seen.losses[1] == pytest.approx(losses[1], rel=1e-5)
    assert_weights(seen.weights)


@quick_in_graph_mode
def test_cells_are_in_training_afterwards_as_they_were_before(mode):
    net = nn.SequentialCell(nn.Dense(4, 4), nn.Dropout(p=0.5), nn.Dense(4, 1))
    cell = ScaledTrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), RATE), 1024, ema_decay=DECAY
    )

    class Freeze(Callback):
        def on_train_step_end(self, run_context):
            net[0].set_train(False)

    class Modes(Callback):
        def on_train_epoch_end(self, run_context):
            assert [net.training, *(inner.training for inner in net)] == [True, False, True, True]

    def evaluate():
        net.set_train(False)

    callbacks = [Freeze(), EvaluateAverages(evaluate), Modes()]
    Model(cell).train(2, batches(), callbacks=callbacks, dataset_sink_mode=False)


class Broken(nn.Cell):
    def construct(self, x, y):
        raise ValueError("no evaluation")


@pytest.mark.parametrize("how", ["train", "fit"])
def test_an_evaluation_that_raises_leaves_the_trained_weights(how):
    net, cell, _ = make()
    model = Model(cell, eval_network=Broken(), metrics={"loss": Loss()}, eval_indexes=[0, 1, 2])
    with pytest.raises(Exception, match="no evaluation"):
        if how == "fit":
            model.fit(1, batches(), batches(), callbacks=[EvaluateAverages()], dataset_sink_mode=False)
        else:
            callback = EvaluateAverages(lambda: model.eval(batches()))
            model.train(1, batches(), callbacks=[callback], dataset_sink_mode=False)
    np.testing.assert_allclose(net.weight.asnumpy().T, averages_in_numpy()[0][1], rtol=1e-5)
    cell(Tensor(X), Tensor(Y))


def test_what_it_needs():
    net, _, model = make(ema_decay=None)
    with pytest.raises(RuntimeError, match="needs 'ema_decay'"):
        model.train(1, batches(), callbacks=[EvaluateAverages()], dataset_sink_mode=False)
    stock = Model(net, nn.MSELoss(), nn.SGD(net.trainable_params(), RATE))
    with pytest.raises(TypeError, match=r"'EvaluateAverages'.*must be one of ms_lossscale.*, but got.*Dense"):
        stock.train(1, batches(), callbacks=[EvaluateAverages()], dataset_sink_mode=False)


def test_that_nothing_is_evaluated_is_told():
    _, _, model = make()
    with pytest.warns(RuntimeWarning, match="'EvaluateAverages', nothing was evaluated or saved"):
        model.train(1, batches(), callbacks=[EvaluateAverages()], dataset_sink_mode=False)
