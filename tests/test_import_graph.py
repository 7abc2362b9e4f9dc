"""Imports go one way: a package imports only packages below it, within functions too. Class names are unique."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent
ORDER = (
    "core", "tasks", "data", "kernels", "models", "metrics", "methods", "updates", "runs", "engine", "report",
    "training", "sweeps", "flower", "papers", "tuning", "cli",
)  # fmt: skip
"""The packages, lowest first; docs/design.md describes them."""


def modules() -> dict[str, Path]:
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module of the package that a file imports anywhere, and the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield (whole if whole in MODULES else module), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)


def package(module: str) -> str | None:
    """The package of a module; None for what is not Holdfast's, and for holdfast itself and its api."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "holdfast" and rest else None


def test_every_package_has_its_place() -> None:
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(ORDER)
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "__main__", "api"}


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_down(name: str) -> None:
    allowed = ORDER[: ORDER.index(name) + 1]
    for module, path in MODULES.items():
        if package(module) != name:
            continue
        for other, line in imported(path):
            target = package(other)
            assert other != "holdfast", f"{path}:{line} imports the package itself"
            assert target is None or target in allowed, (
                f"{path}:{line}: {name} imports {target}, which is above it"
            )


def test_modules_of_a_package_make_no_cycle() -> None:
    """Not even within a package, when types alone are set aside."""
    graph = {
        module: {m for m, _ in at_run_time(path) if m in MODULES and m != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_class_names_are_unique() -> None:
    modules_of: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules_of.setdefault(node.name, []).append(module)
    assert {name: found for name, found in modules_of.items() if len(found) > 1} == {}


def at_run_time(path: Path) -> Iterator[tuple[str, int]]:
    """What a file imports when it is imported: neither within functions nor under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    later = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in later]
    return (pair for pair in imported(path) if not any(first <= pair[1] <= last for first, last in spans))
