"""``check``: check a custom method before it is trained."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.printing import console

NOT_CORRECT = 1  # exit code


def check(
    method: Annotated[str, typer.Argument(help="A method, such as mine.py:Mine.")],
    model: Annotated[
        str | None, typer.Option(help="The model (default: a small network with BatchNorm).")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data, of which a few samples are used (default: small images).")
    ] = None,
) -> None:
    """Check that a method gives the same results on every engine, in any order of clients, and after a kill.

    Prints what differs and why, and exits with code 1, if the check fails.

    Example:  holdfast check fedntd --model mlp:16 --data digits
    """
    from holdfast.training.experiment import Experiment
    from holdfast.training.method_check import check_method

    loaded = None if data is None else Experiment(method=method, data=data).load_data()
    found = check_method(method, model, loaded, raise_error=False)
    console().print(str(found), soft_wrap=True)
    if not found:
        raise typer.Exit(NOT_CORRECT)
