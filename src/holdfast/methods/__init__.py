"""The methods: one file each, composed with `Stack`."""

from holdfast.methods.base import Batch, Local, Method, Server, Upload
from holdfast.methods.context import Client, Task
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedavgm import FedAvgM
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.fedprox import FedProx
from holdfast.methods.registry import METHODS, method_from, parse_method
from holdfast.methods.scaffold import Scaffold
from holdfast.methods.stack import Stack

__all__ = [
    "METHODS",
    "Batch",
    "Client",
    "FedAvg",
    "FedAvgM",
    "FedNTD",
    "FedProx",
    "Local",
    "Method",
    "Scaffold",
    "Server",
    "Stack",
    "Task",
    "Upload",
    "method_from",
    "parse_method",
]
