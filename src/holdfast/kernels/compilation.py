"""The process of `KernelBuilder`, which compiles the pickled kernels that it reads from its standard input.

It does not use a GPU. Python, torch and Triton are loaded once, before the processes that compile are forked.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys

from holdfast.kernels.building import Kernel


def compile_kernel(kernel: Kernel) -> None:
    """Compile a kernel into Triton's cache on the disk."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(kernel.module), kernel.name)
    source = ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    triton.compile(source, target=GPUTarget(*kernel.target), options=kernel.options)


def _try_to_compile(kernel: Kernel) -> None:
    try:
        compile_kernel(kernel)
    except Exception as error:  # the launch of the kernel raises it again
        print(f"{kernel.name}: {error}", file=sys.stderr)


def main() -> None:
    """Compile all kernels, those that take longest first."""
    importlib.import_module("holdfast.kernels.layers")  # torch, Triton and most kernels
    kernels: list[Kernel] = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    kernels.sort(key=lambda kernel: not kernel.name.startswith("_conv"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with multiprocessing.get_context("fork").Pool(max(1, min(cores, len(kernels)))) as pool:
        pool.map(_try_to_compile, kernels, chunksize=1)


if __name__ == "__main__":
    main()
