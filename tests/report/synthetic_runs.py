"""Run directories with the files of real training, written without training.

The global model's class accuracies rise, and fall whenever a round's participants lack a class; ``keeps`` in [0, 1]
is the share of such a class's accuracy that local training preserves.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import yaml

from holdfast.core.random import generator

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_run(
    path: Path,
    method: str = "fedavg",
    *,
    keeps: float = 0.3,
    seed: int = 0,
    rounds: int = 40,
    clients: int = 20,
    clients_per_round: int = 5,
    classes: list[str] = CLASSES,
    probe: bool = True,
    stream: bool = False,
    domains: bool = False,
    finished: bool = True,
    **settings: object,
) -> Path:
    """One run directory; ``stream`` adds stages and their accuracies, ``domains`` per-domain accuracy."""
    path.mkdir(parents=True)
    total = len(classes)
    experiment = {
        "name": path.name,
        "method": {"name": method, **settings},
        "data": {"name": "cifar10"},
        "partition": {"name": "dirichlet", "alpha": 0.1},
        "model": {"name": "cnn"},
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "seed": seed,
        "classes": classes,
    }
    (path / "experiment.yaml").write_text(yaml.safe_dump(experiment, sort_keys=False))
    draw = generator(seed, "synthetic partition")
    stages = 5 if stream else 1
    counts = np.floor(draw.dirichlet(np.full(total, 0.2), (stages, clients)) * 500).astype(int)
    federation = {"clients": clients, "classes": classes, "sizes": counts.sum(axis=(0, 2)).tolist()}
    federation["label_counts"] = counts.tolist() if stream else counts[0].tolist()
    if stream:
        federation["stages"] = stages
    if domains:
        federation["domains"] = {"names": ["mnist", "svhn"], "clients": [k % 2 for k in range(clients)]}
    (path / "federation.json").write_text(json.dumps(federation))
    write_records(
        path,
        synthetic_records(counts, keeps, seed, rounds, clients_per_round, total, probe, stream, domains),
    )
    if probe:
        (path / "probe.json").write_text(json.dumps(features(keeps, seed, clients=5, classes=total)))
    if finished:
        (path / "model.safetensors").write_bytes(b"")
    return path


def read_records(path: Path) -> list[dict]:
    """The records of a run directory."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def write_records(path: Path, records: Iterable[dict]) -> None:
    """Replace the records of a run directory."""
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def synthetic_records(
    counts, keeps, seed, rounds, clients_per_round, total, probe=True, stream=False, domains=False
):
    """The records of metrics.jsonl, one per round."""
    stages, clients = counts.shape[:2]
    skill = generator(seed, "synthetic skill").uniform(0.55, 0.95, total)
    before = np.zeros(total)
    for number in range(1, rounds + 1):
        draw = generator(seed, "synthetic round", number)
        stage = (number - 1) % stages
        chosen = draw.choice(clients, clients_per_round, replace=False)
        held = counts[stage, chosen]
        share = held / np.maximum(1, held.sum(axis=1, keepdims=True))
        pull = 1 - np.exp(-12 * share)
        after = before * (keeps + (1 - keeps) * pull) + (skill - before).clip(0) * pull * 0.8
        after = (after + draw.normal(0, 0.01, after.shape)).clip(0, 1)
        now = (0.5 * before * keeps + (1 - 0.5 * keeps) * after.mean(axis=0) * 1.25).clip(0, skill)
        out = (1 - share) / (total - 1)
        record = {
            "round": number,
            "stage": stage,
            "accuracy": now.mean(),
            "loss": float(-np.log(now.mean() * 0.95 + 0.01)),
            "class_accuracy": now.tolist(),
            "train_loss": 1 / np.sqrt(number),
            "lr": 0.01,
            "participants": chosen.tolist(),
            "samples": held.sum(axis=1).tolist(),
            "locals": {"class_accuracy": after.tolist(), "accuracy": after.mean(axis=1).tolist()},
            "in_local": float((share * now).sum(axis=1).mean()),
            "out_local": float((out * now).sum(axis=1).mean()),
            "local_in": (share * after).sum(axis=1).tolist(),
            "local_out": (out * after).sum(axis=1).tolist(),
            "weight_divergence": (
                1.5 - keeps + share.std(axis=1) + draw.normal(0, 0.05, clients_per_round)
            ).tolist(),
            "distribution_distance": np.linalg.norm(now / now.sum() - share, axis=1).tolist(),
            "forgetting": None if number == 1 else float((before - now).clip(0).mean()),
            "local_forgetting": (before - after).clip(0).mean(axis=1).tolist(),
            "bytes_up": 4_000_000,
            "bytes_down": 4_000_000,
            "seconds": {"train": 1.5, "evaluate": 0.2, "total": 1.7},
            "incidents": [{"client": 3, "kind": "nan", "detail": "loss was not finite"}]
            if number == 7
            else [],
        }
        if probe and number % 10 == 0:
            record["probe"] = {
                "gradient_diversity": 1 + 2 / keeps / np.sqrt(number),
                "alignment": {"local": 0.5 + 0.3 * keeps, "global": 0.6 + 0.3 * keeps, "dead": 0.2},
                "feature_distance": 3 * (1 - keeps) + 1 / number,
                "classifier_similarity": keeps * (1 - 1 / number),
            }
        if stream:
            tasks = (
                counts[:, chosen].transpose(1, 0, 2) / np.maximum(1, counts[:, chosen].sum(-1)).T[..., None]
            )
            record["stream"] = {
                "task_accuracy": np.einsum("ktc,kc->kt", tasks, after).tolist(),
                "A_sel": now.mean() * (1 - 0.08 * stage * (1 - keeps)),
            }
            if stage == stages - 1:
                record["stream"] |= {
                    "A_loc": now.mean() * 0.8,
                    "A_glo": now.mean(),
                    "A_loc_t": now[total // 2 :].mean() * 0.6,
                    "A_glo_t": now[total // 2 :].mean() * 0.8,
                    "average_forgetting": 0.3 * (1 - keeps),
                    "transfer": [
                        {
                            "client": int(client),
                            "average_forgetting": 0.3 * (1 - keeps) + 0.01 * client,
                            "backward_transfer": -0.3 * (1 - keeps),
                            "forward_transfer": None if client == chosen[0] else 0.2 * keeps,
                        }
                        for client in chosen
                    ],
                }
        if domains:
            record["domain_accuracy"] = {"mnist": now.mean(), "svhn": now.mean() * 0.7}
        before = now
        yield json.loads(json.dumps(record, default=float))


def features(keeps, seed, clients, classes, per_class=8):
    """probe.json: samples of every class as seen by every client, closer together the more a method keeps."""
    draw = generator(seed, "synthetic features")
    labels = np.tile(np.repeat(np.arange(classes), per_class), clients)
    owners = np.repeat(np.arange(clients), classes * per_class)
    centres, shifts = draw.normal(0, 10, (classes, 2)), draw.normal(0, 8 * (1 - keeps), (clients, 2))
    places = centres[labels] + shifts[owners] + draw.normal(0, 1.5, (len(labels), 2))
    same = np.clip(draw.normal(keeps, 0.15, 4000), -1, 1)
    different = np.clip(draw.normal(0, 0.3, 9000), -1, 1)
    return {
        "tsne": np.round(places, 2).tolist(),
        "labels": labels.tolist(),
        "clients": owners.tolist(),
        "pairs": {
            "edges": np.linspace(-1, 1, 41).round(3).tolist(),
            "positive": np.histogram(same, 40, (-1, 1))[0].tolist(),
            "negative": np.histogram(different, 40, (-1, 1))[0].tolist(),
        },
    }
