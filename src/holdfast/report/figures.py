"""The figures of the papers, by name, for any runs.

A builder receives groups of runs (one group: runs that differ only in their seed) and returns a figure's panels
and a summary sentence, or raises `NotRecorded` with the records that are missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.errors import unknown
from holdfast.report import drift_figures, federation_figures, forgetting_figures, progress_figures
from holdfast.report.curves import FigureContent
from holdfast.report.loading import RunGroup
from holdfast.report.panels import Figure


@dataclass(frozen=True)
class FigureKind:
    """A figure's title, how to read it, the published figures that it follows, and its builder."""

    title: str
    reading: str
    source: str
    build: Callable[[Sequence[RunGroup]], FigureContent]


FIGURES: dict[str, FigureKind] = {
    "accuracy": FigureKind(
        "Accuracy and other metrics over rounds",
        "Higher and earlier is better; a curve that oscillates forgets and relearns. The band is one "
        "standard deviation over seeds.",
        "Flashback Fig. 3, FedKA Fig. 5",
        progress_figures.accuracy,
    ),
    "classes": FigureKind(
        "Accuracy by class and round",
        "Each row is a class, from the first round to the last. A strong colour that fades to the right is "
        "a class that was learned and then forgotten.",
        "Flashback Fig. 1b and 5, FedNTD Fig. 2a",
        progress_figures.classes,
    ),
    "domains": FigureKind(
        "Accuracy by domain and round",
        "Each row is the test set of one domain; a row that stays fainter than the others is a domain on "
        "which the global model is less accurate.",
        "FedFA Fig. 18 to 21",
        progress_figures.domains,
    ),
    "strip": FigureKind(
        "One round, class by class",
        "The top row is the global model before the round, the middle rows are the clients' models after "
        "local training, the bottom row is the global model after aggregation; a dot marks a class that the "
        "client holds. A colour that fades between the top and the middle rows is accuracy lost in local "
        "training; between the middle and the bottom rows, accuracy lost in aggregation.",
        "Flashback Fig. 2",
        forgetting_figures.strip,
    ),
    "forgetting": FigureKind(
        "Forgetting in each round",
        "Class accuracy lost since the previous model; gains do not offset losses, and 0 means that nothing "
        "was forgotten. In the distributions, a curve further to the left means less forgetting.",
        "Flashback Fig. 4",
        forgetting_figures.forgetting,
    ),
    "forgetting-degree": FigureKind(
        "Forgetting by the share of a class in the client's data",
        "1: a class was forgotten completely in local training; 0: unchanged; below 0: improved (drawn no "
        "lower than −1). Missing classes are absent from the client's data, non-dominant classes make up "
        "less than 5 % of it. Classes on which the global model was less than 1 % accurate are left out.",
        "FedKA Fig. 2b and 6",
        forgetting_figures.forgetting_degree,
    ),
    "in-out-local": FigureKind(
        "Accuracy inside and outside the clients' data",
        "Local training (dashed) raises the accuracy on the classes that a client holds and lowers it on "
        "those it lacks; a wider gap means more forgetting. Solid lines are the global model on the same "
        "classes.",
        "FedNTD Fig. 4 and 7",
        forgetting_figures.in_out_local,
    ),
    "consistency": FigureKind(
        "Consistency of predictions",
        "The cosine of the class accuracies of consecutive global models: near 1 when the same classes stay "
        "accurate, lower in rounds that gain on some classes and lose on others.",
        "FedNTD Fig. 2b",
        forgetting_figures.consistency,
    ),
    "partition": FigureKind(
        "Samples by client and class",
        "The area of a circle is the number of samples of a class at a client. A gap is a class that the "
        "client has no samples of; circles of very different sizes mean skewed labels.",
        "FedKA Fig. 2a and 7",
        federation_figures.partition,
    ),
    "divergence": FigureKind(
        "Weight divergence and distribution distance",
        "To the right: clients whose label distribution differs from the global model's class accuracies. "
        "Upwards: clients whose weights moved far in local training. Methods that forget less stay closer "
        "to the lower left.",
        "FedNTD Fig. 8",
        drift_figures.divergence,
    ),
    "feature-drift": FigureKind(
        "Features and classifiers across clients",
        "All clients' models are given the same inputs: a low distance means similar features, a high "
        "similarity means that the clients' classifiers moved in the same direction.",
        "FedFA Fig. 4",
        drift_figures.feature_drift,
    ),
    "alignment": FigureKind(
        "Alignment of neurons and gradients",
        "The share of neurons that prefer the same class before and after; a higher share means that "
        "averaging weights combines neurons of the same function. Gradient diversity is 1 when all clients' "
        "gradients are equal.",
        "FedNTD Table 2",
        drift_figures.alignment,
    ),
    "features": FigureKind(
        "Feature space of the clients",
        "Each dot is a test sample as represented by one client's model (t-SNE preserves distances only "
        "roughly). Samples of one class should be close together for all clients; in the histogram, the "
        "two curves should be apart.",
        "FedFA Fig. 2 and 6 to 9",
        drift_figures.features,
    ),
    "stages": FigureKind(
        "Accuracy on a stream",
        "From stage to stage new tasks arrive; a curve that falls slowly means little forgetting. Dashed "
        "lines are restricted to the minority classes. In the heat maps, a column that fades downwards is a "
        "task that was forgotten while later tasks were learned; the bars show each client's forgetting and "
        "transfer on its own tasks.",
        "FedMLP Fig. 3 and 4",
        progress_figures.stages,
    ),
}


def build_figure(name: str, groups: Sequence[RunGroup]) -> Figure:
    """The named figure of these groups; raises `NotRecorded` if the runs lack the records that it shows."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    kind = FIGURES[name]
    panels, summary = kind.build(groups)
    return Figure(name, kind.title, kind.reading, kind.source, panels, summary)
