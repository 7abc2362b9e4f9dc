"""``methods``, ``datasets``, ``doctor``: methods, data sets, and the capabilities of this machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from holdfast.cli.options import Json
from holdfast.cli.printing import console, print_json, print_table
from holdfast.core.errors import HoldfastError, install

EXTRAS = {
    "data": ("h5py", "PIL"),
    "report": ("matplotlib", "jinja2", "starlette", "uvicorn"),
    "export": ("onnx", "onnxscript"),
    "privacy": ("dp_accounting",),
    "pretrained": ("peft", "transformers"),
    "ray": ("ray",),
    "flower": ("flwr",),
}
"""The optional parts of Holdfast with the packages that each needs."""

LEGEND = """work: of a client, × FedAvg's; aug.: the same with augmented inputs
up, down, keeps: sent, received and stored by each client, × the model (2.2 million parameters)
alone: the server needs single uploads, which secure aggregation would hide
digits, fashion(-mnist): accuracy/forgetting in percent over the last ten rounds, Dirichlet 0.1
Combine methods: --method fedntd+fedprox:mu=0.1"""


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to explain, or one of your own, such as mine.py:Mine.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, including those of installed packages, with costs and measured accuracy, or explain one.

    Example:  holdfast methods fedntd
    """
    from holdfast.core.own import installed
    from holdfast.methods.catalogue import describe, overview
    from holdfast.methods.registry import METHODS

    if name is not None:
        method = describe(name)
        if as_json:
            print_json(method)
        else:
            _print_method(method)
        return
    described, failed = [describe(each) for each in METHODS], []
    for each in sorted(installed("method").keys() - METHODS.keys()):
        try:
            described.append(describe(each))
        except HoldfastError as error:
            failed.append(str(error))
    if as_json:
        print_json(described)
        return
    texts = [[d["name"], d["when"], d["privacy"]["leaves"] or "–"] for d in described]
    print_table("", ["method", "use it when", "leaves a client besides weights and sample count"], texts)
    numbers = [overview(d) for d in described]
    columns = [column if column == "method" else f" {column}" for column in numbers[0]]
    print_table("\nMeasured", columns, [list(row.values()) for row in numbers])
    console().print(LEGEND, style="dim")
    for sentence in failed:
        console().print(sentence, style="dim", soft_wrap=True)


def _print_method(method: dict[str, Any]) -> None:
    from holdfast.methods.catalogue import costs_in_words

    out = console()
    about = f": {method['about']}" if method["about"] else ""
    out.print(f"{method['name']}{about}\n", soft_wrap=True)
    if method["when"]:
        out.print(f"Use it when: {method['when']}.\n", soft_wrap=True)
    if method["parameters"]:
        rows = [[p["name"], str(p["default"]), p["about"]] for p in method["parameters"]]
        print_table("", ["hyper-parameter", "default", "meaning"], rows)
    if method["when"]:  # else the class has no card
        print_table("\nCosts and privacy", ["", ""], [list(line) for line in costs_in_words(method).items()])
    if method["results"]:
        keys = ("method", "data", "split", "accuracy", "forgetting", "seeds")
        columns = ["run as", "data", "split", " accuracy", " forgetting", " seeds"]
        rows = [[str(r[key]) for key in keys] for r in method["results"]]
        print_table("\nMeasured, in percent", columns, rows)


def datasets(as_json: Json = False) -> None:
    """List the built-in data sets and the folders in which their files were found.

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
            str(d["classes"] or "–"),
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
        "Files are looked up in $HOLDFAST_DATA and the cache, then downloaded if possible.",
        style="dim",
    )
    for d in described:
        if d["missing"]:
            out.print(str(d["missing"]), style="dim", soft_wrap=True)


def doctor(as_json: Json = False) -> None:
    """Print the versions, the device, and the engines of this machine with their optimisations.

    Example:  holdfast doctor
    """
    capabilities = _capabilities()
    if as_json:
        print_json(capabilities)
        return
    for part, rows in capabilities.items():
        print_table(part.capitalize(), ["", ""], [[f"  {key}", str(value)] for key, value in rows.items()])


def _capabilities() -> dict[str, dict[str, str]]:
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
            f"share the GPU by turns; concurrently after {MPS_COMMAND}"
            if gpu_is_time_sliced()
            else "run concurrently on the GPU: CUDA's multi-process service is active"
        )
    else:
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        device["cuda"] = f"not used: {reason}"
    engines = _engines(cuda)
    extras = {
        extra: "installed"
        if (missing := [p for p in packages if find_spec(p) is None]) == []
        else f"not installed ({', '.join(missing)}): {install(extra)}"
        for extra, packages in EXTRAS.items()
    }
    roots = {str(root): "exists" if root.exists() else "does not exist" for root in search_roots(None)}
    return {"versions": versions, "device": device, "engines": engines, "extras": extras, "data": roots}


def _engines(cuda: bool) -> dict[str, str]:
    """The engines and their optimisations, each with whether it is used on this machine and why not."""
    import torch

    from holdfast.core.device import bfloat16_unavailable
    from holdfast.engine.factory import MAX_LANES, MAX_WORKERS, SMALL_STEP_BYTES
    from holdfast.kernels import unavailable

    device = torch.device("cuda" if cuda else "cpu")
    kernels = unavailable(device, torch.float32)
    no_bfloat16 = bfloat16_unavailable(device)
    workers = min(torch.get_num_threads(), MAX_WORKERS)
    small = f"{SMALL_STEP_BYTES >> 20} MiB a client"
    threads = f", {workers} in parallel if a step touches more than {small}" if workers > 1 else ""
    memory = "the GPU's memory" if cuda else "RAM"
    return {
        "sequential": "ready: one client after another" + ("" if cuda else threads),
        "vectorized": "ready: many clients in one batched program",
        "parallel clients": f"as many as clients a round, at most {MAX_LANES}, that fit into {memory}",
        "CUDA graphs": "active: a step of the vectorized engine is captured once and replayed"
        if cuda
        else "not used: no CUDA device",
        "recorded steps": "not used: CUDA graphs are used instead"
        if cuda
        else "active: a step of the vectorized engine is recorded once and replayed without vmap",
        "kernels": "active: own convolutions and norms for the vectorized engine"
        if kernels is None
        else f"not used: {kernels}",
        "channels last": "not used: a layout for CPUs"
        if cuda
        else "active: for convolutions of the sequential engine",
        "ray": "ready: clients over a cluster" if find_spec("ray") else "not ready: Ray is not installed",
        "auto": "vectorized, because there is a GPU"
        if cuda
        else f"vectorized if a step touches at most {small}, else sequential (no GPU)",
        "precision": "TF32 matrix products, float32 elsewhere" if cuda else "float32",
        "mixed precision": f"float16; not bfloat16, since {no_bfloat16}"
        if no_bfloat16
        else "bfloat16 and float16" + ("" if cuda else ", slow on a CPU"),
    }
