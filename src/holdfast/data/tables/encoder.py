"""The encoding of a table's columns as a model's input."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.spec import named
from holdfast.data.tables.federated_fit import Transformer, fit_federated, is_fitted
from holdfast.data.tables.table import (
    Table,
    TableSource,
    as_numbers,
    as_texts,
    holds_numbers,
    read_table,
    refuse_decimal_commas,
)

MANY_CATEGORIES = (
    0.5  # share of distinct texts above which a column is probably an identifier, not a category
)


@dataclass(frozen=True, eq=False)
class TableEncoder:
    """Columns of a table and the fitted scikit-learn transformer that converts them to a model's input.

    Attributes:
        columns: the names of the columns, in the order that the transformer expects.
        categorical: the columns that are passed as text; the others are numbers, with NaN for missing values.
        transformer: fitted.
        description: the transformer in words.
    """

    columns: tuple[str, ...]
    categorical: tuple[str, ...]
    transformer: Transformer
    description: str

    def __call__(self, source: TableSource) -> np.ndarray:
        """Encode the rows of a table: float32 ``[rows, features]``. Other columns are ignored."""
        table = read_table(source)
        if missing := [column for column in self.columns if column not in table.columns]:
            raise HoldfastError(
                f"{table.name} has no column '{missing[0]}'; it must have {', '.join(self.columns)}"
            )
        try:
            encoded = self.transformer.transform(self._input(table))
        except (TypeError, ValueError) as error:
            raise HoldfastError(
                f"the transformer {self.description} cannot encode {table.name}: {error}"
            ) from None
        if hasattr(encoded, "toarray"):  # sparse
            encoded = encoded.toarray()
        return np.asarray(encoded, np.float32)

    def matrix(self, table: Table) -> np.ndarray:
        """All columns as one array: float64, or objects (float or text) where some are categorical."""
        return _matrix(table, self.columns, self.categorical)

    def _input(self, table: Table) -> Any:
        """The matrix; a frame for a transformer that was fitted on one."""
        names = getattr(self.transformer, "feature_names_in_", None)
        if names is None:
            return self.matrix(table)
        pandas = import_module("pandas")  # it was fitted on a frame
        texts = set(self.categorical)
        return pandas.DataFrame(
            {str(c): as_texts(table, c) if c in texts else as_numbers(table, c) for c in names}
        )

    def describe(self) -> dict[str, Any]:
        """The entry in a run's record, as plain values."""
        return {
            "columns": list(self.columns),
            "categorical": list(self.categorical),
            "transformer": self.description,
        }


def fit_encoder(
    sites: Mapping[str, Table],
    columns: Sequence[str],
    categorical: Collection[str] = (),
    transformer: Transformer | None = None,
) -> TableEncoder:
    """The encoder for these columns of all sites' tables, fitted across sites.

    Columns of texts, and those named in ``categorical``, are categories; the others are numbers. By default numbers
    are standardised and their missing values replaced by the mean, categories are one-hot encoded and their missing
    values replaced by the most frequent one. ``transformer`` is another scikit-learn transformer, fitted or not.
    """
    tables = list(sites.values())
    texts = tuple(c for c in columns if c in categorical or _is_text(tables, c))
    for column in set(texts).difference(categorical):
        refuse_decimal_commas(tables, column)
        _warn_of_names(tables, column)
    if transformer is None:
        transformer = _default_transformer(columns, texts)
    elif isinstance(transformer, type) or not hasattr(transformer, "transform"):
        raise HoldfastError(
            f"transformer is {named(transformer)}; it must be a scikit-learn transformer, such as StandardScaler()"
        )
    description = " ".join(repr(transformer).split())
    if not is_fitted(transformer):
        matrices = [_matrix(table, columns, texts) for table in tables]
        try:
            transformer = fit_federated(transformer, matrices, columns)
        except (TypeError, ValueError) as error:
            raise HoldfastError(
                f"the transformer {description} cannot be fitted on these columns: {error}"
            ) from None
    return TableEncoder(tuple(columns), texts, transformer, description)


def warn_of_unseen(encoder: TableEncoder, train: Collection[Table], test: Collection[Table]) -> None:
    """Warn of categories that occur in test rows only, for which the one-hot encoding has no column."""
    for column in encoder.categorical:
        known, tested = (
            {text for table in tables for text in as_texts(table, column) if text is not None}
            for tables in (train, test)
        )
        if unseen := sorted(tested - known):
            warnings.warn(
                f"column '{column}' has the value '{unseen[0]}' only in test rows; a category without training "
                "rows is encoded as zeros",
                HoldfastWarning,
                stacklevel=2,
            )


def _default_transformer(columns: Sequence[str], texts: Collection[str]) -> Transformer:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = make_pipeline(SimpleImputer(strategy="mean"), StandardScaler())
    categories = make_pipeline(
        SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    )
    parts = (("numbers", numbers, False), ("categories", categories, True))
    return ColumnTransformer(
        [(name, part, [c for c in columns if (c in texts) == is_text]) for name, part, is_text in parts]
    )


def _matrix(table: Table, columns: Sequence[str], texts: Collection[str]) -> np.ndarray:
    values = np.empty((len(table), len(columns)), object if texts else np.float64)
    for position, column in enumerate(columns):
        if column in texts:
            values[:, position] = [np.nan if text is None else text for text in as_texts(table, column)]
        else:
            values[:, position] = as_numbers(table, column)
    return values


def _is_text(tables: Sequence[Table], column: str) -> bool:
    """Whether a column holds text, not numbers, at every site; raises an error if sites differ."""
    found = [holds_numbers(table[column]) for table in tables]
    if any(numbers for numbers, _ in found):
        for table in tables:
            as_numbers(table, column)
        return False
    if not any(other for _, other in found):
        raise HoldfastError(f"column '{column}' has no value in any row; name it in drop")
    return True


def _warn_of_names(tables: Sequence[Table], column: str) -> None:
    texts = [text for table in tables for text in as_texts(table, column) if text is not None]
    if len(texts) >= 20 and len(set(texts)) > MANY_CATEGORIES * len(texts):
        warnings.warn(
            f"column '{column}' has {len(set(texts))} different texts in {len(texts)} rows, and each text becomes "
            "a feature; name the column in categorical if it is a category, or else in drop",
            HoldfastWarning,
            stacklevel=2,
        )
