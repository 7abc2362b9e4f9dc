"""Pages that are made when the site is built: the command line, settings, partitions, and the repository's own pages.

MkDocs calls `on_files` and `on_page_markdown`; `command_line`, `settings` and `partitions` return the pages' text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from typer.models import ArgumentInfo, OptionInfo

from holdfast.cli import app
from holdfast.core.settings import ExperimentSettings, HelpGroup, Role
from holdfast.core.spec import accepted, field_hints
from holdfast.data.partitions.naming import PARTITIONS
from holdfast.methods import METHODS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
COPIED = {
    "project/contributing.md": ROOT / "CONTRIBUTING.md",
    "project/changelog.md": ROOT / "CHANGELOG.md",
    "project/trust.md": ROOT / "SECURITY.md",
}
"""Pages of the site that are files of the repository."""

METHOD_CLASSES = "<!-- classes of methods -->"
"""The place of the built-in methods' classes on the API page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from mkdocs.structure.files import File  # the rest of this file needs no MkDocs

    pages = {
        "reference/command-line.md": command_line(),
        "reference/settings.md": settings(),
        "reference/partitions.md": partitions(),
        **{page: links_within_site(path.read_text(encoding="utf-8")) for page, path in COPIED.items()},
    }
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in the classes of the built-in methods."""
    return markdown.replace(METHOD_CLASSES, method_classes())


def links_within_site(text: str) -> str:
    """A page of the repository's root with the links that it has below project/."""
    text = re.sub(r"\]\(docs/", "](../", text)
    names = {path.name: Path(page).name for page, path in COPIED.items()}
    return re.sub(r"\]\((\w+\.md)(#[^)]*)?\)", lambda m: f"]({names[m[1]]}{m[2] or ''})", text)


# The command line ---------------------------------------------------------------------------------------------


def command_line() -> str:
    """The page of all commands, by the groups of ``holdfast --help``."""
    lines = [
        "# Command line",
        "",
        "`holdfast --help` prints the list of commands, `holdfast COMMAND --help` the help of one. This page is made",
        "from the same definitions. A command that fails prints one sentence on standard error and exits with code 2;",
        "Ctrl-C exits with code 130.",
    ]
    group = ""
    for panel, name, command in commands():
        if panel != group:
            group = panel
            lines += ["", f"## {group}"]
        lines += ["", f"### holdfast {name}", "", *described(name, command)]
    return "\n".join(lines) + "\n"


def commands() -> Iterator[tuple[str, str, Callable[..., None]]]:
    """The panel, the name and the function of every command; ``flower new`` and the like after the others."""
    for command in app.registered_commands:
        yield command.rich_help_panel, command.name or command.callback.__name__, command.callback
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            name = command.name or command.callback.__name__
            yield group.rich_help_panel, f"{group.typer_instance.info.name} {name}", command.callback


def described(name: str, command: Callable[..., None]) -> Iterator[str]:
    """A command's help: what it does, how it is called, its arguments and options."""
    arguments, options = [], []
    settings: list[str] = []
    left_out = {f.name for f in fields(ExperimentSettings)}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, info = get_args(parameter.annotation)[:2]
        if parameter.name in left_out and info.rich_help_panel:
            left_out -= set() if info.hidden else {parameter.name}
            settings += [] if info.hidden else [parameter.name]
        elif isinstance(info, ArgumentInfo):
            metavar, optional = (
                info.metavar or parameter.name.upper(),
                parameter.default is not parameter.empty,
            )
            arguments.append((f"[{metavar}]" if optional else metavar, info.help or ""))
        else:
            text = plain(info.help or "") + default(parameter, info)
            options.append([f"`{written(parameter.name, kind, info)}`", text])
    usage = " ".join(["holdfast", name, "[OPTIONS]", *(metavar for metavar, _ in arguments)])
    yield from ["```text", usage, "```", ""]
    for paragraph in inspect.cleandoc(command.__doc__ or "").split("\n\n"):
        words = " ".join(paragraph.split())
        if words.startswith("Example: "):
            yield from ["```text", words.removeprefix("Example: ").strip(), "```", ""]
        else:
            yield from [plain(words), ""]
    rows = [[f"`{metavar}`", plain(help)] for metavar, help in arguments] + options
    if rows:
        yield from [*table(["argument or option", "meaning"], rows), ""]
    if len(settings) > 20:
        except_for = f", except {', '.join(f'`{name}`' for name in sorted(left_out))}" if left_out else ""
        yield f"Every [setting](settings.md) is an option as well{except_for}."
    elif settings:
        links = [f"[`--{key.replace('_', '-')}`](settings.md#{key})" for key in settings]
        yield f"[Settings](settings.md) that are options: {', '.join(links)}."


def written(name: str, kind: Any, info: OptionInfo) -> str:
    """An option as it is written: ``--seeds N``, ``--report``, ``--drop-last/--no-drop-last``."""
    declared = [word for word in (info.default, *(info.param_decls or ())) if str(word).startswith("--")]
    flag = "/".join(declared) or f"--{name.replace('_', '-')}"
    kinds = {int: "N", float: "X", Path: "PATH"}
    value = next((word for each, word in kinds.items() if each in (kind, *get_args(kind))), "TEXT")
    return flag if bool in (kind, *get_args(kind)) else f"{flag} {info.metavar or value}"


def default(parameter: inspect.Parameter, info: OptionInfo) -> str:
    """The default of an option, where there is one that its help does not name."""
    value = parameter.default
    named = value in (None, False, inspect.Parameter.empty) or "default:" in (info.help or "")
    return "" if named else f" (default: {value})"


# Settings -----------------------------------------------------------------------------------------------------

ON_RESUME = {
    Role.LIMIT: "yes",
    Role.MACHINE: "yes",
}


def settings() -> str:
    """The page of all settings, by their groups in the commands' help."""
    hints = field_hints(ExperimentSettings)
    lines = [
        "# Settings",
        "",
        "Every setting has the same name as an argument of `hf.train` and `hf.Experiment`, as a key of an experiment",
        "file, and as an option of `holdfast run`, `compare` and `tune`, where hyphens take the place of underscores:",
        "`clients_per_round`, `--clients-per-round`. The last column shows whether a setting may differ when a run is",
        "resumed. This page is made from `holdfast.core.settings`.",
    ]
    for group in HelpGroup:
        rows = []
        for f in fields(ExperimentSettings):
            if f.metadata["group"] is group:
                value = "" if f.default in (None, MISSING) else f"`{str(f.default).lower()}`"
                name = f'<span id="{f.name}"></span>`{f.name}`'
                resumed = ON_RESUME.get(f.metadata["role"], "no")
                rows.append([name, plain(f.metadata["help"]), accepted(hints[f.name]), value, resumed])
        columns = ["setting", "meaning", "values", "default", "may change on resume"]
        lines += ["", f"## {group.value}", "", *table(columns, rows)]
    return "\n".join(lines) + "\n"


# Partitions and methods ---------------------------------------------------------------------------------------


def partitions() -> str:
    """The page of all partitions, with the pictures in their docstrings."""
    lines = [
        "# Partitions",
        "",
        "A partition assigns the training samples to clients. It is given by name, `--partition dirichlet:0.1`, or as",
        "an object, `hf.Dirichlet(alpha=0.1)`. [Heterogeneity](../heterogeneity.md#partitions) compares them; this",
        "page is made from their docstrings, in which a row of a picture is a client and a column a class.",
    ]
    for name, kind in PARTITIONS.items():
        lines += ["", f"## {name}", "", f"`hf.{kind.__name__}`", ""]
        lines += [
            "```text",
            re.sub(r"\n+::\n", "\n", inspect.cleandoc(kind.__doc__ or "")).replace("``", "`"),
            "```",
        ]
        hints = field_hints(kind)
        rows = []
        for f in fields(kind):  # type: ignore[arg-type]
            value = "required" if f.default is MISSING else f"`{str(f.default).lower()}`"
            rows.append([f"`{f.name}`", accepted(hints[f.name]), value])
        lines += ["", *table(["option", "values", "default"], rows)] if rows else []
    return "\n".join(lines) + "\n"


def method_classes() -> str:
    """The directives by which mkdocstrings documents the class of every built-in method."""
    lines = []
    for kind in METHODS.values():
        members = ", ".join(f.name for f in fields(kind))
        lines += [f"::: {kind.__module__}.{kind.__qualname__}", "    options:", f"      members: [{members}]"]
        lines += ["      show_if_no_docstring: true"]
    return "\n".join(lines) + "\n"


# Markdown -----------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Text of a help page as Markdown; what looks like a placeholder or a pipe stays as it is."""
    return re.sub(r"([|<>*])", r"\\\1", text.replace("``", "`"))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
