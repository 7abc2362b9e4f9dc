"""FedKA and FedAvg in plain PyTorch, without Holdfast, to see whether FedKA diverges there too.

The CIFAR-10 experiment of FedKA's Table 1, implemented from the paper alone: ten clients by Dirichlet(0.1), all of
which train in every round for ten local epochs of SGD, one after another.

    python benchmarks/peers/fedka_plain.py DATA --beta 0.001 --rounds 100 --json results/peer-fedka-plain.json

DATA is the folder with cifar-10-batches-py. ``--beta 0`` is FedAvg.
"""

import argparse
import json
import math
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CLIENTS, CLASSES, ALPHA, MIN_SIZE = 10, 10, 0.1, 10
EPOCHS, BATCH_SIZE, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 10, 128, 0.01, 0.9, 1e-5
GAMMA, MU = 0.05, 10  # share from which a class is dominant, and size of the anchor


def cifar10(folder: Path) -> tuple[np.ndarray, ...]:
    """Images [N, 3, 32, 32] as bytes and labels, for training and for test."""
    parts = []
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        with (folder / "cifar-10-batches-py" / name).open("rb") as file:
            parts.append(pickle.load(file, encoding="latin1"))
    x = [part["data"].reshape(-1, 3, 32, 32) for part in parts]
    y = [np.array(part["labels"]) for part in parts]
    return np.concatenate(x[:5]), np.concatenate(y[:5]), x[5], y[5]


def partition(y: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Each client's sample ids: Dirichlet proportions for each class, without clients that have a fair share."""
    while True:
        clients: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(CLASSES):
            ids = rng.permutation(np.flatnonzero(y == label))
            shares = rng.dirichlet([ALPHA] * CLIENTS)
            shares *= [len(client) < len(y) / CLIENTS for client in clients]
            cuts = (np.cumsum(shares / shares.sum()) * len(ids)).astype(int)[:-1]
            for client, part in zip(clients, np.split(ids, cuts), strict=True):
                client.extend(part)
        if min(map(len, clients)) >= MIN_SIZE:
            return [np.array(client) for client in clients]


def network() -> nn.Sequential:
    """Two convolutions of 5 x 5 and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def accuracy(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of correctly classified samples."""
    with torch.no_grad():
        predicted = torch.cat([net(part).argmax(-1) for part in x.split(2000)])
    return float((predicted == y).float().mean())


def main() -> None:
    """Train, and write the accuracy of every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--beta", type=float, default=0.001)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    x, labels, x_test, y_test = cifar10(arguments.data)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    x, x_test = (((torch.from_numpy(v) / 255 - mean) / deviation).to(device) for v in (x, x_test))
    y, y_test = torch.from_numpy(labels).to(device), torch.from_numpy(y_test).to(device)
    clients = partition(labels, rng)
    shared = np.array([rng.choice(np.flatnonzero(labels == label)) for label in range(CLASSES)])
    server, local = network().to(device), network().to(device)
    curve, logits = [], []

    for number in range(1, arguments.rounds + 1):
        totals = [torch.zeros_like(p) for p in server.parameters()]
        for ids in clients:
            counts = np.bincount(labels[ids], minlength=CLASSES)
            dominant = counts / len(ids) >= GAMMA
            own = [rng.choice(ids[labels[ids] == c]) for c in np.flatnonzero((counts > 0) & ~dominant)]
            anchor = rng.permutation([*own, *shared[counts == 0]])[:MU].astype(int)
            anchored = arguments.beta > 0 and len(anchor) > 0
            other = torch.from_numpy(np.flatnonzero(~dominant)).to(device)
            with torch.no_grad():
                target = server(x[anchor])[:, other] if anchored else None
            local.load_state_dict(server.state_dict())
            optimizer = torch.optim.SGD(
                local.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY
            )
            for _ in range(EPOCHS):
                order = torch.from_numpy(rng.permutation(ids)).to(device)
                for batch in order.split(BATCH_SIZE):
                    out = local(torch.cat([x[batch], x[anchor]]) if anchored else x[batch])
                    loss = F.cross_entropy(out[: len(batch)], y[batch])
                    if target is not None:
                        loss = loss + arguments.beta * (
                            out[len(batch) :, other] - target
                        ).square().sum() / len(anchor)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            with torch.no_grad():
                for total, p in zip(totals, local.parameters(), strict=True):
                    total += p * (len(ids) / len(labels))
        with torch.no_grad():
            for p, total in zip(server.parameters(), totals, strict=True):
                p.copy_(total)
            logit = float(server(x_test[:2000]).mean())  # a shift of all logits, which softmax does not show
        if not math.isfinite(logit):
            print(f"round {number}: the weights are not finite")
            break
        logits.append(logit)
        curve.append(accuracy(server, x_test, y_test))
        print(f"round {number}: {curve[-1]:.2%}, mean logit {logit:.2f}", flush=True)
        if arguments.json:
            entry = {
                "beta": arguments.beta,
                "seed": arguments.seed,
                "device": device.type,
                "torch": torch.__version__,
                "accuracy": [round(v, 4) for v in curve],
                "mean_logit": [round(v, 3) for v in logits],
            }
            arguments.json.write_text(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
