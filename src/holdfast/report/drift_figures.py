"""How far clients drift apart: weights, features, classifiers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.report.curves import NotRecorded, Shown, ends, recorded, with_seed
from holdfast.report.loading import RunGroup, StoredRun
from holdfast.report.panels import Cloud, Line, Lines, Numbers, Panel, Scatter, thin

MOST_DOTS = 2500  # of one cloud
PAIRS = (("positive", "one class (should be near 1)"), ("negative", "different classes"))


def divergence(groups: Sequence[RunGroup]) -> Shown:
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
        raise NotRecorded(
            "weight divergence and distribution distance were not recorded (train with --evaluate-locals)"
        )
    distance, moved = "distribution distance", "weight divergence"
    panels: list[Panel] = [
        Scatter("Dots: clients, later rounds stronger", distance, moved, clouds),
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


def _distances(run: StoredRun) -> Numbers:
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


def feature_drift(groups: Sequence[RunGroup]) -> Shown:
    """Distance of the clients' features of the same inputs, and similarity of their classifier updates."""
    distance = recorded(groups, "probe.feature_distance")
    similarity = recorded(groups, "probe.classifier_similarity")
    if not distance and not similarity:
        raise NotRecorded("no probe was recorded (train with --probe-every 10)")
    panels = [
        Lines("Feature distance between clients", "round", "distance", distance, percent=False),
        Lines("Similarity of classifier updates", "round", "cosine", similarity, percent=False),
    ]
    told = f"Feature distance at the last probe: {ends(distance, percent=False)}."
    return [panel for panel in panels if panel.lines], told


def alignment(groups: Sequence[RunGroup]) -> Shown:
    """Share of neurons that keep their preferred class, and how far clients' gradients point apart."""
    local = recorded(groups, "probe.alignment.local")
    aggregated = recorded(groups, "probe.alignment.global")
    diversity = recorded(groups, "probe.gradient_diversity")
    if not (local or aggregated or diversity):
        raise NotRecorded("no probe was recorded (train with --probe-every 10)")
    panels = [
        Lines("Sent-out model against local models", "round", "neurons with the same class", local),
        Lines(
            "Sent-out model against the aggregated one", "round", "neurons with the same class", aggregated
        ),
        Lines(
            "Neurons that never fire", "round", "share of neurons", recorded(groups, "probe.alignment.dead")
        ),
        Lines("Gradient diversity", "round", "diversity (1: all agree)", diversity, percent=False),
    ]
    told = f"Neurons that keep their class in local training, last probe: {ends(local)}." if local else ""
    return [panel for panel in panels if panel.lines], told


def features(groups: Sequence[RunGroup]) -> Shown:
    """The clients' features of the same test samples, in two dimensions, and how alike pairs of them are."""
    panels: list[Panel] = []
    told = []
    for group in groups:
        run = next((run for run in group.runs if run.probe.get("tsne")), None)
        if run is not None:
            panels += _feature_panels(run, with_seed(group))
            means = [_mean_cosine(run, kind) for kind, _ in PAIRS]
            told.append(f"{group.label} {means[0]:.2f} and {means[1]:.2f}")
    if not panels:
        raise NotRecorded("no probe of features was recorded (train with --probe-every 10)")
    return panels, f"Mean cosine of pairs of one class and of different classes: {'; '.join(told)}."


def _feature_panels(run: StoredRun, label: str) -> list[Panel]:
    labels, clients = (np.asarray(run.probe[key], dtype=np.intp) for key in ("labels", "clients"))
    places = np.asarray(run.probe["tsne"], dtype=np.float64)
    classes = {int(number): run.classes[number] for number in np.unique(labels)}
    named_clients = {int(number): f"client {number}" for number in np.unique(clients)}
    pairs = [_histogram(run, kind, name, colour) for colour, (kind, name) in enumerate(PAIRS)]
    return [
        Scatter(f"{label}: features by class", "", "", _clouds(places, labels, classes), bare=True),
        Scatter(f"{label}: features by client", "", "", _clouds(places, clients, named_clients), bare=True),
        Lines(f"{label}: pairs across clients", "cosine of features", "share of pairs", pairs, stepped=True),
    ]


def _clouds(places: Numbers, numbers: NDArray[np.intp], names: dict[int, str]) -> list[Cloud]:
    clouds = []
    for colour, (number, name) in enumerate(names.items()):
        own = places[numbers == number]
        own = own[thin(len(own), MOST_DOTS // len(names))]
        clouds.append(Cloud(name, own[:, 0], own[:, 1], colour))
    return clouds


def _histogram(run: StoredRun, kind: str, name: str, colour: int) -> Line:
    """Shares of the pairs by cosine, each bin drawn from its left edge to the next."""
    counts = np.asarray(run.probe["pairs"][kind], dtype=np.float64)
    edges = np.asarray(run.probe["pairs"]["edges"], dtype=np.float64)
    return Line(name, edges, np.append(counts, counts[-1]) / max(1.0, counts.sum()), colour)


def _mean_cosine(run: StoredRun, kind: str) -> float:
    counts, edges = (np.asarray(run.probe["pairs"][key], dtype=np.float64) for key in (kind, "edges"))
    return float(counts @ (edges[:-1] + edges[1:]) / 2 / max(1.0, counts.sum()))
