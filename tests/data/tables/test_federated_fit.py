"""Transformers fitted on what sites share, against scikit-learn fitted on all rows together."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.feature_selection import VarianceThreshold
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    QuantileTransformer,
    StandardScaler,
)

from holdfast.core.errors import HoldfastError
from holdfast.data.tables.federated_fit import fit_federated, merge, summarise

NAMES = ("age", "weight", "constant", "large")


def numbers(missing=0.0):
    """Three sites of 40, 9 and 1 rows with different means; ``missing`` is the share of NaN."""
    rng = np.random.default_rng(0)
    sites = []
    for site, rows in enumerate((40, 9, 1)):
        x = np.stack([
            rng.normal(50 + 10 * site, 9, rows), rng.exponential(3, rows), np.full(rows, 2.0), rng.normal(1e7, 3, rows)
        ], 1)  # fmt: skip
        if missing:
            x[rng.random(x.shape) < missing] = np.nan
        sites.append(x)
    return sites


def texts():
    rng = np.random.default_rng(1)
    sites = [
        rng.choice(["a", "b", "c"][: 1 + site], (rows, 2)).astype(object)
        for site, rows in enumerate((12, 9, 4))
    ]
    sites[0][3, 0] = sites[2][0, 1] = np.nan
    return sites


def assert_as_pooled(transformer, sites, tolerance=1e-9):
    pooled = clone(transformer).fit(np.concatenate(sites))
    fitted = fit_federated(transformer, sites, [str(i) for i in range(sites[0].shape[1])])
    for rows in sites:
        one, other = pooled.transform(rows), fitted.transform(rows)
        one, other = (x.toarray() if hasattr(x, "toarray") else x for x in (one, other))
        if one.dtype == object:
            assert one.tolist() == other.tolist()
        else:
            np.testing.assert_allclose(other, one, rtol=tolerance, atol=tolerance)
    return pooled, fitted


@pytest.mark.parametrize(
    "transformer",
    [
        StandardScaler(),
        StandardScaler(with_mean=False),
        StandardScaler(with_std=False),
        MinMaxScaler((-1, 2)),
        MaxAbsScaler(),
        Normalizer(),
        FunctionTransformer(np.abs),
        make_pipeline(StandardScaler(), "passthrough", MinMaxScaler()),
    ],
    ids=lambda t: " ".join(str(t).split()),
)
def test_numbers(transformer):
    # a deviation of 3 around 1e7 loses seven of sixteen digits in either computation
    assert_as_pooled(transformer, numbers(), 1e-7)


@pytest.mark.parametrize(
    "transformer",
    [
        StandardScaler(),
        SimpleImputer(strategy="mean"),
        SimpleImputer(strategy="most_frequent"),
        SimpleImputer(strategy="constant", fill_value=-1),
        SimpleImputer(strategy="mean", add_indicator=True),
        make_pipeline(SimpleImputer(), StandardScaler()),
    ],
    ids=lambda t: " ".join(str(t).split()),
)
def test_numbers_with_missing_ones(transformer):
    assert_as_pooled(transformer, numbers(0.2), 1e-7)


def test_attributes_of_the_scaler_are_those_of_the_pooled_fit():
    pooled, fitted = assert_as_pooled(StandardScaler(), numbers(), 1e-7)
    np.testing.assert_allclose(fitted.mean_, pooled.mean_, rtol=1e-12)
    np.testing.assert_allclose(fitted.var_, pooled.var_, rtol=1e-9)
    assert fitted.scale_[2] == pooled.scale_[2] == 1
    assert fitted.n_samples_seen_ == pooled.n_samples_seen_ == 50


@pytest.mark.parametrize(
    "transformer",
    [
        SimpleImputer(strategy="most_frequent"),
        OneHotEncoder(),
        OneHotEncoder(handle_unknown="ignore", drop="if_binary", sparse_output=False),
        OrdinalEncoder(),
        make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder()),
    ],
    ids=lambda t: " ".join(str(t).split()),
)
def test_texts(transformer):
    assert_as_pooled(transformer, texts())


def test_columns_may_be_chosen_by_name_position_or_mask():
    sites = numbers(0.1)
    by_name = ColumnTransformer(
        [
            ("fill", make_pipeline(SimpleImputer(), StandardScaler()), ["age", "large"]),
            ("rest", SimpleImputer(), ["weight"]),
        ],
        remainder="drop",
    )
    by_position = ColumnTransformer(
        [("fill", make_pipeline(SimpleImputer(), StandardScaler()), [0, 3]), ("rest", SimpleImputer(), [1])]
    )
    by_mask = ColumnTransformer(
        [
            ("fill", make_pipeline(SimpleImputer(), StandardScaler()), [True, False, False, True]),
            ("rest", SimpleImputer(), [False, True, False, False]),
        ]
    )
    pooled = clone(by_position).fit(np.concatenate(sites))
    for given in (by_name, by_position, by_mask):
        fitted = fit_federated(given, sites, NAMES)
        np.testing.assert_allclose(fitted.transform(sites[0]), pooled.transform(sites[0]), atol=1e-7)


def test_what_a_site_shares_has_no_rows():
    summary = summarise(StandardScaler(), numbers()[0])
    assert sum(np.size(part) for part in summary["moments"]) == 3 * 4
    summary = summarise(OneHotEncoder(), texts()[0])
    assert [dict(column) for column in summary["values"]] == [{"a": 11, np.nan: 1}, {"a": 12}]


def test_the_order_of_the_sites_does_not_matter():
    parts = [summarise(StandardScaler(), rows) for rows in numbers(0.2)]
    for one, other in zip(merge(parts)["moments"], merge(parts[::-1])["moments"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize(
    ("transformer", "words"),
    [
        (
            SimpleImputer(strategy="median"),
            "a median cannot be computed from sums over sites; use SimpleImputer with mean",
        ),
        (
            QuantileTransformer(),
            "QuantileTransformer cannot be fitted on sums and counts of the sites; pass it fitted",
        ),
        (VarianceThreshold(), "VarianceThreshold cannot be fitted on sums"),
        (
            OneHotEncoder(min_frequency=3),
            "OneHotEncoder is fitted across sites with the categories found there",
        ),
        (make_pipeline(StandardScaler(), QuantileTransformer()), "QuantileTransformer cannot be fitted"),
        (
            ColumnTransformer([("a", StandardScaler(), ["height"])]),
            "column 'height' is not among the columns age, weight",
        ),
        (ColumnTransformer([("a", StandardScaler(), slice(2))]), "must list its columns by name"),
        (
            ColumnTransformer([("a", StandardScaler(), [0])], remainder=StandardScaler()),
            "the remainder of a Column",
        ),
    ],
)
def test_what_cannot_be_fitted_across_sites_is_refused(transformer, words):
    with pytest.raises(HoldfastError, match=words):
        fit_federated(transformer, numbers(), NAMES)
