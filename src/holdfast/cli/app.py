"""The ``holdfast`` program: its commands register here, and every error leaves as one sentence."""

import errno
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from holdfast.errors import HoldfastError, HoldfastWarning, install

WRONG, INTERRUPTED = 2, 130  # exit codes: something the user can put right; stopped by Ctrl-C


class Program(TyperGroup):
    """A group of commands in which an error that the user can put right is one sentence, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _say
                result = super().invoke(ctx)
                sys.stdout.flush()  # what cannot be written is told of here, not by Python as it ends
                return result
        except HoldfastError as error:
            print(f"holdfast: {error}", file=sys.stderr)
            raise typer.Exit(WRONG) from None
        except ModuleNotFoundError as error:
            from holdfast.cli.machine import EXTRAS

            extra = next((e for e, packages in EXTRAS.items() if error.name in packages), None)
            if extra is None:
                raise
            print(f"holdfast: this needs {error.name}: {install(extra)}", file=sys.stderr)
            raise typer.Exit(WRONG) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read this has seen enough
                raise
            where = "the output" if error.filename is None else error.filename
            print(f"holdfast: {where}: {error.strerror}", file=sys.stderr)
            with suppress(OSError, ValueError):  # what is left of it must not be tried again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(WRONG) from None
        except KeyboardInterrupt:
            print("holdfast: stopped", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


_python_says = warnings.showwarning


def _say(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Our own warnings as one sentence, others as Python shows them."""
    if issubclass(category, HoldfastWarning):
        print(f"holdfast: {message}", file=sys.stderr)
    else:
        _python_says(message, category, *where, **more)


app = typer.Typer(
    name="holdfast",
    cls=Program,
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
        from holdfast import __version__

        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Say the version."
    ),
) -> None:
    """Keep the help of ``Typer``: this is where ``--version`` lives."""
