"""The methods: one file each, composed with `Stack`."""

from holdfast.methods.base import Batch, Local, Method, Server, Tensors, Trainer, Tree, Upload
from holdfast.methods.ccvr import CCVR
from holdfast.methods.context import Client, RunContext
from holdfast.methods.creff import CReFF
from holdfast.methods.fedala import FedALA
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.fedavgm import FedAvgM
from holdfast.methods.fedcurv import FedCurv
from holdfast.methods.feddf import FedDF
from holdfast.methods.feddyn import FedDyn
from holdfast.methods.fedfa import FedFA
from holdfast.methods.fedfomo import FedFomo
from holdfast.methods.fedka import FedKA
from holdfast.methods.fedmlp import FedMLP
from holdfast.methods.fednova import FedNova
from holdfast.methods.fedntd import FedNTD
from holdfast.methods.fedpac import FedPAC
from holdfast.methods.fedproc import FedProc
from holdfast.methods.fedproto import FedProto
from holdfast.methods.fedprox import FedProx
from holdfast.methods.fedreg import FedReg
from holdfast.methods.fedrep import FedRep
from holdfast.methods.fedrod import FedRoD
from holdfast.methods.flashback import Flashback
from holdfast.methods.moon import Moon
from holdfast.methods.registry import METHODS, method_from, parse_method
from holdfast.methods.scaffold import Scaffold
from holdfast.methods.stack import Stack
from holdfast.models.network import Output

__all__ = [
    "CCVR",
    "METHODS",
    "Batch",
    "CReFF",
    "Client",
    "FedALA",
    "FedAvg",
    "FedAvgM",
    "FedCurv",
    "FedDF",
    "FedDyn",
    "FedFA",
    "FedFomo",
    "FedKA",
    "FedMLP",
    "FedNTD",
    "FedNova",
    "FedPAC",
    "FedProc",
    "FedProto",
    "FedProx",
    "FedReg",
    "FedRep",
    "FedRoD",
    "Flashback",
    "Local",
    "Method",
    "Moon",
    "Output",
    "RunContext",
    "Scaffold",
    "Server",
    "Stack",
    "Tensors",
    "Trainer",
    "Tree",
    "Upload",
    "method_from",
    "parse_method",
]
