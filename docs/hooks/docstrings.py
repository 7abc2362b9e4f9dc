"""Docstrings for the API page: comments beside fields as their description, and ``::`` before an example as a colon."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """An attribute without a docstring gets the comment in its line: ``x: Tensor  # [B, ...] the model's input``."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        for attribute in cls.attributes.values():
            if attribute.docstring is None and attribute.lineno is not None:
                comment = " ".join(comments(attribute.source))
                if comment:
                    attribute.docstring = griffe.Docstring(comment, parent=attribute, lineno=attribute.lineno)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(\w?)\s*::$", r"\1:", obj.docstring.value, flags=re.MULTILINE)


def comments(source: str) -> Iterator[str]:
    """The comments in a statement, without their hashes and marks for linters."""
    for token in tokenize.generate_tokens(StringIO(source.strip()).readline):
        text = token.string.lstrip("# ").split("# noqa")[0].split("# type:")[0].strip()
        if token.type == tokenize.COMMENT and not text.startswith(("noqa", "type:", "fmt:")):
            yield text
