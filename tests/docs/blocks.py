"""The blocks of code on a page, run as they are printed, in a folder of their own.

- Python blocks of a page share one namespace. A block of any language with a ``title`` is written to that file instead.
- Commands are ``$ holdfast ...`` and ``$ python FILE``; a backslash at the end of a line continues one. They run in
  this process.
- ``<!-- not run: REASON -->`` in the line before a block leaves it out.
- ``<!-- run first: CODE -->`` is Python that the page needs and does not print; it runs before the page's blocks.
- Blocks in other languages (text, yaml without a title, toml) are not run.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"(?P<indent> *)```(?P<language>\w+)(?: title=\"(?P<title>.+?)\")?\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
FIRST = re.compile(r"^<!-- run first:\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
SHELLS = ("console", "sh", "bash")


@dataclass
class Block:
    """One block of a page, and why it is not run, if it is not."""

    language: str
    title: str | None
    text: str
    reason: str | None

    @property
    def is_run(self) -> bool:
        return self.reason is None and self.title is None and self.language in ("python", *SHELLS)

    def commands(self) -> Iterator[str]:
        """The commands of a console block, each on one line."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.strip():
                yield line.removeprefix("$ ")


def blocks(page: str) -> list[Block]:
    return [Block(m["language"], m["title"], m["text"], m["reason"]) for m in FENCE.finditer(page)]


def words(command: str) -> Iterator[str]:
    """The words of a command as a shell passes them, with the files that ``runs/*`` matches."""
    for word in shlex.split(command, comments=True):
        yield from sorted(map(str, Path().glob(word))) if "*" in word else [word]


@dataclass
class Outcome:
    """What a page leaves behind: its folder, the names that its Python defines, and what its commands print."""

    folder: Path
    names: dict[str, Any]
    printed: list[tuple[str, str]]


def run_page(text: str, folder: Path) -> Outcome:
    """Run the blocks of a page in a folder."""
    names: dict[str, Any] = {"__name__": "page"}
    outcome = Outcome(folder, names, [])
    found = blocks(text)
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for block in found:
            if block.title and block.reason is None:
                (folder / block.title).write_text(block.text, encoding="utf-8")
        for code in FIRST.findall(text):
            exec(compile(code, "run first", "exec"), {"__name__": "first"})
        for block in filter(lambda block: block.is_run, found):
            if block.language == "python":
                exec(compile(block.text, "a block of the page", "exec"), names)
                continue
            for command in block.commands():
                arguments = list(words(command))
                if arguments[0] == "python":
                    runpy.run_path(arguments[1], run_name="__main__")
                    continue
                assert arguments[0] == "holdfast", f"mark this command with a reason: {command}"
                result = CliRunner().invoke(app, arguments[1:])
                if result.exception and not isinstance(result.exception, SystemExit):
                    raise result.exception
                assert result.exit_code == 0, f"{command}\n{result.output}"
                outcome.printed.append((command, result.output))
    # Another page may have files of the same name.
    for name in set(sys.modules) - modules:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    return outcome
