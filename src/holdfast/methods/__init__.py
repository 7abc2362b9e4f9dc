"""Methods: one file each, composed with `Stack`."""

from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Trainer, Tree, Upload
from holdfast.methods.builtin import *  # noqa: F403
from holdfast.methods.card import Card
from holdfast.methods.context import Client, RunContext
from holdfast.methods.registry import METHODS, method_from, parse_method
from holdfast.methods.stack import Stack
from holdfast.models.network import Output

__all__ = [
    "METHODS",
    "Batch",
    "Card",
    "Client",
    "Local",
    "Method",
    "Output",
    "RunContext",
    "Server",
    "Stack",
    "Tensors",
    "Trainer",
    "Tree",
    "Upload",
    "method_from",
    "parse_method",
]
__all__ += [kind.__name__ for kind in METHODS.values()]
