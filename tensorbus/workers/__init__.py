"""The node daemon: sessions and witnesses, callers, and the memory that holds tensors."""

from tensorbus.workers._process import run_process
from tensorbus.workers._worker import BUS_URL_FILE, ROLES, Worker, bus_url, default_worker_id, missing_for_store

__all__ = ["BUS_URL_FILE", "ROLES", "Worker", "bus_url", "default_worker_id", "missing_for_store", "run_process"]
