"""The schemas of a run's files. Keys are optional unless required; null marks an unknown value."""

from typing import Annotated, Any, Required, TypedDict

from holdfast.core.schema import RECTANGULAR

Number = float | None
Numbers = list[Number]
Matrix = Annotated[list[Numbers], RECTANGULAR]


class IncidentEntry(TypedDict, total=False):
    """A client's failure in a round, and its cause."""

    client: int
    kind: str
    detail: str


class LocalTests(TypedDict, total=False):
    """Tests of the local models of K participants."""

    class_accuracy: Matrix  # [K, C]
    accuracy: Numbers  # [K]
    domain_accuracy: dict[str, Numbers]  # [K] each
    global_before: Numbers  # [C]
    global_after: Numbers  # [C]


class Transfer(TypedDict, total=False):
    """Forgetting and transfer of one client of a stream."""

    client: Required[int]
    average_forgetting: Required[Number]
    backward_transfer: Required[Number]
    forward_transfer: Required[Number]


class Stream(TypedDict, total=False):
    """The metrics of a round of a stream."""

    A_sel: Number
    A_sel_t: Number
    A_loc: Number
    A_glo: Number
    A_loc_t: Number
    A_glo_t: Number
    A_pro: Number
    average_forgetting: Number
    backward_transfer: Number
    forward_transfer: Number
    task_accuracy: Matrix  # [K, T]
    transfer: list[Transfer]


class Alignment(TypedDict, total=False):
    """Shares of neurons."""

    local: Number
    dead: Number


class ProbeMetrics(TypedDict, total=False):
    """The metrics of a probe."""

    gradient_diversity: Number
    alignment: Alignment
    feature_distance: Number
    classifier_similarity: Number


class Seconds(TypedDict, total=False):
    """The duration of a round's parts."""

    train: Number
    evaluate: Number
    total: Number


class ValidationEntry(TypedDict, total=False):
    """Tests of the global model, or of local models, by K clients on their own validation samples.

    Further keys are the metrics' names: the mean over the clients, weighted by their samples.
    """

    site_mean: dict[str, Number]
    spread: dict[str, Number]
    worst: dict[str, Number]
    worst_client: dict[str, int]
    clients: list[int]  # [K]
    samples: list[int]  # [K]
    values: dict[str, Numbers]  # [K] each


class Record(TypedDict, total=False):
    """A line of metrics.jsonl: one round with K participants and C classes."""

    round: Required[int]
    stage: int | None
    lr: Number
    participants: list[int]  # [K]
    samples: list[int]  # [K]
    train_loss: Number
    locals: LocalTests
    local_in: Numbers  # [K]
    local_out: Numbers  # [K]
    weight_divergence: Numbers  # [K]
    local_forgetting: Numbers  # [K]
    distribution_distance: Numbers  # [K]
    in_local: Number
    out_local: Number
    bytes_down: int
    bytes_up: int
    incidents: list[IncidentEntry] | None
    stream: Stream | None
    probe: ProbeMetrics
    accuracy: Number
    loss: Number
    class_accuracy: Numbers | None  # [C]
    domain_accuracy: dict[str, Number] | None
    forgetting: Number
    validation: ValidationEntry  # of the global model
    local_validation: ValidationEntry  # of each participant's local model
    stopped_early: bool  # after this round
    seconds: Seconds


class Domains(TypedDict):
    """The domains' names, and the index of each client's domain."""

    names: list[str]
    clients: list[int]


class StoredFederation(TypedDict, total=False):
    """The content of federation.json."""

    clients: int
    stages: int
    classes: list[str]
    label_counts: Annotated[list[list[int]] | list[list[list[int]]], RECTANGULAR] | None
    domains: Domains | None
    public: int
    validation: list[int] | None  # validation samples of each client
    hash: str


class Pairs(TypedDict):
    """Histograms of cosines between pairs of features."""

    edges: list[float]
    positive: list[int]
    negative: list[int]


class StoredProbe(TypedDict, total=False):
    """The content of probe.json: a projection of N features."""

    tsne: Annotated[list[list[float]], RECTANGULAR]  # [N, 2]
    labels: list[int]  # [N]
    clients: list[int]  # [N]
    pairs: Pairs


class TaskEntry(TypedDict, total=False):
    """The task of a run, with its options."""

    name: str


class MetricEntry(TypedDict, total=False):
    """A user-defined metric, given as a function."""

    name: Required[str]
    less_is_better: bool


class StoredExperiment(TypedDict, total=False):
    """The entries of experiment.yaml that are read without being parsed as settings."""

    method: str | dict[str, Any] | list[Any] | None
    data: str | dict[str, Any] | None
    model: str | dict[str, Any]
    rounds: int
    seed: int | None
    classes: list[str | int | float | bool] | None
    shape: list[int]
    hash: str
    engine: str
    task: TaskEntry | None
    metrics: list[str | MetricEntry] | None
    versions: dict[str, Any]


class TrainedExperiment(TypedDict):
    """The entries of experiment.yaml that describe the model."""

    method: dict[str, Any]
    model: dict[str, Any]
    shape: list[int]
    classes: list[str]
    seed: int


class CheckpointMeta(TypedDict, total=False):
    """The metadata of a checkpoint: the identity of its run."""

    made_of: dict[str, Any]
    uses_rounds: bool  # whether the method depends on the number of rounds
    complete: bool  # whether the checkpoint has the states of all clients
    stopped_early: bool


class StoredComparison(TypedDict, total=False):
    """The content of comparison.json."""

    baseline: Required[str]


class AuditEntry(TypedDict, total=False):
    """The common fields of all lines of audit.jsonl."""

    event: Required[str]
    time: Required[str]
    previous: Required[str]
    hash: Required[str]


class AuditStart(TypedDict, total=False):
    """The run continues after ``round``: a process begins, resumes, extends or saves it."""

    round: Required[int]
    rounds: Required[int]
    records: Required[str]  # SHA-256 of metrics.jsonl up to that round
    files: Required[dict[str, str]]  # SHA-256 by name
    federation: Required[str]
    method: Required[dict[str, Any]]
    versions: Required[dict[str, str]]


class AuditIncident(TypedDict):
    """A client that was lost or conspicuous in a round."""

    client: int
    kind: str


class AuditRound(TypedDict, total=False):
    """A round."""

    round: Required[int]
    asked: Required[list[int]]  # the sampled clients
    used: Required[list[int]]  # the clients whose update is aggregated
    received: dict[str, str]  # by client, the SHA-256 of its update
    refused: dict[str, str]  # SHA-256 of invalid messages
    incidents: Required[list[AuditIncident]]
    rejected: list[int]  # by a robust mean
    epsilon: Number
    sample_epsilon: Number
    model: Required[str]  # SHA-256 of the new model's tensors
    record: Required[str]  # SHA-256 of the round's line in metrics.jsonl


class AuditStop(TypedDict):
    """The run was stopped before its last round."""

    round: int


class AuditEnd(TypedDict):
    """The run has ended, with these files."""

    round: int
    files: dict[str, str]


AUDIT_EVENTS = {
    "begun": AuditStart,
    "resumed": AuditStart,
    "extended": AuditStart,
    "saved": AuditStart,
    "round": AuditRound,
    "stopped": AuditStop,
    "ended": AuditEnd,
}
"""The schema of each event in audit.jsonl."""
