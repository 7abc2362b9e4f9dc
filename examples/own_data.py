"""Your own arrays, your own clients, your own torch model."""

import numpy as np
from torch import nn

import holdfast as hf

# Two hospitals and a laboratory measure the same 20 quantities; the laboratory sees the rare class 2.
rng = np.random.default_rng(0)
labels = np.repeat([0, 1, 2], [500, 500, 200])
samples = rng.normal(size=(1200, 20)).astype(np.float32) + 3 * np.eye(3, 20, dtype=np.float32)[labels]
test = rng.permutation(1200) < 240

dataset = hf.Dataset.from_arrays(
    samples[~test], labels[~test], samples[test], labels[test], classes=["healthy", "common", "rare"]
)
common, rare = np.flatnonzero(dataset.y_train < 2), np.flatnonzero(dataset.y_train == 2)
federation = hf.federate(dataset, [common[::2], common[1::2], rare])

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
run = hf.train(hf.FedNTD(beta=1.0), model, federation, rounds=30, local_epochs=2, lr=0.05, seed=0)

print(f"accuracy {run.accuracy:.1%}")
for name, accuracy in zip(dataset.classes, run.class_accuracy[-1], strict=True):
    print(f"  {name}: {accuracy:.1%}")
