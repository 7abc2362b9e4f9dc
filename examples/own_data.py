"""Your own arrays, tables and sites, your own clients, your own torch model."""

import csv
import tempfile
from pathlib import Path

import numpy as np
from torch import nn

import holdfast as hf

# Two hospitals and a laboratory measure the same 20 quantities; the laboratory sees the rare class 2.
rng = np.random.default_rng(0)
labels = np.repeat([0, 1, 2], [500, 500, 200])
samples = rng.normal(size=(1200, 20)).astype(np.float32) + 3 * np.eye(3, 20, dtype=np.float32)[labels]

dataset = hf.Dataset.from_arrays(samples, labels, test=0.2, classes=["healthy", "common", "rare"])
common, rare = np.flatnonzero(dataset.y_train < 2), np.flatnonzero(dataset.y_train == 2)
federation = hf.federate(dataset, [common[::2], common[1::2], rare])

model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
run = hf.train(hf.FedNTD(beta=1.0), model, federation, rounds=30, local_epochs=2, lr=0.05, seed=0)

print(f"accuracy {run.accuracy:.1%}")
for name, accuracy in zip(dataset.classes, run.class_accuracy[-1], strict=True):
    print(f"  {name}: {accuracy:.1%}")

# One CSV file a site: missing ages, a column of texts, a price to predict.
with tempfile.TemporaryDirectory() as folder:
    for site, level in (("bern", 0.0), ("oslo", 1.0), ("rome", 2.0)):
        with Path(folder, f"{site}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["age", "kind", "price"])
            for _ in range(200):
                age, kind = rng.normal(40 + 5 * level, 10), rng.choice(["a", "b"])
                price = 0.1 * (age - 40) + (kind == "b") + rng.normal(scale=0.2)
                rows.writerow(["" if rng.random() < 0.1 else f"{age:.1f}", kind, f"{price:.3f}"])
    sites = hf.federation_from_sites(folder, target="price")

run = hf.train("fedavg", "linear", sites, rounds=20, lr=0.1, seed=0)
print(f"mean absolute error by site: {run.records[-1]['site_mae']}")
# New rows are encoded as the training rows were.
print(run.model(sites.dataset.transform({"age": [30, None], "kind": ["a", "b"]})).flatten().tolist())
