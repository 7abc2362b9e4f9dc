"""Several data sets with the same classes as domains of one data set: Mixed Digits."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.random import generator
from holdfast.data.dataset import Dataset, Group
from holdfast.data.federation import Federation, federate
from holdfast.data.indexing import draw_per_class
from holdfast.data.partitions import IID, ByDomain, Partition
from holdfast.data.preprocess import preprocess_for
from holdfast.data.sources import load

DIGIT_DOMAINS = ("mnist", "svhn", "usps", "synth-digits", "mnist-m")
"""The domains of Mixed Digits."""

_IMAGES_AT_ONCE = 4096


def mix_domains(
    datasets: Sequence[Dataset],
    *,
    size: int = 28,
    per_class: int | None = 743,
    seed: int = 0,
    name: str | None = None,
) -> Dataset:
    """One data set with the samples of all, whose group ``domain`` holds the data set each sample comes from.

    Images are resized to ``size`` x ``size`` pixels (bilinear, antialiased) and grey ones get three equal
    channels. Of every domain's training samples, ``per_class`` random samples of each class are taken, or all if
    there are fewer; None takes all. All test samples are taken. The default name lists the domains, as on the
    command line: ``mixed-digits:mnist,usps``.
    """
    names = tuple(dataset.name for dataset in datasets)
    if not names or len(set(names)) < len(names):
        raise HoldfastError(f"domains must be one or more data sets with different names, not {list(names)}")
    for dataset in datasets:
        if dataset.classes != datasets[0].classes:
            raise HoldfastError(f"domains '{names[0]}' and '{dataset.name}' have different classes")
        if dataset.x_train.dtype != torch.uint8 or dataset.shape[0] not in (1, 3):
            raise HoldfastError(f"domain '{dataset.name}' does not consist of grey or three-channel images")
    chosen = [_chosen(dataset, per_class, seed, domain) for domain, dataset in enumerate(datasets)]
    train, test = (
        np.repeat(np.arange(len(names)), sizes)
        for sizes in ([len(ids) for ids in chosen], [len(dataset.y_test) for dataset in datasets])
    )
    pairs = list(zip(datasets, chosen, strict=True))
    return Dataset(
        name=name or f"mixed-digits:{','.join(names)}",
        x_train=torch.cat([_same_shape(dataset.x_train[ids], size) for dataset, ids in pairs]),
        y_train=torch.cat([dataset.y_train[ids] for dataset, ids in pairs]),
        x_test=torch.cat([_same_shape(dataset.x_test, size) for dataset in datasets]),
        y_test=torch.cat([dataset.y_test for dataset in datasets]),
        classes=datasets[0].classes,
        preprocess=preprocess_for("mixed-digits"),
        groups=MappingProxyType({"domain": Group(names, train, test)}),
    )


def mixed_digits(
    domains: Sequence[Dataset | str] = DIGIT_DOMAINS,
    partition: Partition | None = None,
    *,
    clients_per_domain: int = 20,
    per_class: int | None = 743,
    seed: int = 0,
) -> Federation:
    """A federation of digits from several domains, in which each client has samples of one domain.

    ``domains`` are data sets or names among `DIGIT_DOMAINS`. ``partition`` divides a domain among its clients: IID
    by default (feature skew only), or for instance ``ClassesPerClient(2)`` (label and feature skew).
    ::

                      mnist  svhn  usps
        client  0-19   ##     ..    ..
        client 20-39   ..     ##    ..
        client 40-59   ..     ..    ##

    Zhou, Zhang and Tsang: FedFA, federated learning with feature anchors.
    """
    for domain in domains:
        if isinstance(domain, str) and domain not in DIGIT_DOMAINS:
            raise unknown("digit domain", domain, DIGIT_DOMAINS)
    datasets = [load(domain) if isinstance(domain, str) else domain for domain in domains]
    mixed = mix_domains(datasets, per_class=per_class, seed=seed)
    return federate(
        mixed, ByDomain(partition or IID()), clients=clients_per_domain * len(datasets), seed=seed
    )


def _chosen(dataset: Dataset, per_class: int | None, seed: int, domain: int) -> Tensor:
    if per_class is None:
        return torch.arange(len(dataset.y_train))
    sizes = np.full(dataset.num_classes, per_class)
    rng = generator(seed, "domain samples", domain)
    return torch.from_numpy(draw_per_class(dataset.strata_train, sizes, rng))


def _same_shape(images: Tensor, size: int) -> Tensor:
    """uint8 ``[n, 1 or 3, height, width]`` as uint8 ``[n, 3, size, size]``."""
    if images.shape[-2:] != (size, size):
        resized = [
            F.interpolate(batch.float(), (size, size), mode="bilinear", antialias=True).round_().byte()
            for batch in torch.split(images, _IMAGES_AT_ONCE)
        ]
        images = torch.cat(resized)
    return images.expand(-1, 3, -1, -1)
