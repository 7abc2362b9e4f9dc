"""``methods``, ``datasets``, ``doctor``: what there is."""

from __future__ import annotations

import inspect
import os
import platform
import re
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table

if TYPE_CHECKING:
    from holdfast.methods.base import Method

EXTRAS = {
    "data": ("h5py", "PIL"),
    "report": ("matplotlib", "jinja2", "starlette", "uvicorn"),
    "ray": ("ray",),
    "flower": ("flwr",),
}
"""The optional parts of the package, and what must be importable for each."""


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its hyper-parameters.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or explain one.

    Example:  holdfast methods fedntd
    """
    from holdfast.errors import unknown
    from holdfast.methods.registry import METHODS

    if name is None:
        described = [_describe(kind) for kind in METHODS.values()]
        if as_json:
            print_json(described)
            return
        rows = [
            [d["name"], d["summary"], ", ".join(f"{p['name']}={p['default']}" for p in d["parameters"])]
            for d in described
        ]
        print_table("", ["method", "what it does", "hyper-parameters"], rows)
        console().print("Combine them: --method fedntd+fedprox:mu=0.1", style="dim")
        return
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    one = _describe(METHODS[name])
    if as_json:
        print_json(one)
        return
    console().print(f"{name}: {one['about']}\n", soft_wrap=True)
    rows = [[p["name"], str(p["default"]), p["about"]] for p in one["parameters"]]
    print_table("", ["hyper-parameter", "default", "meaning"], rows)


def _describe(kind: type[Method]) -> dict[str, Any]:
    about = inspect.cleandoc(kind.__doc__ or "")
    # What a hyper-parameter means stands beside it in the source, where whoever reads the method wants it.
    source = inspect.getsource(kind)
    comments = dict(re.findall(r"^    (\w+):[^\n#]*=[^\n#]*# ?(.*)$", source, re.MULTILINE))
    return {
        "name": kind.name,
        "summary": about.split("\n")[0],
        "about": about,
        "needs_public": kind().needs_public,
        "parameters": [
            {"name": f.name, "default": f.default, "about": comments.get(f.name, "")} for f in fields(kind)
        ],
    }


def datasets(as_json: Json = False) -> None:
    """List the data sets known by name, and where their files were found.

    Example:  holdfast datasets --json
    """
    from holdfast.data.sources import describe

    described = describe()
    if as_json:
        print_json(described)
        return
    rows = [
        [
            str(d["name"]),
            str(d["classes"]),
            "×".join(map(str, d["shape"])),  # type: ignore[call-overload]
            f"{d['train']:,}",
            f"{d['test']:,}",
            str(d["found"] or "not here"),
        ]
        for d in described
    ]
    print_table("", ["data set", " classes", " shape", " train", " test", "found"], rows)
    console().print("Files are looked for in $HOLDFAST_DATA and the cache, then downloaded.", style="dim")


def doctor(as_json: Json = False) -> None:
    """Say what this machine can do: versions, device, engines and which paths are active, and why.

    Example:  holdfast doctor
    """
    found = _examine()
    if as_json:
        print_json(found)
        return
    for part, rows in found.items():
        print_table(part.capitalize(), ["", ""], [[f"  {key}", str(value)] for key, value in rows.items()])


def _examine() -> dict[str, dict[str, str]]:
    import torch

    from holdfast import __version__
    from holdfast.data.sources.files import search_roots
    from holdfast.engine.choice import SMALL_MODEL

    cuda = torch.cuda.is_available()
    versions = {"holdfast": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("numpy", "triton", "ray", "flwr"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    device = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used by torch"}
    if cuda:
        free, total = (value / 2**30 for value in torch.cuda.mem_get_info())
        device["cuda"] = f"{torch.cuda.get_device_name()}, {free:.0f} of {total:.0f} GiB free"
    else:
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        device["cuda"] = f"not used: {reason}"
    small = f"models of up to {SMALL_MODEL:,} parameters without convolutions"
    engines = {
        "sequential": "ready: one client after another",
        "lanes": "ready: clients as lanes of one program, in CUDA graphs"
        if cuda
        else "ready: clients batched by vmap",
        "auto": "lanes, since there is a GPU"
        if cuda
        else f"lanes for {small}, sequential for others (no GPU)",
        "precision": "TF32 matrix products, float32 elsewhere" if cuda else "float32",
    }
    extras = {
        extra: "installed"
        if (missing := [p for p in packages if find_spec(p) is None]) == []
        else f"not installed ({', '.join(missing)}): pip install 'holdfast[{extra}]'"
        for extra, packages in EXTRAS.items()
    }
    roots = {str(root): "there" if root.exists() else "does not exist" for root in search_roots(None)}
    return {"versions": versions, "device": device, "engines": engines, "extras": extras, "data": roots}
