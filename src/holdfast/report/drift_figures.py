"""How far clients drift apart: weights, features, classifiers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast import metrics
from holdfast.report.curves import NotRecorded, Shown, ends, recorded, with_seed
from holdfast.report.loading import Group, Run
from holdfast.report.panels import Cloud, Line, Lines, Numbers, Panel, Scatter, thin

MOST_DOTS = 2500  # of one cloud
HISTOGRAM_BINS = 60


def divergence(groups: Sequence[Group]) -> Shown:
    """How far local weights moved against how unlike the client's data and the global model's classes are."""
    clouds, told = [], []
    for group in groups:
        points = np.concatenate([np.zeros((0, 3)), *map(_distances, group.runs)])
        if not len(points):
            continue
        kept = points[thin(len(points), MOST_DOTS)]
        age = kept[:, 2] / kept[:, 2].max()
        clouds.append(Cloud(group.label, kept[:, 0], kept[:, 1], group.colour, 0.15 + 0.75 * age))
        if len(points) > 2 and points[:, :2].std(axis=0).all():
            told.append(f"{group.label} {np.corrcoef(points[:, 0], points[:, 1])[0, 1]:.2f}")
    if not clouds:
        raise NotRecorded("weight divergence and distribution distance were not recorded")
    distance, moved = "distribution distance", "weight divergence"
    panels: list[Panel] = [
        Scatter("Each dot a client in a round; later rounds stronger", distance, moved, clouds),
        Lines(
            "Weight divergence, mean", "round", moved, recorded(groups, "weight_divergence"), percent=False
        ),
        Lines(
            "Distribution distance, mean",
            "round",
            distance,
            recorded(groups, "distribution_distance"),
            percent=False,
        ),
    ]
    return panels, f"Correlation of the two distances: {', '.join(told) or 'too few points'}."


def _distances(run: Run) -> Numbers:
    """[n, 3]: distribution distance, weight divergence, round."""
    moved = dict(run.lists("weight_divergence"))
    rows = [
        np.column_stack([far, moved[x], np.full(len(far), x)])
        for x, far in run.lists("distribution_distance")
        if x in moved and len(moved[x]) == len(far)
    ]
    points = np.concatenate([np.zeros((0, 3)), *rows])
    finite: Numbers = points[np.isfinite(points).all(axis=1)]
    return finite


def feature_drift(groups: Sequence[Group]) -> Shown:
    """Distance of the clients' features of the same inputs, and similarity of their classifier updates."""
    distance = recorded(groups, "probe.feature_distance")
    similarity = recorded(groups, "probe.classifier_similarity")
    if not distance and not similarity:
        raise NotRecorded("no probe was recorded (train with --probe 10)")
    panels = [
        Lines("Feature distance between clients", "round", "distance", distance, percent=False),
        Lines("Similarity of classifier updates", "round", "cosine", similarity, percent=False),
    ]
    told = f"Feature distance at the last probe: {ends(distance, percent=False)}."
    return [panel for panel in panels if panel.lines], told


def alignment(groups: Sequence[Group]) -> Shown:
    """Share of neurons that keep their preferred class, and how far clients' gradients point apart."""
    local = recorded(groups, "probe.alignment.local")
    aggregated = recorded(groups, "probe.alignment.global")
    diversity = recorded(groups, "probe.gradient_diversity")
    if not (local or aggregated or diversity):
        raise NotRecorded("no probe was recorded (train with --probe 10)")
    panels = [
        Lines("Sent-out model against local models", "round", "neurons with the same class", local),
        Lines(
            "Sent-out model against the aggregated one", "round", "neurons with the same class", aggregated
        ),
        Lines("Gradient diversity", "round", "diversity (1: all agree)", diversity, percent=False),
    ]
    told = f"Neurons that keep their class in local training, last probe: {ends(local)}." if local else ""
    return [panel for panel in panels if panel.lines], told


def features(groups: Sequence[Group]) -> Shown:
    """The clients' features of the same test samples, in two dimensions, and how alike pairs of them are."""
    panels: list[Panel] = []
    told = []
    for group in groups:
        run = next((run for run in group.runs if run.probe.get("features")), None)
        if run is None:
            continue
        panels += _feature_panels(run, with_seed(group))
        positive, negative = _pair_similarity(run)
        if positive.size and negative.size:
            told.append(f"{group.label} {positive.mean():.2f} and {negative.mean():.2f}")
    if not panels:
        raise NotRecorded("no probe of features was recorded (train with --probe 10)")
    return panels, f"Mean cosine of pairs of one class and of different classes: {'; '.join(told)}."


def _feature_panels(run: Run, label: str) -> list[Panel]:
    labels, clients = (np.asarray(run.probe[key], dtype=np.intp) for key in ("labels", "clients"))
    shown = _owned(run)[clients, labels]
    places = np.asarray(run.probe.get("tsne") or _tsne(run.probe["features"]), dtype=np.float64)
    names = {int(number): run.classes[number] for number in np.unique(labels[shown])}
    panels: list[Panel] = [
        Scatter(f"{label}: features by class", "", "", _clouds(places, labels, shown, names), bare=True),
        Scatter(
            f"{label}: features by client",
            "",
            "",
            _clouds(
                places,
                clients,
                shown,
                {int(number): f"client {number}" for number in np.unique(clients[shown])},
            ),
            bare=True,
        ),
    ]
    pairs = [
        ("one class (should be near 1)", 0),
        ("different classes", 1),
    ]
    histogram = [
        _histogram(name, values, colour)
        for (name, colour), values in zip(pairs, _pair_similarity(run), strict=True)
    ]
    panels.append(
        Lines(
            f"{label}: pairs across clients", "cosine of features", "share of pairs", histogram, stepped=True
        )
    )
    return panels


def _histogram(name: str, values: Numbers, colour: int) -> Line:
    """Shares of the values in bins of [−1, 1], each drawn from its bin's left edge to the next."""
    counts, edges = np.histogram(values, HISTOGRAM_BINS, (-1.0, 1.0))
    return Line(name, edges, np.append(counts, counts[-1]) / max(1, values.size), colour)


def _clouds(
    places: Numbers, numbers: NDArray[np.intp], shown: NDArray[np.bool_], names: dict[int, str]
) -> list[Cloud]:
    clouds = []
    for colour, (number, name) in enumerate(names.items()):
        own = places[shown & (numbers == number)]
        own = own[thin(len(own), MOST_DOTS // len(names))]
        clouds.append(Cloud(name, own[:, 0], own[:, 1], colour))
    return clouds


def _owned(run: Run) -> NDArray[np.bool_]:
    """[clients, C]: which classes a client holds; all of them where that is not known."""
    if run.label_counts is None:
        return np.ones((max(run.probe["clients"]) + 1, len(run.classes)), dtype=np.bool_)
    return np.asarray(run.label_counts.sum(axis=0) > 0)


def _pair_similarity(run: Run) -> tuple[Numbers, Numbers]:
    """Cosines of pairs of one class and of two; the same samples passed through every client's model."""
    clients, labels = np.asarray(run.probe["clients"]), np.asarray(run.probe["labels"])
    present, counts = np.unique(clients, return_counts=True)
    order = np.argsort(clients, kind="stable")
    by_client = labels[order].reshape(len(present), -1) if len(set(counts)) == 1 else None
    if by_client is None or (by_client != by_client[0]).any():
        return np.zeros(0), np.zeros(0)
    stacked = np.asarray(run.probe["features"], dtype=np.float64)[order].reshape(len(present), counts[0], -1)
    return metrics.pair_similarity(stacked, by_client[0], _owned(run)[present])


def _tsne(values: Sequence[Sequence[float]]) -> Numbers:
    from sklearn.manifold import TSNE

    array = np.asarray(values, dtype=np.float64)
    spread = np.ptp(array, axis=0)
    array = (array - array.min(axis=0)) / np.where(spread > 0, spread, 1.0)
    perplexity = min(30.0, (len(array) - 1) / 3)
    return np.asarray(
        TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(array), dtype=np.float64
    )
