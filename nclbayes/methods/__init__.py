"""The methods that are compared: each an engine, or a posterior that learns in another way."""

from nclbayes.methods.bgd import BGD
from nclbayes.methods.coreset import CoresetLearner
from nclbayes.methods.decoupled import DecoupledKFAC, ReverseDecoupledKFAC
from nclbayes.methods.diagonal import DiagonalNCL
from nclbayes.methods.ewc import EWC
from nclbayes.methods.foovb import FOOVB
from nclbayes.methods.gpm import GPM
from nclbayes.methods.ivon import IVON
from nclbayes.methods.joint import JointLearner
from nclbayes.methods.kfac import KFAC
from nclbayes.methods.owm import DOWM, OWM, LaplaceDOWM, LaplaceOWM
from nclbayes.methods.plain import PlainTraining
from nclbayes.methods.registry import METHODS, Method, find_method
from nclbayes.methods.replay import ReplayLearner
from nclbayes.methods.si import SynapticIntelligence
from nclbayes.methods.vcl import VCL

__all__ = [
    "BGD",
    "DOWM",
    "EWC",
    "FOOVB",
    "GPM",
    "IVON",
    "KFAC",
    "METHODS",
    "OWM",
    "VCL",
    "CoresetLearner",
    "DecoupledKFAC",
    "DiagonalNCL",
    "JointLearner",
    "LaplaceDOWM",
    "LaplaceOWM",
    "Method",
    "PlainTraining",
    "ReplayLearner",
    "ReverseDecoupledKFAC",
    "SynapticIntelligence",
    "find_method",
]
