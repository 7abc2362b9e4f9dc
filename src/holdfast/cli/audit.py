"""``audit verify`` and ``audit show``: the audit log of a run."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from holdfast.cli.inspect import RunArgument
from holdfast.cli.printing import console, print_table

NOT_INTACT = 1  # exit code

audit = typer.Typer(
    name="audit",
    help="Check and print the audit log of a run.\n\nExample:  holdfast audit verify runs/x",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@audit.command()
def verify(
    run: RunArgument,
    head: Annotated[
        str | None, typer.Option(help="The hash of a line, noted earlier; the log must still contain it.")
    ] = None,
) -> None:
    """Check that a run's audit log is whole and agrees with the run's other files.

    Prints the hash of the last line, which identifies the whole log; store it where nobody can change it. If the log or
    another file was changed, prints the first difference and exits with code 1.

    Example:  holdfast audit verify runs/x
    """
    from holdfast.runs.audit_check import verify_audit

    found = verify_audit(run, head)
    out = console()
    if found.problem is not None:
        out.print(f"Not intact: {found.problem}", soft_wrap=True)
        raise typer.Exit(NOT_INTACT)
    if found.incomplete:
        out.print("The last line is incomplete: the process was killed; `holdfast resume` drops it.")
    out.print(f"Intact: {found.entries} lines, {found.rounds} rounds", soft_wrap=True)
    out.print(f"head {found.head}", soft_wrap=True)


@audit.command()
def show(run: RunArgument) -> None:
    """Print a run's audit log as a table.

    Example:  holdfast audit show runs/x
    """
    from holdfast.runs.audit_check import read_audit

    entries = read_audit(run)
    rows = [[str(number), *_row(entry)] for number, entry in enumerate(entries, start=1)]
    print_table(
        "", [" line", "time", "event", " round", " used", "not used or conspicuous", " ε", "hash"], rows
    )


def _row(entry: dict[str, Any]) -> list[str]:
    kinds = Counter(incident["kind"] for incident in entry.get("incidents", ()))
    kinds.update({"rejected": len(entry["rejected"])} if entry.get("rejected") else {})
    epsilon = entry.get("epsilon", entry.get("sample_epsilon"))
    return [
        entry["time"],
        entry["event"],
        str(entry["round"]),
        str(len(entry["used"])) if "used" in entry else "",
        ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "" if epsilon is None else f"{epsilon:.3g}",
        entry["hash"][:12],
    ]
