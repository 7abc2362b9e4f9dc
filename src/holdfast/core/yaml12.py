"""YAML by the rules of version 1.2: ``1:30``, ``2026-01-31``, ``yes`` and ``on`` are texts, ``1e-3`` is a number.

PyYAML implements version 1.1, which reads these as 90, a date and true.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from holdfast.core.errors import HoldfastError

# LibYAML is ten times faster, but PyYAML may be built without it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_RESOLVERS = (  # in the order of precedence: tag, pattern, first characters
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
)


class _Loader(_SafeLoader):  # type: ignore[misc]
    """A safe loader with the resolvers of version 1.2, which refuses keys that are given twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                line = node.value[at][0].start_mark.line + 1
                raise HoldfastError(f"'{key}' is given twice, the second time in line {line}")
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_int(self, node: Any) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


class _Dumper(_SafeDumper):  # type: ignore[misc]
    """A dumper that quotes what either version would read as something other than a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)


def load(text: str | bytes) -> Any:
    """The value of a document; ``ValueError`` if it is not YAML, `HoldfastError` if a key is given twice."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a safe loader: no objects are built)
    except HoldfastError:
        raise
    except Exception as error:  # a constructor raises what int(), a lookup or an attribute raises
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"line {mark.line + 1}" if mark else "a value does not match its tag") from error


def dump(value: Any) -> str:
    """The document of plain values, in the given order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
