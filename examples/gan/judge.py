"""Judges the drawn digits by a LeNet that was trained on real ones."""

import mindspore
import numpy as np
from common.data import test_dataset, train_dataset
from common.lenet5 import LeNet5, accuracy
from common.output import replacing
from mindspore import Tensor, nn

_BATCH_SIZE = 32
_MAX_EPOCHS = 8
_ENOUGH_STEPS = 1000


def load_or_train(path, digits):
    """
    Loads the judge, a float32 network, from its checkpoint if there is one for these digits. Else trains and saves it.

    Args:
        path (Path): The checkpoint.
        digits (Digits): The digits to train with.

    Returns:
        Tuple of the network and its accuracy on the test digits.
    """
    network = LeNet5()
    if not _load(path, network, digits):
        _train(network, digits)
        with replacing(path) as part:
            mindspore.save_checkpoint(network, str(part), append_dict={"data": digits.fingerprint})
    return network, accuracy(network, test_dataset(digits))


def _load(path, network, digits):
    try:
        parameters = mindspore.load_checkpoint(str(path))
        if parameters.pop("data", None) != digits.fingerprint:
            return False
        mindspore.load_param_into_net(network, parameters, strict_load=True)
    except (ValueError, RuntimeError):
        return False
    return True


def _train(network, digits):
    batch_size = min(_BATCH_SIZE, len(digits.train_images))
    steps_per_epoch = len(digits.train_images) // batch_size
    epochs = max(1, min(_MAX_EPOCHS, _ENOUGH_STEPS // steps_per_epoch))
    schedule = nn.CosineDecayLR(1e-5, 2e-3, epochs * steps_per_epoch)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    optimizer = nn.Adam(network.trainable_params(), schedule)
    cell = nn.TrainOneStepCell(nn.WithLossCell(network, loss), optimizer).set_train()
    for epoch in range(epochs):
        for image, label in train_dataset(digits, batch_size, 0, epoch).create_tuple_iterator(num_epochs=1):
            cell(image, label)


def class_probabilities(judge, images):
    """Returns the probabilities of the ten classes for each of the images, whose values are from 0 to 1."""
    logits = judge(Tensor(images)).asnumpy().astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
