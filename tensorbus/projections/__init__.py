"""The folds as processes hold them, fed by the log, and what they answer."""

from tensorbus.projections._info import Json, artifact_info, series_news, session_info, view_info
from tensorbus.projections._live import Follower, LiveDirectory
from tensorbus.projections._names import Names

__all__ = [
    "Follower",
    "Json",
    "LiveDirectory",
    "Names",
    "artifact_info",
    "series_news",
    "session_info",
    "view_info",
]
