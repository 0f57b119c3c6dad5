"""For tests of tensorbus and of what is built on it: the simulator and its faults. See ``docs/simulation.md``."""

from tensorbus.testing._fault_plan import FaultPlan, Wave
from tensorbus.testing._faults import SimBus
from tensorbus.testing._simloop import DeadlockError, LivelockError, SimLoop
from tensorbus.testing._simulate import Report, Sweep, rerun, run, search, sweep
from tensorbus.testing._waves import disturb
from tensorbus.testing._world import InvariantError, Node, SimClock, SimIds, World

__all__ = [
    "DeadlockError",
    "FaultPlan",
    "InvariantError",
    "LivelockError",
    "Node",
    "Report",
    "SimBus",
    "SimClock",
    "SimIds",
    "SimLoop",
    "Sweep",
    "Wave",
    "World",
    "disturb",
    "rerun",
    "run",
    "search",
    "sweep",
]
