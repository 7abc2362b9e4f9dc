"""Checks of a run with attacks or robust aggregation, before training; poisoned data of attackers."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from holdfast.core.errors import HoldfastError, HoldfastWarning
from holdfast.core.settings import Settings
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.engine.clients import private_names
from holdfast.methods.base import Method
from holdfast.methods.context import RunContext
from holdfast.updates.attacks import Backdoor, LabelFlip, parse_attack
from holdfast.updates.robust import parse_robust


def check_robustness(method: Method, context: RunContext, settings: Settings, federation: Federation) -> None:
    """Raise an error if a round has too few clients for its robust mean, or a setting has no effect."""
    if settings.compress is not None and private_names(method, context).issuperset(context.network.params):
        raise HoldfastError(f"compress is given, but {method.name} exchanges no weights; leave it out")
    clients = int(np.count_nonzero(federation.sizes(0)))
    per_round = min(settings.clients_per_round or clients, clients)
    if settings.attack is not None:
        hostile = len(parse_attack(settings.attack).attackers(federation.clients, settings.seed))
        expected = round(hostile * per_round / clients)
        _check_tolerance(settings, expected, per_round)
    if settings.robust is None:
        return
    robust = parse_robust(settings.robust)
    robust.check(per_round)
    if settings.dp is not None:
        raise HoldfastError(
            f"robust={robust.name} cannot be combined with dp, whose noise is calibrated for the sum of clipped "
            "updates; the clipping of dp also bounds every client's influence"
        )
    if method.keeps_uploads:
        raise HoldfastError(
            f"robust: {method.name} also uses individual uploads, which a robust mean does not protect; choose "
            "another method"
        )


def _check_tolerance(settings: Settings, hostile: int, per_round: int) -> None:
    """Warn if the expected number of attackers in a round exceeds what the robust mean tolerates."""
    if settings.robust is None:
        return
    robust = parse_robust(settings.robust)
    most = robust.tolerated(per_round)
    if hostile > most:
        warnings.warn(
            f"about {hostile} attackers are expected among the {per_round} clients of a round, but {robust.name} "
            f"tolerates {most}",
            HoldfastWarning,
            stacklevel=5,
        )


def poisoned(dataset: Dataset, settings: Settings, federation: Federation) -> Dataset:
    """The data set with the attackers' poisoned training samples; unchanged without such an attack."""
    attack = None if settings.attack is None else parse_attack(settings.attack)
    if not isinstance(attack, (LabelFlip, Backdoor)):
        return dataset
    if dataset.task.name not in ("multiclass", "binary"):
        raise HoldfastError(
            f"attack: {attack.name} needs classes, and the task of {dataset.name} is {dataset.task.name}; choose an "
            "attack on updates, such as sign-flip:0.2"
        )
    if isinstance(attack, Backdoor) and attack.target >= dataset.num_classes:
        raise HoldfastError(
            f"attack: the backdoor's target is {attack.target}, but {dataset.name} has {dataset.num_classes} "
            "classes, numbered from 0"
        )
    x, y = dataset.x_train.clone(), dataset.y_train.clone()
    highest = x.max()
    for client in sorted(attack.attackers(federation.clients, settings.seed)):
        for stage in range(federation.stages):
            ids = federation.client(client, stage)
            if len(ids):
                mine = dataset.x_train[ids], dataset.y_train[ids]
                x[ids], y[ids] = attack.poisoned(*mine, dataset.num_classes, highest, settings.seed, client)
    return replace(dataset, x_train=x, y_train=y)
