"""A Flower app from a user's few functions: the ServerApp drives the rounds, the ClientApp trains at a site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.random import counter_key
from holdfast.core.settings import DEFAULTS, SCHEDULE_SETTINGS, Role, Settings, settings_with
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.methods.base import Method
from holdfast.methods.registry import method_from
from holdfast.models.registry import ModelSpec
from holdfast.training.experiment import Experiment

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

Config = Mapping[str, Any]
"""Flat settings as Flower hands them out: text, numbers, true and false."""

SETTINGS = {*settings_with(Role.RESULT, Role.LIMIT)} - {"probe_every"}
OWN = ("clients", "out", "wait", "schedule")
FREE = "data"  # keys of the app's own functions begin with this


@dataclass(frozen=True, eq=False)
class FlowerApp:
    """What a user writes; ``server_app()`` and ``client_app()`` are what Flower runs.

    Attributes:
        site_data: called at a site with its ``--node-config`` and the run's config; gives the site's samples as
            the training part of a `Dataset`: one client, whose number is ``partition-id``. Or a `Federation`,
            for a simulation: the site then serves its clients ``partition-id``, ``partition-id`` +
            ``num-partitions``, and so on.
        server_data: called at the server with the run's config; gives the samples that models are tested on
            and, as the training part, those that the server itself holds (`for_server`).
        model: makes one's own ``torch.nn.Module``; otherwise the run's config says ``model = "cnn"``.
        method: one's own `Method`; otherwise the run's config says ``method = "fedntd:beta=1"``.

    The run's config (``[tool.flwr.app.config]``) holds the settings of `holdfast.train` with hyphens
    (``batch-size``), and ``clients`` (how many there are), ``out`` (the run's directory on the server), ``wait``
    (seconds to wait for all clients at the start) and, for streams, ``schedule``. Keys that begin with ``data``
    are the app's own. ``""``, or 0 where that makes no sense, stands for "not given".
    """

    site_data: Callable[[Config, Config], Dataset | Federation]
    server_data: Callable[[Config], Dataset]
    model: Callable[[], nn.Module] | None = None
    method: Method | None = None

    def server_app(self) -> ServerApp:
        """The app for Flower's server side."""
        from flwr.serverapp import ServerApp

        from holdfast.flower.server import serve

        app = ServerApp()

        @app.main()  # type: ignore[untyped-decorator, unused-ignore]
        def main(grid: Any, context: Any) -> None:
            serve(self, AppConfig(self, context.run_config), grid)

        return app

    def client_app(self) -> ClientApp:
        """The app for the sites."""
        from flwr.clientapp import ClientApp

        from holdfast.flower.site import ANSWERS

        app = ClientApp()
        for kind, answer in ANSWERS.items():
            self._register(app, kind, answer)
        return app

    def _register(self, app: Any, kind: str, answer: Callable[..., Any]) -> None:
        category, _, action = kind.partition(".")
        register = getattr(app, category)

        @register(*[action] if action else [])  # type: ignore[untyped-decorator, unused-ignore]
        def handle(message: Any, context: Any) -> Any:
            return answer(self, AppConfig(self, context.run_config), message, context.node_config)


class AppConfig:
    """A run's config, understood: the same on the server and at every site."""

    def __init__(self, app: FlowerApp, config: Config) -> None:
        self.app, self.config = app, dict(config)
        given: dict[str, Any] = {}
        known = {name.replace("_", "-") for name in SETTINGS} | {*OWN}
        for key, value in config.items():
            if key.startswith(FREE) or key in OWN:
                continue
            if key not in known:
                raise unknown("key of [tool.flwr.app.config]", key, known)
            given[key.replace("-", "_")] = value
        optional = {name for name, default in DEFAULTS.items() if default is None}
        given = {k: v for k, v in given.items() if v != "" and not (k in optional and v == 0)}
        # Testing local models on the server is to be asked for: what a method keeps at its client would leave it.
        experiment = Experiment.from_mapping({"evaluate_locals": False, **given})
        values = {name: getattr(experiment, name) for name in SCHEDULE_SETTINGS}
        # Sites keep what they remember for the last checkpoint only, so there is one every round.
        self.settings = Settings(**values | {"checkpoint_seconds": 0.0})
        self.described = experiment.describe()

    @cached_property
    def method(self) -> Method:
        """The method."""
        return self.app.method or method_from(self.described["method"])

    def model(self) -> ModelSpec | nn.Module:
        """The model; one's own is made with the run's seed, so that it starts alike everywhere."""
        if self.app.model is None:
            return ModelSpec.from_description(self.described["model"])
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(counter_key(self.settings.seed, "weights"))
            return self.app.model()

    def option(self, key: str, default: Any = None) -> Any:
        """One of the keys that concern Flower alone."""
        value = self.config.get(key, default)
        if value in ("", None):
            raise HoldfastError(f"[tool.flwr.app.config] needs '{key}'")
        return value


def for_server(dataset: Dataset, public: np.ndarray | None = None) -> Dataset:
    """The data set as a server has it: its test samples, and of the training ones those with the ids ``public``."""
    ids = torch.from_numpy(np.empty(0, np.int64) if public is None else public)
    return replace(dataset, x_train=dataset.x_train[ids], y_train=dataset.y_train[ids], groups={})
