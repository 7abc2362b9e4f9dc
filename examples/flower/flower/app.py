"""The data of this federation; the model, the method and all settings are in pyproject.toml."""

from collections.abc import Mapping
from typing import Any

import holdfast as hf
from holdfast.flower import FlowerApp, for_server


def site_data(node: Mapping[str, Any], run: Mapping[str, Any]) -> hf.Dataset | hf.Federation:
    """This site's samples; ``node`` is the --node-config of its SuperNode.

    In this example every site has a part of the digits that come with scikit-learn. With data of your own:

        arrays = np.load(node["data"])  # --node-config 'partition-id=0 data="/srv/site.npz"'
        x, y = arrays["x"], arrays["y"]
        return hf.Dataset.from_arrays(x, y, x, y, classes=["healthy", "ill"])
    """
    return _digits(run)


def server_data(run: Mapping[str, Any]) -> hf.Dataset:
    """The server's test samples, and its public samples for methods that train on them (FedDF, Flashback).

    With data of your own: for_server(hf.Dataset.from_arrays(x, y, x, y, classes=["healthy", "ill"])).
    """
    digits = _digits(run)
    return for_server(digits.dataset, digits.public)


def _digits(run: Mapping[str, Any]) -> hf.Federation:
    return hf.Experiment(
        data="digits",
        partition=run["data-partition"],
        clients=run["clients"],
        public=run["data-public"],
        partition_seed=run["seed"],
    ).build_federation()


app = FlowerApp(site_data, server_data)
server = app.server_app()
client = app.client_app()
