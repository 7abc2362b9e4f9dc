"""Template of a new Flower app."""

from __future__ import annotations

from pathlib import Path

from holdfast.core import files
from holdfast.core.errors import HoldfastError

APP = '''"""The data of this federation; the model, the method and all settings are in pyproject.toml."""

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
'''

PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "A federation of sites"
license = "Apache-2.0"
dependencies = ["holdfast-fl[flower]"]

[tool.flwr.app]
publisher = "holdfast"
fab-include = ["**/*.py"]

[tool.flwr.app.components]
serverapp = "{package}.app:server"
clientapp = "{package}.app:client"

# Every setting of `holdfast run`, with hyphens; change one for a run with: flwr run . -c 'rounds=50'
[tool.flwr.app.config]
out = ""                # directory of the run on the server, an absolute path; that of an unfinished run resumes it
clients = 2             # number of clients in the federation
wait = 600              # seconds to wait for all of them at the start
method = "fedntd"
model = "cnn"
code-dir = ""           # the server's folder of methods and models in files, such as method = "mine.py:Mine"
rounds = 20
clients-per-round = 0   # clients per round; 0: all
local-epochs = 1
batch-size = 32
lr = 0.05
momentum = 0.9
seed = 0
deadline = 0            # seconds after which a round closes without the clients still training; 0: no deadline
min-clients = 1         # with fewer usable updates in a round the run stops; it can be resumed
secure = ""             # "secagg+": the server learns the sum of the updates and no single one
validation = 0          # share of each client's samples on which it tests models, such as 0.1; 0: none
patience = 0            # tests there without a better model, after which the run stops; 0: it trains all rounds
evaluate-locals = false # true: the server tests every local model, so that tensors private to a client are sent too
precision = "auto"
data-partition = "dirichlet:0.5"  # keys that begin with data are used by app.py
data-public = 0.0
"""

README = """# {name}

A [Flower](https://flower.ai) app written by `holdfast flower new`. The data is defined in `{package}/app.py`; the
model, the method and all settings are in `pyproject.toml`.

To try it on one machine (four shells; the first three stay open):

    flower-superlink --insecure --disable-runtime-dependency-installation
    flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9094 --node-config 'partition-id=0 num-partitions=2'
    flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9095 --node-config 'partition-id=1 num-partitions=2'
    flwr run . local --stream -c "out='$PWD/run'"

with these lines in `$FLWR_HOME/config.toml` (by default `~/.flwr/config.toml`):

    [superlink.local]
    address = "127.0.0.1:8000"
    insecure = true

Then: `holdfast report run`. The same `flwr run` command resumes a run that was interrupted. For real sites, with TLS
and keys, see Holdfast's page on deployment.
"""


def write_app(folder: Path) -> list[Path]:
    """Write a complete app to a new folder and return its files; the folder's name becomes the app's."""
    name = folder.name.lower().replace("_", "-")
    package = name.replace("-", "_")
    if not package.isidentifier():
        raise HoldfastError(
            f"'{folder.name}' is not a valid name of a Python package; use letters, digits and hyphens"
        )
    if folder.exists() and any(folder.iterdir()):
        raise HoldfastError(f"{folder} is not empty; choose another name")
    contents = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"{package}/__init__.py": '"""A federation."""\n',
        f"{package}/app.py": APP,
    }
    for path, text in contents.items():
        target = folder / path
        with files.writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        filled = text if path.endswith(".py") else text.format(name=name, package=package)
        files.replace(target, filled.encode())
    return [folder / path for path in contents]
