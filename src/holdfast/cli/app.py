"""The ``holdfast`` application: commands register here, and errors are printed as one sentence."""

import errno
import os
import sys
import warnings
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from holdfast.core.errors import HoldfastError, install, warning_printer

USAGE_ERROR, INTERRUPTED = 2, 130  # exit codes: an error that the user can fix; stopped by Ctrl-C


class CommandGroup(TyperGroup):
    """A group of commands that prints errors which the user can fix as one sentence, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command given on the command line."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = warning_printer(_print_error)
                result = super().invoke(ctx)
                sys.stdout.flush()  # so that a full disk is reported here, not by Python at exit
                return result
        except HoldfastError as error:
            _print_error(str(error))
            raise typer.Exit(USAGE_ERROR) from None
        except ModuleNotFoundError as error:
            from holdfast.cli.reference import EXTRAS

            extra = next((e for e, packages in EXTRAS.items() if error.name in packages), None)
            if extra is None:
                raise
            _print_error(f"this needs {error.name}: {install(extra)}")
            raise typer.Exit(USAGE_ERROR) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of a pipe has closed it, as head does
                raise
            file = "the output" if error.filename is None else error.filename
            _print_error(f"{file}: {error.strerror}")
            with suppress(OSError, ValueError):  # Python would try to write the rest of the output at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(USAGE_ERROR) from None
        except KeyboardInterrupt:
            _print_error("stopped")
            raise typer.Exit(INTERRUPTED) from None


def _print_error(sentence: str) -> None:
    print(f"holdfast: {sentence}", file=sys.stderr)


app = typer.Typer(
    name="holdfast",
    cls=CommandGroup,
    help="Federated learning on heterogeneous data that does not forget.\n\n"
    "Start with:  holdfast run --data digits --clients 10 --method fedntd --rounds 30",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from holdfast.core.version import __version__

        print(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass
