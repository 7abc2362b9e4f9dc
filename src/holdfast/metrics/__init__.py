"""Metrics of forgetting, drift and alignment: plain functions on arrays of any framework."""

from holdfast.metrics.alignment import dead_unit_share, neuron_alignment
from holdfast.metrics.continual import (
    average_accuracy,
    average_forgetting,
    backward_transfer,
    forward_transfer,
)
from holdfast.metrics.drift import classifier_update_similarity, gradient_diversity, weight_divergence
from holdfast.metrics.features import feature_distance, linear_cka, pair_similarity
from holdfast.metrics.forgetting import (
    backward_transfer_forgetting,
    forgetting_degree,
    local_forgetting,
    prediction_consistency,
    round_forgetting,
)
from holdfast.metrics.locality import (
    class_split,
    distribution_distance,
    in_out_local_accuracy,
    local_distribution,
)
from holdfast.metrics.predictions import (
    auroc,
    average_precision,
    balanced_accuracy,
    calibration_error,
    concordance,
    f1_by_class,
    r_squared,
)
from holdfast.metrics.progress import rounds_to_target
from holdfast.metrics.significance import holm, paired_test
from holdfast.metrics.streams import (
    global_stream_accuracy,
    local_stream_accuracy,
    minority_accuracy,
    seen_task_accuracy,
)

__all__ = [
    "auroc",
    "average_accuracy",
    "average_forgetting",
    "average_precision",
    "backward_transfer",
    "backward_transfer_forgetting",
    "balanced_accuracy",
    "calibration_error",
    "class_split",
    "classifier_update_similarity",
    "concordance",
    "dead_unit_share",
    "distribution_distance",
    "f1_by_class",
    "feature_distance",
    "forgetting_degree",
    "forward_transfer",
    "global_stream_accuracy",
    "gradient_diversity",
    "holm",
    "in_out_local_accuracy",
    "linear_cka",
    "local_distribution",
    "local_forgetting",
    "local_stream_accuracy",
    "minority_accuracy",
    "neuron_alignment",
    "pair_similarity",
    "paired_test",
    "prediction_consistency",
    "r_squared",
    "round_forgetting",
    "rounds_to_target",
    "seen_task_accuracy",
    "weight_divergence",
]
