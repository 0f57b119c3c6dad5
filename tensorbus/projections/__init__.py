"""The folds as processes hold them, fed by the log."""

from tensorbus.projections._live import Follower, LiveDirectory

__all__ = ["Follower", "LiveDirectory"]
