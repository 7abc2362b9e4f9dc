"""The command line: it parses, calls and prints, and nothing else."""

from holdfast.cli.app import app
from holdfast.cli.federations import diagnose, partition, stream
from holdfast.cli.flower import flower
from holdfast.cli.machine import datasets, doctor, methods
from holdfast.cli.reproduce import reproduce
from holdfast.cli.runs import compare, resume, run
from holdfast.cli.seeing import export, figure, report, show, table, ui

__all__ = ["app", "main"]

COMMANDS = {
    "Training": (run, compare, resume, reproduce),
    "Seeing": (show, report, figure, table, ui, export),
    "Data": (partition, stream, diagnose),
    "What there is": (methods, datasets, doctor),
}
for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.add_typer(flower, rich_help_panel="Training")


def main() -> None:
    """``holdfast``."""
    app()
