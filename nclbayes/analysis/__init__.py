"""What was learnt, and what was kept: evaluation, records, pictures."""

from nclbayes.analysis.evaluation import Score, evaluate
from nclbayes.analysis.record import Record

__all__ = ["Record", "Score", "evaluate"]
