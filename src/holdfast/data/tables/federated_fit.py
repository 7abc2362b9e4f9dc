"""Fitting of scikit-learn transformers on summaries of each site: counts, sums, extremes and sets of categories.

Every site reduces its rows to a `Summary`. The summaries of all sites are merged, and the transformer gets the
attributes of a fit on all rows together, up to rounding. No row leaves its site. Each step of a pipeline needs one
such exchange, on the rows as transformed by the previous steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.data.tables.table import is_missing

Summary = dict[str, Any]
Transformer = Any
"""A scikit-learn transformer."""

CAN_BE_FITTED = (
    "StandardScaler, MinMaxScaler, MaxAbsScaler, OneHotEncoder, OrdinalEncoder, SimpleImputer (mean, most_frequent or "
    "constant), transformers without state, and Pipeline and ColumnTransformer of these"
)


def is_fitted(transformer: Transformer) -> bool:
    """Whether a scikit-learn transformer has been fitted."""
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(transformer)
    except NotFittedError:
        return False
    return True


def fit_federated(transformer: Transformer, sites: Sequence[np.ndarray], names: Sequence[str]) -> Transformer:
    """A fitted copy of ``transformer``, as fitted on the rows of all ``sites`` ``[rows, columns]`` together.

    ``names`` are the columns' names, by which a ColumnTransformer may select them.
    """
    from sklearn.base import clone
    from sklearn.compose import ColumnTransformer
    from sklearn.pipeline import Pipeline

    if isinstance(transformer, Pipeline):
        steps = []
        for name, step in transformer.steps:
            fitted = step if step in (None, "passthrough") else fit_federated(step, sites, names)
            steps.append((name, fitted))
            if fitted is not step:
                sites = [fitted.transform(rows) for rows in sites]
        return Pipeline(steps)
    if isinstance(transformer, ColumnTransformer):
        return _fit_columns(transformer, sites, names)
    merged = merge([summarise(transformer, rows) for rows in sites])
    return _fit_on_summary(clone(transformer), merged, sites[0])


def summarise(transformer: Transformer, rows: np.ndarray) -> Summary:
    """The summary of a site's rows ``[rows, columns]`` from which ``transformer`` can be fitted."""
    kind = type(transformer).__name__
    if kind == "StandardScaler":
        x = np.asarray(rows, np.float64)
        count = np.isfinite(x).sum(0)
        mean = np.divide(np.nansum(x, 0), count, out=np.zeros(x.shape[1]), where=count > 0)
        return {"moments": (count, mean, np.nansum((x - mean) ** 2, 0))}
    if kind in ("MinMaxScaler", "MaxAbsScaler"):
        x = np.asarray(rows, np.float64)
        known = np.isfinite(x)
        return {"min": np.where(known, x, np.inf).min(0), "max": np.where(known, x, -np.inf).max(0)}
    if kind in ("OneHotEncoder", "OrdinalEncoder"):
        if (
            transformer.categories != "auto"
            or transformer.min_frequency is not None
            or transformer.max_categories is not None
        ):
            raise HoldfastError(
                f"{kind} is fitted across sites with the categories found there; leave categories, min_frequency and "
                "max_categories at their defaults, or pass it fitted"
            )
        return {"values": [Counter(_plain(column)) for column in np.asarray(rows).T]}
    if kind == "SimpleImputer":
        if transformer.strategy == "median" or callable(transformer.strategy):
            raise HoldfastError(
                "a median cannot be computed from sums over sites; use SimpleImputer with mean, most_frequent or "
                "constant, or pass it fitted"
            )
        missing = _missing(transformer, rows)
        if transformer.strategy != "mean":
            columns = zip(np.asarray(rows).T, missing.T, strict=True)
            return {"missing": missing.sum(0), "values": [Counter(_plain(c[~m])) for c, m in columns]}
        x = np.where(missing, 0, rows).astype(np.float64)
        return {"missing": missing.sum(0), "count": (~missing).sum(0), "sum": x.sum(0)}
    if not _needs_fit(transformer):
        return {}
    raise HoldfastError(
        f"{kind} cannot be fitted on sums and counts of the sites; pass it fitted, or take one of {CAN_BE_FITTED}"
    )


def merge(summaries: Sequence[Summary]) -> Summary:
    """The summary of the rows of all sites together."""
    merged: Summary = {}
    for key in summaries[0]:
        parts = [summary[key] for summary in summaries]
        if key == "moments":
            merged[key] = _merge_moments(parts)
        elif key == "values":
            merged[key] = [sum(columns, Counter()) for columns in zip(*parts, strict=True)]
        else:
            merged[key] = {"min": np.min, "max": np.max}.get(key, np.sum)(parts, axis=0)
    return merged


def _merge_moments(parts: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Number, mean and summed squared deviations of all rows, from those of each site (Chan et al., 1979)."""
    counts, means, deviations = (np.stack(column) for column in zip(*parts, strict=True))
    count = counts.sum(0)
    mean = np.divide((counts * means).sum(0), count, out=np.zeros(len(count)), where=count > 0)
    return count, mean, deviations.sum(0) + (counts * (means - mean) ** 2).sum(0)


def _fit_on_summary(transformer: Transformer, summary: Summary, rows: np.ndarray) -> Transformer:
    """Fit on a few rows that have the statistics of all rows; ``rows`` are some, for transformers without state."""
    kind = type(transformer).__name__
    if kind == "StandardScaler":
        count, mean, squares = summary["moments"]
        variance = np.divide(squares, count, out=np.full(len(mean), np.nan), where=count > 0)
        spread = np.sqrt(variance)
        transformer.fit(np.stack([mean - spread, mean + spread]))
        constant = (
            variance
            <= count * np.finfo(np.float64).eps * variance + (count * mean * np.finfo(np.float64).eps) ** 2
        )
        if transformer.with_mean:
            transformer.mean_ = mean
        if transformer.with_std:
            transformer.var_, transformer.scale_ = variance, np.where(constant, 1.0, spread)
        same = bool((count == count[0]).all())
        transformer.n_samples_seen_ = count[0] if same else count
        return transformer
    if kind in ("MinMaxScaler", "MaxAbsScaler"):
        return transformer.fit(np.stack([summary["min"], summary["max"]]))
    if kind in ("OneHotEncoder", "OrdinalEncoder"):
        return transformer.fit(_table([list(values) for values in summary["values"]], rows))
    if kind == "SimpleImputer":
        if transformer.strategy == "mean":
            filled = [s / n if n else np.nan for s, n in zip(summary["sum"], summary["count"], strict=True)]
        else:
            filled = [_most_frequent(values) for values in summary["values"]]
        # A second row marks the columns in which a value was missing, for the indicator.
        second = [
            transformer.missing_values if m else v for m, v in zip(summary["missing"], filled, strict=True)
        ]
        return transformer.fit(_table([list(pair) for pair in zip(filled, second, strict=True)], rows))
    return transformer.fit(rows)


def _fit_columns(transformer: Transformer, sites: Sequence[np.ndarray], names: Sequence[str]) -> Transformer:
    """Fit the parts of a ColumnTransformer one by one, each on its columns."""
    from sklearn.base import clone
    from sklearn.frozen import FrozenEstimator

    if not isinstance(transformer.remainder, str):
        raise HoldfastError(
            "the remainder of a ColumnTransformer must be 'drop' or 'passthrough' to be fitted across sites"
        )
    parts = []
    for name, part, chosen in transformer.transformers:
        positions = _positions(chosen, names)
        if isinstance(part, str):
            parts.append((name, part, positions))
        elif positions:
            columns = [_numeric(rows[:, positions]) for rows in sites]
            fitted = fit_federated(part, columns, [names[p] for p in positions])
            parts.append((name, FrozenEstimator(fitted), positions))
    whole = clone(transformer).set_params(transformers=parts)
    return whole.fit(sites[0])


def _positions(chosen: Any, names: Sequence[str]) -> list[int]:
    """The positions of columns that are chosen by names, positions or a mask."""
    if callable(chosen) or isinstance(chosen, slice):
        raise HoldfastError("a ColumnTransformer must list its columns by name to be fitted across sites")
    listed = [chosen] if isinstance(chosen, (str, int, np.integer)) else list(chosen)
    if listed and all(isinstance(c, (bool, np.bool_)) for c in listed):
        return [position for position, taken in enumerate(listed) if taken]
    for column in listed:
        if isinstance(column, str) and column not in names:
            raise HoldfastError(
                f"the transformer's column '{column}' is not among the columns {', '.join(names)}"
            )
    return [names.index(c) if isinstance(c, str) else int(c) for c in listed]


def _numeric(rows: np.ndarray) -> np.ndarray:
    """Objects as floats where all of them are numbers."""
    try:
        return rows.astype(np.float64)
    except (TypeError, ValueError):
        return rows


def _missing(imputer: Transformer, rows: np.ndarray) -> np.ndarray:
    """Which values the imputer treats as missing."""
    mark, values = imputer.missing_values, np.asarray(rows)
    if not is_missing(mark):
        return np.asarray(values == mark)
    if values.dtype.kind == "f":
        return np.asarray(np.isnan(values))
    return np.array([[is_missing(value) for value in row] for row in values.tolist()], np.bool_).reshape(
        values.shape
    )


def _plain(column: np.ndarray) -> list[Any]:
    """The values of a column as Python objects, all missing ones as the same NaN."""
    return [np.nan if is_missing(value) else value for value in column.tolist()]


def _most_frequent(values: Mapping[Any, int]) -> Any:
    """The most frequent value, the smallest in case of ties; NaN if there is none."""
    highest = max(values.values(), default=0)
    return min((value for value, times in values.items() if times == highest), default=np.nan)


def _table(columns: Sequence[list[Any]], like: np.ndarray) -> np.ndarray:
    """Columns of different length as one array; the shorter ones repeat their first value."""
    length = max(map(len, columns), default=1)
    rows = [[c[i] if i < len(c) else c[0] for c in columns] for i in range(length)]
    array = np.empty(
        (length, len(columns)), np.asarray(like).dtype if np.asarray(like).dtype.kind == "f" else object
    )
    array[:] = rows
    return array


def _needs_fit(transformer: Transformer) -> bool:
    from sklearn.utils import get_tags

    return bool(get_tags(transformer).requires_fit)
