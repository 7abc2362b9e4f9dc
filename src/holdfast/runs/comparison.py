"""The file in a comparison's directory that names the baseline: the method the others are compared with."""

import json
from pathlib import Path

from holdfast.core import files
from holdfast.core.errors import HoldfastError
from holdfast.core.schema import validate_content
from holdfast.runs.schemas import StoredComparison

COMPARISON = "comparison.json"


def write_baseline(comparison: Path, method_directory: str) -> None:
    """Record which of a comparison's subdirectories, one for each method, holds the baseline's runs."""
    path = comparison / COMPARISON
    content = json.dumps({"baseline": method_directory}).encode() + b"\n"
    if not path.exists() or path.read_bytes() != content:
        files.replace(path, content)


def is_baseline(run: Path) -> bool:
    """Whether the run in ``COMPARISON/METHOD/RUN`` is one of the comparison's baseline; False without a comparison."""
    method = run.resolve().parent
    path = method.parent / COMPARISON
    if not path.exists():
        return False
    try:
        content = files.read_json(path)
        validate_content(content, StoredComparison, path)
    except HoldfastError as error:
        raise HoldfastError(f"{path} is damaged; remove it, or run the comparison again") from error
    return bool(content["baseline"] == method.name)
