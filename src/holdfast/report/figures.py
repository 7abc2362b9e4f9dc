"""The figures of the papers, by name, built from anyone's runs.

A builder takes groups of runs (one group: runs that differ only in their seed) and gives a figure's panels
and one sentence of what they show, or raises `NotRecorded` with what a run would have to record.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.errors import unknown
from holdfast.report import drift_figures, federation_figures, forgetting_figures, progress_figures
from holdfast.report.curves import Shown
from holdfast.report.loading import RunGroup
from holdfast.report.panels import Figure


@dataclass(frozen=True)
class FigureKind:
    """A figure that can be asked for by name."""

    title: str
    reading: str
    source: str
    build: Callable[[Sequence[RunGroup]], Shown]


FIGURES: dict[str, FigureKind] = {
    "accuracy": FigureKind(
        "Accuracy over rounds",
        "Higher and earlier is better; a curve that saws up and down forgets and learns again. The band "
        "is one standard deviation over seeds.",
        "Flashback Fig. 3, FedKA Fig. 5",
        progress_figures.accuracy,
    ),
    "classes": FigureKind(
        "Accuracy by class and round",
        "Read a row from left to right: a strong colour that fades again is a class that was learned and "
        "then forgotten. Rows that grow stronger evenly are what one hopes for.",
        "Flashback Fig. 1b and 5, FedNTD Fig. 2a",
        progress_figures.classes,
    ),
    "domains": FigureKind(
        "Accuracy by domain and round",
        "Each row is one domain's test set; a row that stays fainter than the others is a domain the "
        "global model serves badly.",
        "FedFA Fig. 18 to 21",
        progress_figures.domains,
    ),
    "strip": FigureKind(
        "One round, class by class",
        "The top row is the global model sent out, the middle rows are the clients' models after local "
        "training, the bottom row is the new global model; a dot marks a class the client holds. A "
        "colour that fades from one row to the next is knowledge lost: between top and middle by local "
        "training, between middle and bottom by aggregation.",
        "Flashback Fig. 2",
        forgetting_figures.strip,
    ),
    "forgetting": FigureKind(
        "Forgetting in each round",
        "Class accuracy lost since the model before, gains not counted against it: 0 is no forgetting. In "
        "the distributions, a curve further left and steeper forgets less and in fewer rounds.",
        "Flashback Fig. 4",
        forgetting_figures.forgetting,
    ),
    "forgetting-degree": FigureKind(
        "Forgetting by what a client holds",
        "1 means a class was wholly forgotten in local training, 0 unchanged, below 0 improved (drawn no "
        "lower than −1). Missing classes are absent from the client's data, non-dominant ones under 5 % of "
        "it. Classes the global model had under 1 % on are left out: there is nothing to forget.",
        "FedKA Fig. 2b and 6",
        forgetting_figures.forgetting_degree,
    ),
    "in-out-local": FigureKind(
        "Accuracy inside and outside the clients' data",
        "Local training (dashed) lifts the classes a client holds and lowers the ones it lacks; the wider "
        "that gap, the more is forgotten. Solid lines are the aggregated model on the same classes.",
        "FedNTD Fig. 4 and 7",
        forgetting_figures.in_out_local,
    ),
    "consistency": FigureKind(
        "Consistency of predictions",
        "The cosine of the per-class accuracies of successive global models: 1 means the model is good at "
        "the same classes as a round ago, dips are rounds in which it traded some classes for others.",
        "FedNTD Fig. 2b",
        forgetting_figures.consistency,
    ),
    "partition": FigureKind(
        "Who holds what",
        "A circle's area is the number of samples of a class at a client. A gap is a class the "
        "client has never seen; circles of very different sizes are skewed labels.",
        "FedKA Fig. 2a and 7",
        federation_figures.partition,
    ),
    "divergence": FigureKind(
        "Weight divergence and distribution distance",
        "To the right, clients whose data is unlike what the global model is good at; upwards, clients "
        "whose weights moved far. A method that keeps knowledge stays near the lower left.",
        "FedNTD Fig. 8",
        drift_figures.divergence,
    ),
    "feature-drift": FigureKind(
        "Features and classifiers across clients",
        "The same inputs pass through every client's model: a low distance means that clients agree on "
        "what an input looks like, a high similarity that their classifiers moved the same way.",
        "FedFA Fig. 4",
        drift_figures.feature_drift,
    ),
    "alignment": FigureKind(
        "Alignment of neurons and gradients",
        "The share of neurons that prefer the same class before and after; higher means that averaging "
        "weights averages like with like. Gradient diversity is 1 when all clients pull the same way.",
        "FedNTD Table 2",
        drift_figures.alignment,
    ),
    "features": FigureKind(
        "Feature space of the clients",
        "Each dot is a test sample seen by one client's model (t-SNE: distances are only roughly kept). "
        "Points of one class should lie together whichever client saw them; in the histogram, the two "
        "curves should part.",
        "FedFA Fig. 2 and 6 to 9",
        drift_figures.features,
    ),
    "stages": FigureKind(
        "Accuracy on a stream",
        "From stage to stage new tasks arrive; a curve that falls slowly forgets slowly. Dashed lines "
        "count only the minority classes. In the grids a column that fades downwards is a task that later "
        "tasks displaced; bars tell what each client's own tasks lost and gained by it.",
        "FedMLP Fig. 3 and 4",
        progress_figures.stages,
    ),
}


def build_figure(name: str, groups: Sequence[RunGroup]) -> Figure:
    """The named figure of these groups; raises `NotRecorded` where the runs do not hold what it shows."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    kind = FIGURES[name]
    panels, summary = kind.build(groups)
    return Figure(name, kind.title, kind.reading, kind.source, panels, summary)
