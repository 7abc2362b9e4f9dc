"""``methods``, ``datasets``, ``doctor``: what there is."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table
from holdfast.core.errors import install

EXTRAS = {
    "data": ("h5py", "PIL"),
    "report": ("matplotlib", "jinja2", "starlette", "uvicorn"),
    "ray": ("ray",),
    "flower": ("flwr",),
}
"""The optional parts of the package, and what must be importable for each."""

LEGEND = """work: a client's, × FedAvg's; aug.: the same where inputs are augmented
up, down, keeps: of each client, × the model (2.2 million parameters)
alone: the server looks at single uploads, which secure aggregation would hide
digits, fashion(-mnist): accuracy/forgetting in percent over the last ten rounds, Dirichlet 0.1
Combine methods: --method fedntd+fedprox:mu=0.1"""


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, with its page.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods with what they cost and learnt, or explain one.

    Example:  holdfast methods fedntd
    """
    from holdfast.methods.catalogue import describe, overview
    from holdfast.methods.registry import METHODS

    if name is not None:
        one = describe(name)
        if as_json:
            print_json(one)
        else:
            _print_method(one)
        return
    described = [describe(each) for each in METHODS]
    if as_json:
        print_json(described)
        return
    words = [[d["name"], d["when"], d["privacy"]["leaves"] or "–"] for d in described]
    print_table("", ["method", "use it when", "leaves a client besides weights and sample count"], words)
    numbers = [overview(d) for d in described]
    columns = [column if column == "method" else f" {column}" for column in numbers[0]]
    print_table("\nMeasured", columns, [list(row.values()) for row in numbers])
    console().print(LEGEND, style="dim")


def _print_method(one: dict[str, Any]) -> None:
    from holdfast.methods.catalogue import costs_in_words

    out = console()
    out.print(f"{one['name']}: {one['about']}\n\nUse it when: {one['when']}.\n", soft_wrap=True)
    if one["parameters"]:
        rows = [[p["name"], str(p["default"]), p["about"]] for p in one["parameters"]]
        print_table("", ["hyper-parameter", "default", "meaning"], rows)
    print_table("\nCosts and privacy", ["", ""], [list(line) for line in costs_in_words(one).items()])
    keys = ("method", "data", "split", "accuracy", "forgetting", "seeds")
    columns = ["run as", "data", "split", " accuracy", " forgetting", " seeds"]
    print_table("\nMeasured, in percent", columns, [[str(r[key]) for key in keys] for r in one["results"]])


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
    out = console()
    out.print(
        "Files are looked for in $HOLDFAST_DATA and the cache, then downloaded where they can be.",
        style="dim",
    )
    for d in described:
        if d["missing"]:
            out.print(str(d["missing"]), style="dim", soft_wrap=True)


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

    from holdfast.core.device import MPS_COMMAND, gpu_is_time_sliced
    from holdfast.core.version import __version__
    from holdfast.data.sources.files import search_roots

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
        device["several processes"] = (
            f"take turns on the GPU; side by side after {MPS_COMMAND}"
            if gpu_is_time_sliced()
            else "compute side by side on the GPU: CUDA's multi-process service is at work"
        )
    else:
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        device["cuda"] = f"not used: {reason}"
    engines = _paths(cuda)
    extras = {
        extra: "installed"
        if (missing := [p for p in packages if find_spec(p) is None]) == []
        else f"not installed ({', '.join(missing)}): {install(extra)}"
        for extra, packages in EXTRAS.items()
    }
    roots = {str(root): "there" if root.exists() else "does not exist" for root in search_roots(None)}
    return {"versions": versions, "device": device, "engines": engines, "extras": extras, "data": roots}


def _paths(cuda: bool) -> dict[str, str]:
    """Which ways of computing are open here, and why not the others."""
    import torch

    from holdfast.engine.factory import MOST_LANES, MOST_WORKERS, SMALL_STEP
    from holdfast.kernels import unavailable

    kernels = unavailable(torch.device("cuda" if cuda else "cpu"), torch.float32)
    workers = min(torch.get_num_threads(), MOST_WORKERS)
    small = f"{SMALL_STEP >> 20} MiB a client"
    crew = f", {workers} at a time where a step touches more than {small}" if workers > 1 else ""
    room = "the GPU's memory" if cuda else "RAM"
    return {
        "sequential": "ready: one client after another" + ("" if cuda else crew),
        "vectorized": "ready: many clients as one batched program",
        "parallel clients": f"as many as clients a round, at most {MOST_LANES}, that fit {room}",
        "CUDA graphs": "active: a step of the vectorized engine is captured once"
        if cuda
        else "not used: no CUDA device",
        "recorded steps": "not used: CUDA graphs are"
        if cuda
        else "active: a step of the vectorized engine is recorded once and replayed without vmap",
        "kernels": "active: own convolutions and norms for the vectorized engine"
        if kernels is None
        else f"not used: {kernels}",
        "channels last": "not used: a layout for CPUs"
        if cuda
        else "active: convolutions one client after another",
        "ray": "ready: clients over a cluster" if find_spec("ray") else "not ready: Ray is not installed",
        "auto": "vectorized, since there is a GPU"
        if cuda
        else f"vectorized where a step touches at most {small}, else sequential (no GPU)",
        "precision": "TF32 matrix products, float32 elsewhere" if cuda else "float32",
    }
