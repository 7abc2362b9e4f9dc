"""The entries of an experiment as plain values: read from files, changed by path, and converted to one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from holdfast.core import files, yaml12
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.settings import Described
from holdfast.core.spec import named, parse_options, parse_text, parse_value

if TYPE_CHECKING:
    from holdfast.data.own import OwnData

MIXED_DIGITS = "mixed-digits"
STREAM_OPTIONS = ("tasks_per_client", "chunks", "cumulative", "stage_classes", "joins", "leaves", "schedule")
REMOVAL_OPTIONS = ("name", "client", "label", "keeps", "schedule")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        values = yaml12.load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HoldfastError(f"cannot read the experiment '{path}': {error.strerror}") from None
    except ValueError as error:
        raise HoldfastError(f"'{path}' is not YAML ({error})") from None
    if not isinstance(values, dict):
        raise HoldfastError(
            f"'{path}' does not describe an experiment: it must hold lines such as 'rounds: 100'"
        )
    return values


def changed(described: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Settings with ``key=value`` changes applied; dots separate nested keys (``method.beta=0.5``)."""
    values: dict[str, Any] = plain_values(described)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise HoldfastError(f"'{setting}' is not of the form key=value, such as method.beta=0.5")
        place(values, path.strip(), parse_value(text.strip(), f"'{setting}'"))
    return values


def place(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the entry of nested settings at a path such as ``method.beta``."""
    *outer, last = path.split(".")
    inside = values
    for key in outer:
        if key not in inside:
            raise unknown("setting", key, inside)
        inside[key] = {} if inside[key] is None else inside[key]
        inside = inside[key]
        if not isinstance(inside, dict):
            raise HoldfastError(f"'{path}' is not a setting: {key} is {inside!r}")
    inside[last] = value


def from_yaml(value: Any, hint: Any) -> Any:
    """Convert a value from YAML or the command line to the type of its setting."""
    kinds = set(get_args(hint)) or {hint}
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and str in kinds and Any not in kinds:
        return str(value)  # stream=5 reads as a number
    return value


def data_entry(given: Any) -> str | dict[str, Any] | OwnData:
    """Data by name or path, as the description of a reference, or as an object without a reference."""
    from holdfast.core import own
    from holdfast.data.dataset import Dataset
    from holdfast.data.federation import Federation
    from holdfast.data.own import OwnData, own_data
    from holdfast.data.sources import DATASETS

    if isinstance(given, str):
        name, _, options = given.partition(":")
        if given in DATASETS or name == MIXED_DIGITS:
            return given
        if (reference := own.split(given)) is not None:
            name, options = reference
        elif name not in own.installed("data set"):
            return _absolute_data(given)
        given = {"name": name} | parse_options(options, f"data set '{given}'")
    if isinstance(given, Mapping):
        data = own_data(given) if "name" in given else None
        if data is None:
            raise unknown("data set", given.get("name"), {*DATASETS, *own.installed("data set")})
    elif isinstance(given, OwnData):
        data = given
    elif isinstance(given, (Dataset, Federation)) or isfunction(given):
        data = OwnData(given, {}, own.code_of(given))
    else:
        raise HoldfastError(
            f"data is {named(given)}; it must be the name of a data set, a path, a holdfast.Dataset, a "
            "holdfast.Federation, or a function that returns one of these"
        )
    return data if data.code is None else plain_values(data.describe())


def recorded_entry(described: Mapping[str, Any], given: Any) -> Any:
    """The description of a method or a model, or the object itself if it has no reference."""
    from holdfast.runs.metrics_file import plain

    return given if described.get("own") else plain_values(plain(described))


def absolute(path: str) -> str:
    """An absolute path, so that the run can be resumed from another directory; other text is returned unchanged."""
    found = files.existing(path)
    return path if found is None else str(found.resolve())


def _absolute_data(given: str) -> str:
    """The path of data as an absolute one, with the options behind it."""
    from holdfast.data.sources import split_options

    found = split_options(given)
    if found is None:
        return given
    path, options = found
    return f"{path.resolve()}:{options}" if options else str(path.resolve())


def options_entry(written: Described | None, what: str, known: Iterable[str]) -> dict[str, Any] | None:
    """``rotation=30,noise=0.1`` or a mapping as a mapping whose keys are all known."""
    if written is None:
        return None
    values = dict(written) if isinstance(written, Mapping) else parse_options(written, what)
    for key in values:
        if key not in known:
            raise unknown(f"option of {what}", str(key), known)
    return values


def stream_entry(written: Described | None) -> dict[str, Any] | None:
    """``5,cumulative=true,schedule=every-n:10`` or a mapping: the options of a stream."""
    from holdfast.data.removal import REMOVAL

    if isinstance(written, str) and written.partition(":")[0] == REMOVAL:
        written = parse_text(written, "stream")
    elif isinstance(written, str):
        written = parse_options(written, "stream", ("tasks_per_client",))
    if written is not None and written.get("name") == REMOVAL:
        return _removal(written)
    values = options_entry(written, "stream", STREAM_OPTIONS)
    if values is None:
        return None
    tasks = values.setdefault("tasks_per_client", 5)
    if not isinstance(tasks, int):
        raise HoldfastError(f"a stream needs a number of tasks for each client, such as 5, not {tasks!r}")
    for key in ("chunks", "cumulative"):
        if not isinstance(values.get(key, False), bool):
            raise HoldfastError(f"{key} of a stream must be true or false, not {values[key]!r}")
    return _with_schedule(values)


def _removal(written: Mapping[str, Any]) -> dict[str, Any]:
    """``removal:client=0,label=1,keeps=[20,10,0],schedule=every-n:10`` or a mapping: a stream of removals."""
    values = options_entry(written, "stream removal", REMOVAL_OPTIONS) or {}
    missing = [key for key in ("client", "label", "keeps") if key not in values]
    if missing:
        raise HoldfastError(
            f"stream removal needs {' and '.join(missing)}, such as removal:client=0,label=1,keeps=[20,10,0]"
        )
    if not isinstance(values["keeps"], Sequence) or isinstance(values["keeps"], str):
        raise HoldfastError(f"keeps of a stream is a list, such as [20,10,0], not {values['keeps']!r}")
    return _with_schedule(values)


def _with_schedule(values: dict[str, Any]) -> dict[str, Any]:
    if isinstance(values.get("schedule"), str):
        values["schedule"] = parse_text(values["schedule"], "stage schedule", ("n",))
    return values


def plain_values(value: Any) -> Any:
    """A copy with dicts and lists, so that written and read values are equal."""
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    return [plain_values(item) for item in value] if isinstance(value, (list, tuple)) else value
