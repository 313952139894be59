"""What is learnt from: tasks, where their examples come from, and several tasks at once."""

from nclbayes.data.checking import AllowedTargets
from nclbayes.data.mixture import TaskMixture
from nclbayes.data.task import Batches, Task

__all__ = ["AllowedTargets", "Batches", "Task", "TaskMixture"]
