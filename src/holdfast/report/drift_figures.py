"""Figures of client drift: weights, features, classifiers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.metrics.arrays import FloatArray
from holdfast.report.curves import (
    FigureContent,
    NotRecorded,
    final_values,
    label_with_seed,
    recorded_lines,
)
from holdfast.report.loading import RunGroup, StoredRun
from holdfast.report.panels import Line, Lines, Panel, PointSet, Scatter, thin

MAX_POINTS = 2500  # of one set of points
PAIRS = (("positive", "same class (should be near 1)"), ("negative", "different classes"))


def divergence(groups: Sequence[RunGroup]) -> FigureContent:
    """Weight divergence of local models against the distribution distance of their clients' data."""
    point_sets, correlations = [], []
    for group in groups:
        points = np.concatenate([np.zeros((0, 3)), *map(_distances, group.runs)])
        if not len(points):
            continue
        kept = points[thin(len(points), MAX_POINTS)]
        age = kept[:, 2] / kept[:, 2].max()
        point_sets.append(PointSet(group.label, kept[:, 0], kept[:, 1], group.colour, 0.15 + 0.75 * age))
        if len(points) > 2 and points[:, :2].std(axis=0).all():
            correlations.append(f"{group.label} {np.corrcoef(points[:, 0], points[:, 1])[0, 1]:.2f}")
    if not point_sets:
        raise NotRecorded(
            "weight divergence and distribution distance were not recorded (train with --evaluate-locals)"
        )
    distance, moved = "distribution distance", "weight divergence"
    panels: list[Panel] = [
        Scatter("Clients, later rounds more opaque", distance, moved, point_sets),
        _mean_over_clients(groups, moved),
        _mean_over_clients(groups, distance),
    ]
    return panels, f"Correlation of the two distances: {', '.join(correlations) or 'too few points'}."


def _mean_over_clients(groups: Sequence[RunGroup], name: str) -> Lines:
    lines = recorded_lines(groups, name.replace(" ", "_"))
    return Lines(f"{name.capitalize()}, mean", "round", name, lines, percent=False)


def _distances(run: StoredRun) -> FloatArray:
    """[n, 3]: distribution distance, weight divergence, round."""
    divergences = dict(run.lists("weight_divergence"))
    rows = [
        np.column_stack([distances, divergences[x], np.full(len(distances), x)])
        for x, distances in run.lists("distribution_distance")
        if x in divergences and len(divergences[x]) == len(distances)
    ]
    points = np.concatenate([np.zeros((0, 3)), *rows])
    finite: FloatArray = points[np.isfinite(points).all(axis=1)]
    return finite


def feature_drift(groups: Sequence[RunGroup]) -> FigureContent:
    """Distance between the clients' features of the same inputs, and similarity of their classifier updates."""
    distance = recorded_lines(groups, "probe.feature_distance")
    similarity = recorded_lines(groups, "probe.classifier_similarity")
    if not distance and not similarity:
        raise NotRecorded("no probe was recorded (train with --probe-every 10)")
    panels = [
        Lines("Feature distance between clients", "round", "distance", distance, percent=False),
        Lines("Similarity of classifier updates", "round", "cosine", similarity, percent=False),
    ]
    summary = f"Feature distance at the last probe: {final_values(distance, percent=False)}."
    return [panel for panel in panels if panel.lines], summary


def alignment(groups: Sequence[RunGroup]) -> FigureContent:
    """Share of neurons that keep their preferred class, and diversity of the clients' gradients."""
    local = recorded_lines(groups, "probe.alignment.local")
    aggregated = recorded_lines(groups, "probe.alignment.global")
    diversity = recorded_lines(groups, "probe.gradient_diversity")
    if not (local or aggregated or diversity):
        raise NotRecorded("no probe was recorded (train with --probe-every 10)")
    dead = recorded_lines(groups, "probe.alignment.dead")
    share = "neurons with the same class"
    panels = [
        Lines("Global model before the round against local models", "round", share, local),
        Lines("Global model before the round against after", "round", share, aggregated),
        Lines("Dead neurons", "round", "share of neurons", dead),
        Lines("Gradient diversity", "round", "diversity (1: equal gradients)", diversity, percent=False),
    ]
    summary = f"Neurons that keep their class in local training, last probe: {final_values(local)}."
    return [panel for panel in panels if panel.lines], summary if local else ""


def features(groups: Sequence[RunGroup]) -> FigureContent:
    """The clients' features of the same test samples in two dimensions, and cosines of pairs of features."""
    panels: list[Panel] = []
    cosines = []
    for group in groups:
        run = next((run for run in group.runs if run.probe.get("tsne")), None)
        if run is not None:
            panels += _feature_panels(run, label_with_seed(group))
            means = [_mean_cosine(run, kind) for kind, _ in PAIRS]
            cosines.append(f"{group.label} {means[0]:.2f} and {means[1]:.2f}")
    if not panels:
        raise NotRecorded("no probe of features was recorded (train with --probe-every 10)")
    return panels, f"Mean cosine of pairs of the same class and of different classes: {'; '.join(cosines)}."


def _feature_panels(run: StoredRun, label: str) -> list[Panel]:
    labels, clients = (np.asarray(run.probe[key], dtype=np.intp) for key in ("labels", "clients"))
    places = np.asarray(run.probe["tsne"], dtype=np.float64)
    classes = {int(number): run.classes[number] for number in np.unique(labels)}
    client_names = {int(number): f"client {number}" for number in np.unique(clients)}
    pairs = [_histogram(run, kind, name, colour) for colour, (kind, name) in enumerate(PAIRS)]
    by_class, by_client = _point_sets(places, labels, classes), _point_sets(places, clients, client_names)
    return [
        Scatter(f"{label}: features by class", "", "", by_class, hide_axes=True),
        Scatter(f"{label}: features by client", "", "", by_client, hide_axes=True),
        Lines(f"{label}: pairs across clients", "cosine of features", "share of pairs", pairs, stepped=True),
    ]


def _point_sets(places: FloatArray, numbers: NDArray[np.intp], names: dict[int, str]) -> list[PointSet]:
    point_sets = []
    for colour, (number, name) in enumerate(names.items()):
        own = places[numbers == number]
        own = own[thin(len(own), MAX_POINTS // len(names))]
        point_sets.append(PointSet(name, own[:, 0], own[:, 1], colour))
    return point_sets


def _histogram(run: StoredRun, kind: str, name: str, colour: int) -> Line:
    """Shares of the pairs by cosine, each bin drawn from its left edge to the next."""
    counts = np.asarray(run.probe["pairs"][kind], dtype=np.float64)
    edges = np.asarray(run.probe["pairs"]["edges"], dtype=np.float64)
    return Line(name, edges, np.append(counts, counts[-1]) / max(1.0, counts.sum()), colour)


def _mean_cosine(run: StoredRun, kind: str) -> float:
    counts, edges = (np.asarray(run.probe["pairs"][key], dtype=np.float64) for key in (kind, "edges"))
    return float(counts @ (edges[:-1] + edges[1:]) / 2 / max(1.0, counts.sum()))
