"""References to user-defined code: ``mine.py:Mine``, ``package.module:Mine``, or the name of an entry point.

A reference is recorded as plain values, ``{"name": "mine.py:Mine", "file": "/home/me/mine.py", "sha256": "…"}``, by
which a run is resumed from the command line. Code is loaded again only if its file still has the recorded hash.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, isclass, isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.core import files
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.spec import either

RECORDED = ("file", "sha256")
"""The entries of a recorded reference besides its name and its options."""

_FILE = re.compile(r"(?P<name>.+?\.py)(?::(?P<rest>.*))?", re.DOTALL)
_MODULE = re.compile(r"(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)(?::(?P<rest>.*))?", re.DOTALL)

_loaded: dict[tuple[Path, str], ModuleType] = {}  # modules by file and hash
_executed: list[ModuleType] = []  # those of them that were loaded here
_known: WeakKeyDictionary[Any, Code] = WeakKeyDictionary()  # where objects come from


@dataclass(frozen=True)
class Code:
    """A user-defined object and its source."""

    value: Any
    name: str  # the reference: ``mine.py:Mine``, ``package.module:Mine`` or an entry point's name
    sha256: str  # of the file that defines it; empty if there is none
    file: Path | None = None  # of a reference to a file

    def describe(self) -> dict[str, Any]:
        """The reference as plain values."""
        file = {} if self.file is None else {"file": str(self.file)}
        return {"name": self.name} | file | ({"sha256": self.sha256} if self.sha256 else {})


@dataclass(frozen=True)
class _Folder:
    """The only folder from which code may be loaded, if any, and the advice in the error."""

    path: Path | None
    advice: str


_folder: ContextVar[_Folder | None] = ContextVar("folder", default=None)


@contextmanager
def only_from(folder: Path | None, advice: str) -> Iterator[None]:
    """Allow code only from files in ``folder``, not by import path; ``advice`` ends the error for other code.

    For references that come from another machine. Entry points of installed packages are still found.
    """
    token = _folder.set(_Folder(folder, advice))
    try:
        yield
    finally:
        _folder.reset(token)


# Text -----------------------------------------------------------------------------------------------------


def split(text: str) -> tuple[str, str] | None:
    """The name and the options of ``mine.py:Mine:beta=0.5`` or ``mine.py:beta=0.5``; None if it is no reference."""
    if match := _FILE.fullmatch(text):
        file, rest = match["name"], match["rest"] or ""
        first, _, more = rest.partition(":")
        return (file, rest) if "=" in first or not first.strip() else (f"{file}:{first.strip()}", more)
    if match := _MODULE.fullmatch(text):
        return match["name"], match["rest"] or ""
    return None


# Finding --------------------------------------------------------------------------------------------------


def find(
    description: Mapping[str, Any], what: str, fits: Callable[[Any], bool] = lambda value: False
) -> Code | None:
    """The object that a reference names; None if the name is no reference and no entry point.

    ``what`` is its kind: ``method``, ``model`` or ``data set``. A file without a name refers to its only object that
    ``fits``. A recorded ``sha256`` must be that of the file.
    """
    name, expected = str(description["name"]), description.get("sha256")
    if split(name) is None:
        point = installed(what).get(name)
        return None if point is None else _of_entry_point(point, what, expected)
    limit = _folder.get()
    if match := _FILE.fullmatch(name):
        path = Path(str(description.get("file") or match["name"])).expanduser()
        if limit is not None:
            path = _inside(limit, path, what, name)
        return _in_file(path.resolve(), match["rest"] or "", what, expected, fits)
    if limit is not None:
        raise HoldfastError(f"the {what} '{name}' cannot be loaded by its import path here; {limit.advice}")
    return _in_module(name, what, expected)


def installed(what: str) -> dict[str, EntryPoint]:
    """Installed packages' entry points by name: ``holdfast.methods``, ``holdfast.models``, ``holdfast.datasets``."""
    return {point.name: point for point in entry_points(group=f"holdfast.{what.replace(' ', '')}s")}


def _of_entry_point(point: EntryPoint, what: str, expected: object) -> Code:
    package = "" if point.dist is None else f" of the package {point.dist.name}"
    with _errors(f"the {what} '{point.name}'{package} cannot be loaded", None):
        value = point.load()
    digest = _digest(sys.modules.get(point.module))
    _refuse_changed(f"the {what} '{point.name}'{package}", expected, digest)
    return _remember(Code(value, point.name, digest))


def _inside(limit: _Folder, path: Path, what: str, name: str) -> Path:
    if limit.path is None:
        raise HoldfastError(
            f"the {what} '{name}' is in a file, but no folder for such files is configured here; "
            f"{limit.advice}"
        )
    return limit.path / path.name


def _in_file(path: Path, name: str, what: str, expected: object, fits: Callable[[Any], bool]) -> Code:
    if not path.is_file():
        example = {"method": "Mine", "model": "make_net"}.get(what, "load")
        raise HoldfastError(
            f"the file '{path}' for the {what} does not exist; write the path of a file and a name in it, such as "
            f"mine.py:{example}"
        )
    with files.reading(path):
        source = path.read_bytes()
    digest = sha256(source).hexdigest()
    _refuse_changed(f"'{path}', which the {what} comes from,", expected, digest)
    module = _loaded.get((path, digest)) or _execute(path, source, digest)
    if not name:
        name = _only(module, path, what, fits)
    return _remember(Code(_attribute(module, name, str(path)), f"{path.name}:{name}", digest, path))


def _in_module(name: str, what: str, expected: object) -> Code:
    module_name, _, attribute = name.partition(":")
    try:
        with _errors(f"the module of the {what} '{name}' cannot be imported", None):
            module = importlib.import_module(module_name)
    except HoldfastError as error:
        missing = error.__cause__
        absent = isinstance(missing, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing.name}.")
        if not absent:
            raise
        raise HoldfastError(
            f"unknown {what} '{name}': there is no module '{module_name}' to import; install its package, or name "
            f"a file, such as mine.py:{attribute}"
        ) from None
    digest = _digest(module)
    _refuse_changed(f"the module '{module_name}', which the {what} comes from,", expected, digest)
    return _remember(Code(_attribute(module, attribute, module_name), name, digest))


def _refuse_changed(whose: str, expected: object, found: str) -> None:
    if expected is not None and expected != found:
        raise HoldfastError(
            f"{whose} has changed since it was recorded (sha256 {str(expected)[:12]}…, now {found[:12]}…); "
            "restore it to continue the run, or start a new run without the entry sha256"
        )


def _execute(path: Path, source: bytes, digest: str) -> ModuleType:
    """Run a file as a module of its own, after which files beside it can be imported."""
    import torch

    unique = sha256(f"{path} {digest}".encode()).hexdigest()[:12]
    spec = spec_from_file_location(f"{path.stem}_{unique}", path)
    assert spec is not None
    module = module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[spec.name] = module  # where dataclasses look for the names in annotations
    try:
        # Modules that the file makes have the same weights each time.
        with _errors(f"'{path}' cannot be loaded", path), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            exec(compile(source, str(path), "exec"), vars(module))  # noqa: S102 (the file that the user names)
    except HoldfastError:
        del sys.modules[spec.name]
        raise
    _loaded[path, digest] = module
    _executed.append(module)
    return module


def modules_of_files() -> tuple[ModuleType, ...]:
    """The modules that were loaded from files; another process cannot import them by name."""
    return tuple(_executed)


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if _defined_in(module, value)]
        if not names:
            raise HoldfastError(
                f"there is no '{name}' in {where}, which defines neither classes nor functions"
            )
        raise unknown(f"name in {where}", name, names)
    return getattr(module, name)


def _only(module: ModuleType, path: Path, what: str, fits: Callable[[Any], bool]) -> str:
    """The name of the only object in a file that fits."""
    own = [name for name, value in vars(module).items() if _defined_in(module, value)]
    fitting = [name for name in own if fits(getattr(module, name))]
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        raise HoldfastError(
            f"'{path}' has several {what}s; name one: {either(f'{path.name}:{n}' for n in fitting)}"
        )
    listed = f", such as {path.name}:{own[0]}" if own else ""
    raise HoldfastError(f"'{path}' has no {what} that can be selected without a name{listed}")


def _defined_in(module: ModuleType, value: object) -> bool:
    return (isclass(value) or isfunction(value)) and value.__module__ == module.__name__


# Recording ------------------------------------------------------------------------------------------------


def code_of(value: Any) -> Code | None:
    """The reference to a class or a function; None if it cannot be loaded from a file or an import path.

    This is the case in functions, in notebooks, and in scripts without an ``if __name__ == "__main__"`` guard.
    """
    if not (isclass(value) or isfunction(value)):
        return None
    if value in _known:
        return _known[value]
    module, name = sys.modules.get(value.__module__), value.__qualname__
    if module is None or vars(module).get(name) is not value:
        return None
    path = Path(getattr(module, "__file__", None) or "").resolve()
    if not path.is_file() or path.suffix != ".py":
        return None
    source = path.read_bytes()
    digest = sha256(source).hexdigest()
    if module.__name__ == "__main__" and not _is_guarded(source):
        return None
    if "." in module.__name__ or _is_installed(path):
        return _remember(Code(value, f"{module.__name__}:{name}", digest))
    _loaded.setdefault((path, digest), module)
    return _remember(Code(value, f"{path.name}:{name}", digest, path))


def _remember(code: Code) -> Code:
    if isclass(code.value) or isfunction(code.value):
        _known.setdefault(code.value, code)
    return code


def _digest(module: ModuleType | None) -> str:
    path = Path(getattr(module, "__file__", None) or "")
    return sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" and path.is_file() else ""


def _is_guarded(source: bytes) -> bool:
    """Whether a script runs nothing when it is imported."""
    tests = [node.test for node in ast.parse(source).body if isinstance(node, ast.If)]
    return any("__name__" in ast.unparse(test) for test in tests)


def _is_installed(path: Path) -> bool:
    homes = [Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "purelib", "platlib")]
    return any(path.is_relative_to(home) for home in homes)


def hashes(description: Any) -> dict[str, str]:
    """The references in a description of a method or a model, and the hashes of their files."""
    if not isinstance(description, Mapping):
        return {}
    mine = {str(description["name"]): str(description["sha256"])} if "sha256" in description else {}
    return {name: digest for part in description.values() for name, digest in hashes(part).items()} | mine


# Calling --------------------------------------------------------------------------------------------------


def accepted(
    function: Callable[..., Any], name: str, given: Collection[str], options: Mapping[str, Any]
) -> tuple[str, ...]:
    """The arguments in ``given`` that a function accepts; raises an error if ``options`` and these do not fit it."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        raise HoldfastError(f"{name} cannot be called, because its signature is not available") from None
    named = [p for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
    takes = tuple(p.name for p in named if p.name in given and p.name not in options)
    if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        for key in options:
            if key not in [p.name for p in named]:
                known = [p.name for p in named if p.name not in given]
                raise (
                    unknown(f"option of {name}", key, known)
                    if known
                    else HoldfastError(f"{name} has no options")
                )
    positional = [p for p in parameters if p.kind is Parameter.POSITIONAL_ONLY]
    missing = [
        p.name
        for p in (*positional, *named)
        if p.default is Parameter.empty and p.name not in (*takes, *options)
    ]
    if missing:
        rule = f"besides {', '.join(given)}, " if given else ""
        raise HoldfastError(
            f"{name} needs {' and '.join(missing)}: {rule}every argument must have a default or a value, such as "
            f"{name}:{missing[0]}=1"
        )
    return takes


def call(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> Any:
    """The result of a user-defined function; its error is raised as a sentence with the line."""
    body = vars(function).get("__init__") if isclass(function) else function
    path = getattr(getattr(body, "__code__", None), "co_filename", None)
    with _errors(f"{name} fails", None if path is None else Path(path)):
        return function(**arguments)


@contextmanager
def _errors(sentence: str, path: Path | None) -> Iterator[None]:
    """Raise an error of the user's code as one sentence, with its line in ``path``, or the last line that ran."""
    try:
        yield
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        reason, _, _ = str(error).partition("\n")
        parts = [sentence, type(error).__name__, *filter(None, [reason])]
        raise HoldfastError(": ".join(parts) + _line(error, path)) from error


def _line(error: BaseException, path: Path | None) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its message has the line
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    if path is None:
        return f" ({frames[-1].filename}, line {frames[-1].lineno})"
    own = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f" (line {own[-1]})" if own else ""
