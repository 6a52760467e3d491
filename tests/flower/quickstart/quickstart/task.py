"""The network, the data, and how a node trains and tests."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc1 = nn.Linear(6, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def images(seed, count):
    """Images of 8 x 8 pixels with a bright corner, whose number is the label."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    x = torch.randn(count, 1, 8, 8, generator=rng)
    for i, label in enumerate(y.tolist()):
        row, column = 4 * (label // 2), 4 * (label % 2)
        x[i, :, row : row + 4, column : column + 4] += 2
    return TensorDataset(x, y)


def load_data(partition_id, num_partitions, batch_size=16):
    """The samples of one node, to train on and to test on."""
    train, test = images(partition_id, 40), images(num_partitions + partition_id, 20)
    trainloader = DataLoader(train, batch_size=batch_size, shuffle=True)
    return trainloader, DataLoader(test, batch_size=batch_size)


def load_centralized_dataset():
    """Samples on the server."""
    return DataLoader(images(1000, 40), batch_size=40)


def train(net, trainloader, epochs, lr):
    """Train on all batches; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for x, y in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader):
    """The mean loss and the accuracy."""
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in testloader:
            outputs = net(x)
            loss += F.cross_entropy(outputs, y, reduction="sum").item()
            correct += int((outputs.argmax(1) == y).sum())
            count += len(y)
    return loss / count, correct / count
