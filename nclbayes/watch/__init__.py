"""Running a model while seeing its sites (Pyro's side) and its linear maps (torch's side)."""

from nclbayes.watch.maps import MapRecorder, is_watched
from nclbayes.watch.run import ModelRun, watch
from nclbayes.watch.separable import Separable
from nclbayes.watch.sites import Latent, Observed, SiteRecorder
from nclbayes.watch.steps import valid_steps
from nclbayes.watch.uses import LinearUse, OtherUse

__all__ = [
    "Latent",
    "LinearUse",
    "MapRecorder",
    "ModelRun",
    "Observed",
    "OtherUse",
    "Separable",
    "SiteRecorder",
    "is_watched",
    "valid_steps",
    "watch",
]
