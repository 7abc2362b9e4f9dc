"""A Flower app from a few functions of the user: the ServerApp runs the rounds, the ClientApp trains at a site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from holdfast.core import own
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.settings import DEFAULTS, SCHEDULE_SETTINGS, Described, Role, Settings, settings_with
from holdfast.data.dataset import Dataset
from holdfast.data.federation import Federation
from holdfast.methods.base import Method
from holdfast.methods.registry import method_from
from holdfast.models.own import OwnModel, initial_weights
from holdfast.models.registry import ModelSpec, model_from
from holdfast.training.experiment import Experiment
from holdfast.updates.privacy import parse_dp
from holdfast.updates.sample_privacy import parse_dp_samples

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import ServerApp

Config = Mapping[str, Any]
"""Flat settings as Flower passes them: text, numbers, true and false."""

SETTINGS = {*settings_with(Role.RESULT, Role.LIMIT)} - {"probe_every"}
OWN = ("clients", "out", "wait", "schedule", "code-dir")
FREE = "data"  # prefix of the keys of the app's own functions


@dataclass(frozen=True, eq=False)
class FlowerApp:
    """A federation on Flower, defined by its data; Flower runs ``server_app()`` and ``client_app()``.

    Attributes:
        site_data: called at a site with its ``--node-config`` and the run's config; returns the site's samples as
            the training part of a `Dataset`, which is one client with the number ``partition-id``. For simulations
            it may return a `Federation`, of which the site serves the clients ``partition-id``, ``partition-id`` +
            ``num-partitions``, and so on.
        server_data: called at the server with the run's config; returns the samples on which models are tested
            and, as the training part, the server's own training samples (`for_server`). None if the server has no data;
            the sites then test models on validation samples and send a description of their data's format.
        model: a function that returns the ``torch.nn.Module``; by default ``model = "cnn"`` in the run's config.
        method: the `Method`; by default ``method = "fedntd:beta=1"`` in the run's config.

    The run's config (``[tool.flwr.app.config]``) holds the settings of `holdfast.train` with hyphens
    (``batch-size``), and ``clients`` (their number), ``out`` (the run's directory on the server), ``wait``
    (seconds to wait for all clients at the start), for streams ``schedule``, and ``code-dir`` (the server's folder of
    methods and models in files, ``method = "mine.py:Mine"``; a site's is in its ``--node-config``). Keys that begin
    with ``data`` are reserved for the app's own functions. A key is unset if its value is ``""``, or 0 where 0 is
    invalid.
    """

    site_data: Callable[[Config, Config], Dataset | Federation]
    server_data: Callable[[Config], Dataset] | None = None
    model: Callable[[], nn.Module] | None = None
    method: Method | None = None

    def server_app(self) -> ServerApp:
        """The app for Flower's server side."""
        from flwr.serverapp import ServerApp

        from holdfast.flower.server import serve

        app = ServerApp()

        @app.main()  # type: ignore[untyped-decorator, unused-ignore]
        def main(grid: Any, context: Any) -> None:
            folder = _folder(context.run_config)
            serve(self, AppConfig(self, context.run_config, folder, "[tool.flwr.app.config]"), grid)

        return app

    def client_app(self, mods: Sequence[Mod] = ()) -> ClientApp:
        """The app for the sites.

        ``mods`` are Flower's, such as ``LocalDpMod``. A mod that is added in another way changes sealed replies, which
        the server rejects.
        """
        from flwr.clientapp import ClientApp

        from holdfast.flower.sealing import seal_reply
        from holdfast.flower.secure_site import SECURE_HANDLERS
        from holdfast.flower.site import HANDLERS

        app = ClientApp(mods=[seal_reply, *mods])
        for kind, handler in (HANDLERS | SECURE_HANDLERS).items():
            self._register(app, kind, handler)
        return app

    def _register(self, app: Any, kind: str, handler: Callable[..., Any]) -> None:
        category, _, action = kind.partition(".")
        register = getattr(app, category)

        @register(*[action] if action else [])  # type: ignore[untyped-decorator, unused-ignore]
        def handle(message: Any, context: Any) -> Any:
            folder = _folder(context.node_config)
            app_config = AppConfig(self, context.run_config, folder, "the SuperNode's --node-config")
            app_config.check_code(message.content)
            return handler(self, app_config, message, context)


def _folder(config: Config) -> Path | None:
    """This machine's folder of user-defined methods and models."""
    return Path(str(config["code-dir"])).expanduser() if config.get("code-dir") else None


class AppConfig:
    """The parsed config of a run; the server and all sites have the same.

    References to code are loaded from files in ``code_dir`` only, which ``place`` sets on this machine.
    """

    def __init__(
        self, app: FlowerApp, config: Config, code_dir: Path | None = None, place: str = "its configuration"
    ) -> None:
        self.app, self.config, self.code_dir = app, dict(config), code_dir
        self.advice = f'copy its file to a folder here, and name that in {place}: code-dir="/srv/fl/code"'
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
        # Tests of local models on the server are opt-in, since they send private parameters to the server.
        with own.only_from(code_dir, self.advice):
            experiment = Experiment.from_mapping({"evaluate_locals": False, **given})
        if experiment.attack is not None:
            raise HoldfastError("attack is for simulations; leave it out on Flower, where clients are real")
        if experiment.secure is not None and experiment.evaluate_locals:
            raise HoldfastError(
                "evaluate_locals needs every client's model on the server, but secure hides these models; "
                "leave one of them out"
            )
        values = {name: getattr(experiment, name) for name in SCHEDULE_SETTINGS}
        # Sites keep client states for the last checkpoint only, so every round has a checkpoint.
        self.settings = Settings(
            **values
            | {
                "checkpoint_seconds": 0.0,
                "dp": _with_secret_noise("dp", experiment.dp),
                "dp_samples": _with_secret_noise("dp_samples", experiment.dp_samples),
            }
        )
        self.described = experiment.describe()

    @cached_property
    def method(self) -> Method:
        if self.app.method is not None:
            return self.app.method
        with own.only_from(self.code_dir, self.advice):
            return method_from(self.described["method"])

    def model(self) -> ModelSpec | OwnModel | nn.Module:
        """The model; the app's function runs with the run's seed, so that initial weights are the same everywhere."""
        if self.app.model is None:
            with own.only_from(self.code_dir, self.advice):
                return model_from(self.described["model"])
        with initial_weights(self.settings.seed):
            return self.app.model()

    @property
    def code(self) -> dict[str, str]:
        """The references to code that the run's config contains, and the hashes of their files at this machine."""
        method = {} if self.app.method is not None else own.hashes(self.described["method"])
        return method | ({} if self.app.model is not None else own.hashes(self.described["model"]))

    def check_code(self, content: RecordDict) -> None:
        """Raise an error if files named in the server's message differ from this site's."""
        from holdfast.flower.messages import ConfigReader  # imports Flower

        for name, found in self.code.items():
            expected = ConfigReader(content, "code").text(name, 64)
            if expected != found:
                raise HoldfastError(
                    f"{name} at this site differs from the server's file (sha256 {found[:12]}…, on the server "
                    f"{expected[:12]}…); copy the server's file to this site if you trust it"
                )

    def option(self, key: str, default: Any = None) -> Any:
        """The value of a key that is not a setting of `holdfast.train`."""
        value = self.config.get(key, default)
        if value in ("", None):
            raise HoldfastError(f"[tool.flwr.app.config] needs '{key}'")
        return value


def _with_secret_noise(name: str, given: Described | None) -> dict[str, Any] | None:
    """The options of ``dp`` or ``dp_samples`` with noise from a secret, since all sites know the run's seed."""
    if given is None:
        return None
    described = parse_dp(given).describe() if name == "dp" else parse_dp_samples(given).describe()
    if described["noise_seed"] == "run":
        raise HoldfastError(
            f"{name}: noise_seed is 'run', but every site knows the run's seed and could subtract the noise; leave it "
            "out"
        )
    return described | {"noise_seed": "system"}


def for_server(dataset: Dataset, public: np.ndarray | None = None) -> Dataset:
    """A server's data set: the test samples, and the training samples with the ids ``public`` (none by default)."""
    ids = torch.from_numpy(np.empty(0, np.int64) if public is None else public)
    return replace(dataset, x_train=dataset.x_train[ids], y_train=dataset.y_train[ids], groups={})
