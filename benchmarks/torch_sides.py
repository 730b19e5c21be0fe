"""
The networks of `large.py` in PyTorch: a step with float16 autocast and torch.amp.GradScaler, and one with autocast
alone. Prints JSON as `sides.py` does:

    python benchmarks/torch_sides.py CASE ROUNDS
"""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda"


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def numbers(below, *shape):
    return torch.randint(below, shape, device=DEVICE)


def layers(channels_in, *channels):
    """Returns Dense layers of such sizes, with ReLU between them."""
    cells = []
    for size in channels:
        cells += [nn.Linear(channels_in, size), nn.ReLU()]
        channels_in = size
    return nn.Sequential(*cells[:-1])


def tiny():
    network, x, y = layers(4, 4, 1).to(DEVICE), normal(8, 4), normal(8, 1)
    return [network], [lambda: functional.mse_loss(network(x).float(), y)]


def classified(network, x, labels):
    network.to(DEVICE)
    return [network], [lambda: functional.cross_entropy(network(x).float(), labels)]


def mlp():
    return classified(layers(1024, *[1024] * 6, 10), normal(32, 1024), numbers(10, 32))


def convolution(channels_in, channels, size=1, stride=1):
    layer = nn.Conv2d(channels_in, channels, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(channels))


class Bottleneck(nn.Module):
    def __init__(self, channels_in, width, channels, stride):
        super().__init__()
        self.reduce, self.expand = convolution(channels_in, width), convolution(width, channels)
        self.transform = convolution(width, width, 3, stride)
        self.shortcut = nn.Identity() if channels == channels_in else convolution(channels_in, channels, 1, stride)
        nn.init.zeros_(self.expand[1].weight)

    def forward(self, x):
        hidden = functional.relu(self.transform(functional.relu(self.reduce(x))))
        return functional.relu(self.expand(hidden) + self.shortcut(x))


def resnet50():
    cells, channels = [convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for i, count in enumerate((3, 4, 6, 3)):
        width = 64 * 2**i
        for j in range(count):
            cells.append(Bottleneck(channels, width, 4 * width, 2 if i and not j else 1))
            channels = 4 * width
    network = nn.Sequential(*cells, nn.AvgPool2d(7), nn.Flatten(), nn.Linear(channels, 1000))
    return classified(network, normal(64, 3, 224, 224), numbers(1000, 64))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads, self.factor = heads, (width // heads) ** -0.5
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.full((length, length), -1e4).triu(1).half())

    def forward(self, x):
        size, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(size, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = torch.softmax((q * self.factor) @ k.transpose(2, 3) + self.mask, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(size, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, number, width, words, length):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*[DecoderLayer(width, width // 64, length) for _ in range(number)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.words(tokens) + self.places))).flatten(0, 1)


def transformer(size=8, length=512, words=25_000):
    return classified(Transformer(12, 768, words, length), numbers(words, size, length), numbers(words, size * length))


def dcgan128(size=128, filters=128):
    n = filters
    generator = nn.Sequential(
        *(nn.Linear(64, 4 * n * 16, bias=False), nn.Unflatten(1, (4 * n, 4, 4)), nn.BatchNorm2d(4 * n), nn.ReLU()),
        *(nn.ConvTranspose2d(4 * n, 2 * n, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * n), nn.ReLU()),
        *(nn.ConvTranspose2d(2 * n, n, 4, 2, 1, bias=False), nn.BatchNorm2d(n), nn.ReLU()),
        *(nn.ConvTranspose2d(n, 1, 4, 2, 1), nn.Tanh()),
    ).to(DEVICE)
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, n, 4, 2, 1), nn.ELU()),
        *(nn.Conv2d(n, 2 * n, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * n), nn.ELU()),
        *(nn.Conv2d(2 * n, 4 * n, 3, 2, 1, bias=False), nn.BatchNorm2d(4 * n), nn.ELU()),
        *(nn.Flatten(), nn.Linear(4 * n * 16, 1)),
    ).to(DEVICE)
    images, noise = torch.tanh(normal(size, 1, 28, 28)), normal(size, 64)

    def softplus(logits):
        return functional.softplus(logits.float()).mean()

    def discriminate():
        real, fake = discriminator(images), discriminator(generator(noise).detach())
        return 0.9 * softplus(-real) + 0.1 * softplus(real) + softplus(fake)

    return [discriminator, generator], [discriminate, lambda: softplus(-discriminator(generator(noise)))]


def make_step(case, scaled):
    """Returns a step of each network in turn."""
    torch.manual_seed(0)
    networks, losses = globals()[case]()
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9) for network in networks]
    scalers = [torch.amp.GradScaler(DEVICE, enabled=scaled) for _ in networks]

    def step():
        for loss_of, optimizer, scaler in zip(losses, optimizers, scalers):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                loss = loss_of()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


def seconds_of(step, count=1):
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def main(case, rounds):
    steps, first_call, memory = {}, {}, {}
    for name, scaled in (("autocast", False), ("torch.amp.GradScaler", True)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[name] = make_step(case, scaled)
        first_call[name] = seconds_of(steps[name])
        # Its first scale is too high for some networks: steps are skipped until it fits.
        seconds_of(steps[name], 20)
        memory[name] = torch.cuda.max_memory_allocated() - before
    count = max(1, round(0.3 / max(seconds_of(step, 3) for step in steps.values())))
    seconds = {name: [] for name in steps}
    for i in range(rounds):
        for name in list(steps)[:: (-1) ** i]:
            seconds[name].append(seconds_of(steps[name], count))
    measured = {"first_call": first_call, "steps_in_a_round": count, "seconds": seconds, "memory": memory}
    return {**measured, "skipped": dict.fromkeys(steps, False)}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here.")
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
