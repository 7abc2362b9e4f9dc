"""The built-in methods, one line each, in the order in which lists show them."""
# ruff: noqa: I001

from holdfast.methods.fedavg import FedAvg as FedAvg
from holdfast.methods.fedprox import FedProx as FedProx
from holdfast.methods.fedavgm import FedAvgM as FedAvgM
from holdfast.methods.scaffold import Scaffold as Scaffold
from holdfast.methods.fedntd import FedNTD as FedNTD
from holdfast.methods.fedka import FedKA as FedKA
from holdfast.methods.flashback import Flashback as Flashback
from holdfast.methods.fedfa import FedFA as FedFA
from holdfast.methods.fedmlp import FedMLP as FedMLP
from holdfast.methods.fednova import FedNova as FedNova
from holdfast.methods.moon import Moon as Moon
from holdfast.methods.feddyn import FedDyn as FedDyn
from holdfast.methods.fedcurv import FedCurv as FedCurv
from holdfast.methods.feddf import FedDF as FedDF
from holdfast.methods.fedproc import FedProc as FedProc
from holdfast.methods.fedreg import FedReg as FedReg
from holdfast.methods.fedrep import FedRep as FedRep
from holdfast.methods.fedproto import FedProto as FedProto
from holdfast.methods.creff import CReFF as CReFF
from holdfast.methods.ccvr import CCVR as CCVR
from holdfast.methods.fedala import FedALA as FedALA
from holdfast.methods.fedfomo import FedFomo as FedFomo
from holdfast.methods.fedpac import FedPAC as FedPAC
from holdfast.methods.fedrod import FedRoD as FedRoD
from holdfast.methods.ema import EMA as EMA
from holdfast.methods.balanced import Balanced as Balanced
from holdfast.methods.fedlc import FedLC as FedLC
from holdfast.methods.fedsam import FedSAM as FedSAM
from holdfast.methods.mofedsam import MoFedSAM as MoFedSAM
from holdfast.methods.fedspeed import FedSpeed as FedSpeed
from holdfast.methods.fedsmoo import FedSMOO as FedSMOO
from holdfast.methods.fedlesam import FedLESAM as FedLESAM
from holdfast.methods.fedsol import FedSOL as FedSOL
