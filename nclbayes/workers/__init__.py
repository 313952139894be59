"""Calls handed to other processes by joblib: to those of this machine, or to the workers of a cluster."""

from nclbayes.workers.place import Answer, Workers

__all__ = ["Answer", "Workers"]
