"""The settings of an experiment as options of commands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from holdfast.core.settings import FEDERATION_SETTINGS, ExperimentSettings, HelpGroup
from holdfast.core.spec import field_hints, option_type
from holdfast.training.experiment import Experiment
from holdfast.training.experiment_entries import read_yaml

if TYPE_CHECKING:
    Command = Callable[..., None]

FEDERATION_OPTIONS = ("data", "seed", "federation", *FEDERATION_SETTINGS)

File = Annotated[
    Path | None,
    typer.Argument(metavar="EXPERIMENT.YAML", help="An experiment file; options override its settings."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set one setting, such as partition.alpha=0.5; can be repeated."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def with_settings(
    names: Collection[str] | None = None, hidden: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command the settings ``names`` (all by default) as options; it gets those that were given.

    Its help does not show ``hidden`` ones, which it accepts only to raise an error of its own.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def called(**values: Any) -> None:
            given = {k: values.pop(k) for k in options if values[k] is not None}
            own = {k: v for k, v in values.items() if k not in options}
            command(**own, settings=given)

        own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "settings"]
        options = _options(names, hidden)
        called.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=Parameter.KEYWORD_ONLY) for p in own] + list(options.values())
        )
        return called

    return decorate


def _options(names: Collection[str] | None, hidden: Collection[str]) -> dict[str, Parameter]:
    hints, settings = field_hints(ExperimentSettings), {f.name: f for f in fields(ExperimentSettings)}
    options = {}
    for group in HelpGroup:
        for name, field in settings.items():
            if field.metadata["group"] is not group or (names is not None and name not in names):
                continue
            kind = option_type(hints[name])
            flag = "--" + name.replace("_", "-")
            default = "" if field.default is None else f" (default: {str(field.default).lower()})"
            option = typer.Option(
                f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
                help=field.metadata["help"] + default,
                rich_help_panel=group.value,
                hidden=name in hidden,
                metavar=None if kind is bool else {int: "N", float: "X", str: "TEXT"}[kind],
            )
            annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
            options[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return options


def experiment_from(
    file: Path | None, settings: Mapping[str, Any], changes: Sequence[str] | None = None
) -> Experiment:
    """The experiment that a file, the options given and ``--set`` make together."""
    written = {} if file is None else read_yaml(file)
    experiment = Experiment.from_mapping({**written, **settings})
    return experiment.with_settings(changes) if changes else experiment
