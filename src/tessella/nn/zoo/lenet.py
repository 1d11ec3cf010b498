"""LeNet as Caffe and DIGITS have it: two 5×5 convolutions with max-pooling, two linear layers."""

from __future__ import annotations

from torch import Tensor, nn

# Below this size, two unpadded 5×5 convolutions and two poolings leave one pixel or none.
UNPADDED_SIZE = 17


class LeNet(nn.Module):
    """LeNet for one input size: ``[N, channels, height, width]`` to logits ``[N, classes]``.

    At 28×28×1 and ten classes it has Caffe's 431,080 weights. A height or width below 17 is padded
    by two pixels before each convolution, so that it works from 8×8 on.
    """

    def __init__(self, *, classes: int, channels: int, height: int, width: int) -> None:
        super().__init__()
        padding = _padding(height), _padding(width)
        pooled = [_pooled_size(_pooled_size(s, p), p) for s, p in zip((height, width), padding)]
        self.conv1 = nn.Conv2d(channels, 20, 5, padding=padding)
        self.pool1 = nn.MaxPool2d(2, ceil_mode=True)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=padding)
        self.pool2 = nn.MaxPool2d(2, ceil_mode=True)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(50 * pooled[0] * pooled[1], 500)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(500, classes)
        for layer in (self.conv1, self.conv2, self.fc1, self.fc2):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")  # Caffe's "xavier"
            nn.init.zeros_(layer.get_parameter("bias"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(self.conv1(x))
        x = self.pool2(self.conv2(x))
        logits: Tensor = self.fc2(self.relu(self.fc1(self.flatten(x))))
        return logits


def _padding(size: int) -> int:
    return 2 if size < UNPADDED_SIZE else 0


def _pooled_size(size: int, padding: int) -> int:
    """The size after a 5×5 convolution and a 2×2 pooling that rounds up, as Caffe does."""
    return (size + 2 * padding - 4 + 1) // 2
