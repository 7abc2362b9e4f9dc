"""The command line: commands parse their arguments, call the library and print."""

from collections.abc import Callable

from holdfast.cli.app import app
from holdfast.cli.audit import audit
from holdfast.cli.check import check
from holdfast.cli.federations import diagnose, partition, stream
from holdfast.cli.flower import flower
from holdfast.cli.inspect import export, figure, report, show, table, ui
from holdfast.cli.leaderboard import leaderboard
from holdfast.cli.recommend import recommend
from holdfast.cli.reference import datasets, doctor, methods
from holdfast.cli.reproduce import reproduce
from holdfast.cli.train import compare, resume, run
from holdfast.cli.tune import tune

__all__ = ["app", "main"]

COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (run, compare, tune, recommend, resume, check),
    "Inspect": (show, report, figure, table, ui, export),
    "Data": (partition, stream, diagnose),
    "Reference": (methods, datasets, doctor),
    "Reproduce": (reproduce, leaderboard),
}
for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.add_typer(audit, rich_help_panel="Inspect")
app.add_typer(flower, rich_help_panel="Deploy")


def main() -> None:
    app()
