"""``flower new`` and ``flower certificates``: set up a federation on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.printing import console
from holdfast.core.errors import HoldfastError, install

flower = typer.Typer(
    name="flower",
    help="Set up a federation on Flower: write an app, create keys.\n\nExample:  holdfast flower new two-hospitals",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@flower.command()
def new(
    folder: Annotated[
        Path, typer.Argument(metavar="NAME", help="A new folder; its name becomes the app's name.")
    ],
) -> None:
    """Write a complete Flower app, with settings for the data and the training.

    Example:  holdfast flower new two-hospitals
    """
    from holdfast.flower.template import write_app

    for path in write_app(folder):
        console().print(str(path), soft_wrap=True)
    console().print(f"Read {folder / 'README.md'} next.", soft_wrap=True)


@flower.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="The folder to write to.")] = Path("certificates"),
    host: Annotated[
        list[str] | None, typer.Option(help="A host name or address of the server; can be repeated.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="The name of a site that needs a key; can be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = 365,
) -> None:
    """Create certificates for TLS and keys for node authentication; existing files are kept.

    Example:  holdfast flower certificates keys --host fl.example.org --node berlin --node oslo
    """
    try:
        from holdfast.flower.certificates import write_certificates
    except ModuleNotFoundError as error:
        raise HoldfastError(f"this needs {error.name}: {install('flower')}") from None
    hosts = host or ["localhost", "127.0.0.1"]
    for path in write_certificates(folder, hosts, node or [], days):
        console().print(str(path), soft_wrap=True)
