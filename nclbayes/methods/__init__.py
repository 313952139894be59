"""The methods that are compared: each an engine, or a posterior that learns in another way."""

from nclbayes.methods.joint import JointLearner
from nclbayes.methods.plain import PlainTraining
from nclbayes.methods.registry import METHODS, Method, find_method

__all__ = ["METHODS", "JointLearner", "Method", "PlainTraining", "find_method"]
