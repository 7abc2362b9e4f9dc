"""Every page of the documentation: its blocks run as printed, and no command hides from this in an indented block."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from blocks import ROOT, SHELLS, blocks, run_page

import holdfast as hf
from holdfast.cli import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_TESTS = {"README.md": "test_readme.py", "own.md": "test_own_page.py", "sites.md": "test_sites_page.py"}
"""Pages that are run by a test of their own, which also looks at what they leave behind."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        p
        for p in PAGES
        if p.name not in OWN_TESTS and any(b.is_run for b in blocks(p.read_text(encoding="utf-8")))
    ],
    ids=name,
)
def test_its_blocks_run_as_printed(page: Path, tmp_path: Path) -> None:
    run_page(page.read_text(encoding="utf-8"), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_is_in_a_block_that_is_run_or_marked(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    unfenced = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    hidden = re.findall(
        r"^(?:    |\t)(?:\$ )?(?:holdfast|pip|python|make|flwr|flower-\w+|ray) .*", unfenced, re.MULTILINE
    )
    assert not hidden, "write these commands in a block ```console"
    assert not re.findall(r"^\$ .*", unfenced, re.MULTILINE)
    marks = len(re.findall(r"<!-- not run:", text))
    assert marks == sum(block.reason is not None for block in blocks(text)), (
        "a mark is not directly before a block"
    )
    for block in blocks(text):
        assert block.language not in SHELLS or block.is_run or block.reason


def commands(page: Path) -> list[list[str]]:
    """Every command of the library on a page, also of blocks that are not run, without its name."""
    shells = [block for block in blocks(page.read_text(encoding="utf-8")) if block.language in SHELLS]
    found = [shlex.split(command, comments=True) for block in shells for command in block.commands()]
    return [words[1:] for words in found if words and words[0] == "holdfast"]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_the_options_of_every_command_exist(page: Path) -> None:
    known = {field.name for field in fields(hf.Experiment)}
    for words in (words for words in commands(page) if words[0] != "--version"):
        command = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        with command.make_context(command.name, words) as context:
            given = {
                key: value for key, value in context.params.items() if key in known and value is not None
            }
            if not any(".py:" in str(value) or "clinics/" in str(value) for value in given.values()):
                hf.Experiment(**given)


def test_pages_with_own_tests_have_them() -> None:
    assert all((ROOT / "tests/docs" / test).exists() for test in OWN_TESTS.values())
