"""Federated learning on heterogeneous data that does not forget.

The public names are those of `holdfast.api`; they are imported when first used, so that ``import holdfast``
and the command line's help need not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holdfast.core.version import __version__ as __version__

if TYPE_CHECKING:
    from holdfast import methods as methods
    from holdfast import metrics as metrics
    from holdfast import models as models
    from holdfast.api import *  # noqa: F403
    from holdfast.methods import *  # noqa: F403  (mypy does not evaluate the list that `api.__all__` unpacks)
    from holdfast.methods.builtin import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__":  # for `from holdfast import *`
        return import_module("holdfast.api").__all__
    if name.startswith("_"):
        raise AttributeError(name)
    # Modules of the package first: they import each other, and must not wait for all public names.
    if find_spec(f"holdfast.{name}") is not None:
        return import_module(f"holdfast.{name}")
    api = import_module("holdfast.api")
    if name not in api.__all__:
        raise AttributeError(f"holdfast has no '{name}'")
    value = globals()[name] = getattr(api, name)
    return value


def __dir__() -> list[str]:
    """What there is for users, by which shells complete names; not what this module itself imports."""
    special = {name for name in globals() if name.startswith("__")}
    return sorted({*import_module("holdfast.api").__all__, "methods", "metrics", "models", *special})
