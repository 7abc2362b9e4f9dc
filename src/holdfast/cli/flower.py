"""``flower new`` and ``flower certificates``: what a federation on Flower starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.printing import console
from holdfast.core.errors import HoldfastError, install

flower = typer.Typer(
    name="flower",
    help="Real federations on Flower: write an app, make keys.\n\nExample:  holdfast flower new two-hospitals",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="A new folder; its name becomes the app's.")],
) -> None:
    """Write a complete Flower app: where the data is, what to train.

    Example:  holdfast flower new two-hospitals
    """
    from holdfast.flower.template import write_app

    for path in write_app(folder):
        console().print(str(path), soft_wrap=True)
    console().print(f"Read {folder / 'README.md'} next.", soft_wrap=True)


@flower.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")] = Path("certificates"),
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the server; may be given several times.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="A site's name, for its key; may be given several times.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 365,
) -> None:
    """Make what TLS and node authentication need; what is there already stays.

    Example:  holdfast flower certificates keys --host fl.example.org --node berlin --node oslo
    """
    try:
        from holdfast.flower.certificates import write_certificates
    except ModuleNotFoundError as error:
        raise HoldfastError(f"this needs {error.name}: {install('flower')}") from None
    hosts = host or ["localhost", "127.0.0.1"]
    for path in write_certificates(folder, hosts, node or [], days):
        console().print(str(path), soft_wrap=True)
