"""Readers of real federations: data collected at several sites, with the site of each sample."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.data.dataset import Group
from holdfast.data.sources.formats import Arrays

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")


def read_heart_disease(folder: Path) -> Arrays:
    """UCI's heart disease as FLamby's Fed-Heart-Disease: four hospitals, whether a patient is ill, 13 features.

    The three columns that are missing for most patients are dropped, then patients with a missing value. Chest pain and
    the resting ECG become indicators without the first category. The test rows are those of FLamby: a third of each
    hospital, stratified if it has more than two patients of each class. Features are standardised by the mean and
    the standard deviation of the hospital's own training rows; unlike in FLamby, a constant feature is not
    divided by nearly 0.

    Cleveland's file may also be the copy on Kaggle. It has other codes, the opposite label and another order of rows,
    which gives another split.
    """
    from sklearn.model_selection import train_test_split

    tables = [_read_numbers(folder / f"processed.{hospital}.data") for hospital in HOSPITALS]
    tables[0] = _with_codes_of_uci(tables[0])
    tables = [np.delete(table, (10, 11, 12), axis=1) for table in tables]
    tables = [table[~np.isnan(table).any(1)] for table in tables]
    everyone = np.concatenate(tables)
    indicators = [(column, value) for column in (2, 6) for value in np.unique(everyone[:, column])[1:]]
    parts = []
    for table in tables:
        features = np.delete(table[:, :-1], (2, 6), axis=1)
        coded = np.stack([table[:, column] == value for column, value in indicators], 1)
        x, y = np.concatenate([features, coded], 1), (table[:, -1] > 0).astype(np.int64)
        few = len(np.unique(y)) < 2 or np.bincount(y).min() <= 2
        train, test = train_test_split(
            np.arange(len(y)),
            train_size=0.66,
            test_size=1 - 0.66,
            random_state=43,
            stratify=None if few else y,
        )
        train, test = np.sort(train), np.sort(test)
        mean, deviation = x[train].mean(0), x[train].std(0, ddof=1)
        x = (x - mean) / np.where(deviation > 0, deviation + 1e-9, 1)
        parts.append((x[train], y[train], x[test], y[test]))
    return _by_site(parts, HOSPITALS, ("healthy", "ill"), "binary")


def _with_codes_of_uci(table: np.ndarray) -> np.ndarray:
    """Cleveland's table, with Kaggle's codes of chest pain, ECG and disease converted to UCI's."""
    if table[:, 2].min() > 0:
        return table
    table = table.copy()
    table[:, 2] = np.array([4, 2, 3, 1])[table[:, 2].astype(int)]
    table[:, 6] = np.array([2, 0, 1])[table[:, 6].astype(int)]
    table[:, -1] = 1 - table[:, -1]
    return table


def read_tcga_brca(folder: Path) -> Arrays:
    """Breast cancer patients of TCGA as FLamby's Fed-TCGA-BRCA: six regions, survival, 39 clinical features.

    Targets are the time and whether death was observed. The test rows are those of FLamby, which leaves out eight
    patients.
    """
    header, *rows = _read_rows(folder / "brca.csv")
    event, time = header.index("E"), header.index("T")
    features = [column for column in range(1, len(header)) if column not in (event, time)]
    _, *folds = _read_rows(folder / "train_test_split.csv")
    place = {pid: where for pid, _, where in folds}
    try:
        numbers = np.array([row[1:] for row in rows], np.float64)
        where = np.array([place.get(row[0], "") for row in rows])
    except (ValueError, IndexError) as error:
        raise HoldfastError(f"{folder / 'brca.csv'} does not have the published content: {error}") from None
    x = numbers[:, [column - 1 for column in features]]
    y = numbers[:, [time - 1, event - 1]]
    parts = [
        tuple(values[where == f"{part}_{region}"] for part in ("train", "test") for values in (x, y))
        for region in range(len(REGIONS))
    ]
    return _by_site(parts, REGIONS, None, "survival")


WINDOW = 80  # characters, as in LEAF


def read_shakespeare(folder: Path) -> Arrays:
    """Shakespeare's plays by speaker: windows of 80 characters; the target of each character is the next one.

    The lines of a speaker are joined in their order and cut into windows that do not overlap. The last fifth of a
    speaker's windows is for testing; speakers with fewer than two windows are left out. A character is encoded as its
    index in the sorted alphabet of the text.
    """
    text = (folder / "input.txt").read_text(encoding="utf-8")
    spoken: dict[str, list[str]] = {}
    for passage in text.split("\n\n"):
        speaker, separator, lines = passage.strip("\n").partition(":\n")
        if separator and "\n" not in speaker:
            spoken.setdefault(speaker, []).append(lines)
    characters = sorted(set(text))
    code = np.zeros(1 + ord(max(characters)), np.int64)
    code[[ord(character) for character in characters]] = np.arange(len(characters))
    speakers, parts = [], []
    for speaker, passages in spoken.items():
        letters = code[[ord(character) for character in "\n".join(passages)]]
        windows = (len(letters) - 1) // WINDOW
        if windows < 2:
            continue
        x = letters[: windows * WINDOW].reshape(windows, WINDOW)
        y = letters[1 : windows * WINDOW + 1].reshape(windows, WINDOW)
        tests = max(1, round(windows / 5))
        speakers.append(speaker)
        parts.append((x[:-tests], y[:-tests], x[-tests:], y[-tests:]))
    if not speakers:
        raise HoldfastError(
            f"{folder / 'input.txt'} has no speaker with at least {2 * WINDOW + 1} characters"
        )
    return _by_site(parts, tuple(speakers), tuple(map(repr, characters)), "sequence")


def _by_site(
    parts: Sequence[tuple[np.ndarray, ...]],
    sites: tuple[str, ...],
    classes: tuple[str, ...] | None,
    task: str,
) -> Arrays:
    """Each site's ``x_train, y_train, x_test, y_test`` as one data set."""
    x_train, y_train, x_test, y_test = (np.concatenate(column) for column in zip(*parts, strict=True))
    train, test = (
        np.repeat(np.arange(len(sites)), [len(part[position]) for part in parts]) for position in (1, 3)
    )
    return Arrays(x_train, y_train, x_test, y_test, classes, {"site": Group(sites, train, test)}, task)


def _read_numbers(path: Path) -> np.ndarray:
    """The rows of a file of numbers, NaN for ``?``; a first line of names is skipped."""
    rows = _read_rows(path)
    if rows and rows[0][0].isalpha():
        del rows[0]
    try:
        return np.array([[np.nan if cell == "?" else float(cell) for cell in row] for row in rows])
    except ValueError as error:
        raise HoldfastError(f"{path} does not have the published content: {error}") from None


def _read_rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        return [row for row in csv.reader(stream) if row]
