"""LeNet-5."""

from mindspore import Tensor, nn


class LeNet5(nn.Cell):
    """
    LeNet-5 of LeCun et al., `Gradient-based learning applied to document recognition`, with ReLU and max pooling.

    Inputs:
        - **images** (Tensor) - float32 from 0 to 1, of shape :math:`(N, 1, 28, 28)`.

    Outputs:
        Tensor, the logits of the ten classes, of shape :math:`(N, 10)`.
    """

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, kernel_size=5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, kernel_size=5, pad_mode="valid")
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(16 * 4 * 4, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, 10)

    def construct(self, images):
        x = self.pool(self.relu(self.conv1(images)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.fc3(x)


def accuracy(network, dataset):
    """Returns the share of images whose largest logit belongs to their label."""
    network.set_train(False)
    right = total = 0
    for image, label in dataset.create_tuple_iterator(num_epochs=1, output_numpy=True):
        right += int((network(Tensor(image)).asnumpy().argmax(axis=1) == label).sum())
        total += len(label)
    return right / total
