"""The ``holdfast`` program: its commands register here, and every error leaves as one sentence."""

import errno
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from holdfast.core.errors import HoldfastError, install, shown_by

WRONG, INTERRUPTED = 2, 130  # exit codes: something the user can put right; stopped by Ctrl-C


class CommandGroup(TyperGroup):
    """A group of commands in which an error that the user can put right is one sentence, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = shown_by(_say)
                result = super().invoke(ctx)
                sys.stdout.flush()  # what cannot be written is told of here, not by Python as it ends
                return result
        except HoldfastError as error:
            _say(str(error))
            raise typer.Exit(WRONG) from None
        except ModuleNotFoundError as error:
            from holdfast.cli.machine import EXTRAS

            extra = next((e for e, packages in EXTRAS.items() if error.name in packages), None)
            if extra is None:
                raise
            _say(f"this needs {error.name}: {install(extra)}")
            raise typer.Exit(WRONG) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read this has seen enough
                raise
            where = "the output" if error.filename is None else error.filename
            _say(f"{where}: {error.strerror}")
            with suppress(OSError, ValueError):  # what is left of it must not be tried again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(WRONG) from None
        except KeyboardInterrupt:
            _say("stopped")
            raise typer.Exit(INTERRUPTED) from None


def _say(sentence: str) -> None:
    print(f"holdfast: {sentence}", file=sys.stderr)


app = typer.Typer(
    name="holdfast",
    cls=CommandGroup,
    help="Federated learning on heterogeneous data that does not forget.\n\n"
    "Start with:  holdfast run --data digits --clients 10 --method fedntd --rounds 20",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from holdfast.core.version import __version__

        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Say the version."
    ),
) -> None:
    """Keep the help of ``Typer``: this is where ``--version`` lives."""
