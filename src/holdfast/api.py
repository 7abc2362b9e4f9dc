"""Everything a user needs, under one name: ``import holdfast as hf``."""

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.data.dataset import Dataset, Group
from holdfast.data.diagnosis import diagnose, nearest_regime
from holdfast.data.federation import Federation, federate
from holdfast.data.mixed import mix_domains, mixed_digits
from holdfast.data.partitions import (
    IID,
    ByDomain,
    BySite,
    ByWriter,
    ClassesPerClient,
    ClassShards,
    Dirichlet,
    DirichletInner,
    DirichletTwoStage,
    DirichletUncapped,
    Partition,
    QuantitySkew,
    Shards,
    WriterTransfer,
    parse_partition,
)
from holdfast.data.preprocess import Preprocess, preprocess_for
from holdfast.data.removal import remove_samples
from holdfast.data.schedules import EveryN, GlobalEpochs, StageSchedule
from holdfast.data.sites import federation_from_sites
from holdfast.data.skew import FeatureSkew, LongTail, minority_classes
from holdfast.data.sources import load
from holdfast.data.streams import stream
from holdfast.methods import *  # noqa: F403
from holdfast.methods import __all__ as _methods
from holdfast.models import ModelSpec, parse_model
from holdfast.report.trackers import Tracker
from holdfast.runs import RunDirectory, RunSummary, list_runs
from holdfast.training.comparison import Comparison, compare
from holdfast.training.experiment import Experiment, resume
from holdfast.training.method_check import MethodCheck, check_method
from holdfast.training.run import Run
from holdfast.training.train import train
from holdfast.tuning.recommend import Judgement, Recommendation, recommend
from holdfast.tuning.tune import FinalRun, TrialResult, Tuning, tune
from holdfast.updates.privacy import DP
from holdfast.updates.sample_privacy import SampleDP
from holdfast.updates.secure import SecAggPlus

__all__ = [
    *_methods,
    "DP",
    "IID",
    "ByDomain",
    "BySite",
    "ByWriter",
    "ClassShards",
    "ClassesPerClient",
    "Comparison",
    "Dataset",
    "Dirichlet",
    "DirichletInner",
    "DirichletTwoStage",
    "DirichletUncapped",
    "EveryN",
    "Experiment",
    "FeatureSkew",
    "Federation",
    "FinalRun",
    "GlobalEpochs",
    "Group",
    "HoldfastError",
    "HoldfastWarning",
    "Judgement",
    "LongTail",
    "MethodCheck",
    "ModelSpec",
    "Partition",
    "Preprocess",
    "QuantitySkew",
    "Recommendation",
    "Run",
    "RunDirectory",
    "RunSummary",
    "SecAggPlus",
    "SampleDP",
    "Shards",
    "StageSchedule",
    "Tracker",
    "TrialResult",
    "Tuning",
    "WriterTransfer",
    "check_method",
    "compare",
    "diagnose",
    "federate",
    "federation_from_sites",
    "list_runs",
    "load",
    "minority_classes",
    "mix_domains",
    "mixed_digits",
    "nearest_regime",
    "parse_model",
    "parse_partition",
    "preprocess_for",
    "recommend",
    "remove_samples",
    "resume",
    "stream",
    "train",
    "tune",
]
