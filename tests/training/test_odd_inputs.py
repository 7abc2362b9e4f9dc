"""Odd experiment files, options and data files: each works, or one sentence refuses it."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.core.errors import HoldfastError
from holdfast.data.sources.formats import read_images, read_npz

INPUTS = int(os.environ.get("HOLDFAST_FUZZ", "40000")) // 40

VALUES = (
    "null", "true", "0", "-1", "1e308", "-.inf", ".nan", "''", "x", "[]", "{}", "[1]", "[x]", "{name: 1}", "{name: x}",
    "{name: mlp, hidden: [0]}", "1:30", "2026-01-31", "!!int x", "!!bool 3", "!!timestamp z", "!!binary x", "&a [*a]",
    "9" * 400, "~nosuchuser/x", "a" * 300, "mlp:99999999999", "mlp:0", "fedntd:beta=", "fedntd+", "dirichlet:", "a\\0b",
    "'\"'", "mixed-digits:", "mixed-digits:x,y", "resnet18:norm=", "5,schedule=every-n:0", "rotation=", "'+'", "':'",
)  # fmt: skip


def test_experiment_files(tmp_path: Path) -> None:
    rng, keys = np.random.default_rng(0), list(hf.Experiment.__dataclass_fields__)
    refused = 0
    path = tmp_path / "experiment.yaml"
    for _ in range(INPUTS):
        chosen = rng.choice(len(keys), rng.integers(1, 4), replace=False)
        lines = [f"{keys[key]}: {VALUES[rng.integers(len(VALUES))]}" for key in chosen]
        path.write_text("\n".join(lines) + "\n")
        try:
            hf.Experiment.from_file(path)
        except HoldfastError as error:
            refused += 1
            sentence = str(error)
            if "\n" in sentence:
                pytest.fail(sentence)
    assert INPUTS / 2 < refused < INPUTS


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stream", "--data", "digits"], "a stream needs the number of clients"),
        (["partition", "--data", "digits"], "needs the number of clients"),
        (["run", "--data", "~nosuchuser/x"], "there is no folder ~nosuchuser/x"),
        (["run", "--data", "~nosuchuser/x.npz"], "cannot be read as a .npz file"),
        (["run", "--data", "a" * 300], "unknown data set"),
        (["run", "--data", "a/" * 3000], "there is no folder"),
        (["run", "--data", "digits", "--clients", "3", "--model", "mlp:99999999999"], "does not fit into"),
        (["run", "--set", "lr=1:30"], "lr is '1:30'; it must be a number"),
        (["run", "--set", "clients=1:30"], "clients is '1:30'; it must be a whole number"),
    ],
)  # fmt: skip
def test_options(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert result.stderr.strip().count("\n") == 0


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """The bytes with a changed byte, shortened, or with a part missing."""
    changed, at = bytearray(data), int(rng.integers(len(data)))
    match rng.integers(3):
        case 0:
            changed[at] ^= 1 << int(rng.integers(8))
        case 1:
            del changed[at:]
        case _:
            del changed[at : at + 20]
    return bytes(changed)


@pytest.mark.parametrize("suffix", [".ppm", ".png", ".bmp", ".gif", ".tif", ".jpg", ".webp"])
def test_damaged_images(suffix: str, tmp_path: Path) -> None:
    from PIL import Image

    rng, file = np.random.default_rng(0), tmp_path / f"image{suffix}"
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(file)
    whole = file.read_bytes()
    refused = 0
    for _ in range(INPUTS // 20):
        file.write_bytes(damaged(whole, rng))
        try:
            read_images([file])
        except HoldfastError as error:
            refused += 1
            if str(file) not in str(error):
                pytest.fail(str(error))
    assert refused


def test_an_image_that_would_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "image.ppm").write_bytes(b"P6 60000 60000 255\n" + bytes(100))
    with pytest.raises(HoldfastError, match=r"image\.ppm cannot be read as an image"):
        read_images([tmp_path / "image.ppm"])


def test_damaged_archives(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "data.npz"
    arrays = {name: rng.integers(0, 3, 40) for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez_compressed(file, **arrays)
    whole = file.read_bytes()
    refused = 0
    for _ in range(INPUTS // 4):
        file.write_bytes(damaged(whole, rng))
        try:
            read_npz(file)
        except HoldfastError as error:
            refused += 1
            if str(file) not in str(error):
                pytest.fail(str(error))
    assert refused
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x_train.npy", b"no array")
    with pytest.raises(HoldfastError, match=r"data\.npz"):
        read_npz(file)


def test_federation_files(tmp_path: Path) -> None:
    dataset = hf.load("digits")
    federation = hf.federate(dataset, "iid", clients=3)
    file = tmp_path / "federation.json"
    federation.save(file)
    content, rng = json.loads(file.read_text()), np.random.default_rng(0)
    values = [
        yaml.safe_load(value)
        for value in ("null", "1", "x", "[]", "[x]", "{}", "[[1]]", "-1", "1e300", "[-1]")
    ]
    refused = 0
    for _ in range(INPUTS // 10):
        key = list(content)[rng.integers(len(content))]
        file.write_text(json.dumps(content | {key: values[rng.integers(len(values))]}))
        try:
            hf.Federation.load(file, dataset)
        except HoldfastError as error:
            refused += 1
            if "\n" in str(error):
                pytest.fail(str(error))
    assert refused > INPUTS / 20
