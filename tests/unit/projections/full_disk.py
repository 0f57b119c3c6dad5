"""Fills a store's disk, as far as a limit on file sizes is one: nothing is lost, and it goes on once there is room."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from tensorbus.errors import OutOfSpaceError
from tensorbus.projections import GlobalStore
from tests.unit.projections.applying import messages
from tests.unit.projections.store_rig import SUBJECTS, Feed, expected, present


def main() -> None:
    store = GlobalStore.open(Path(sys.argv[1]), subjects=SUBJECTS, threads=1)
    feed = Feed()
    items = feed.take(messages())
    store.apply(items[:200])
    before = store.hash()
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, most))
    try:
        for at in range(200, len(items), 100):
            before = store.hash()
            store.apply(items[at : at + 100])
    except OutOfSpaceError:
        print("full")
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    store.apply([])
    print("kept" if store.hash() == before else "changed")
    store.apply(items)
    print("applied" if present(store) == expected(feed.state) else "differs")
    store.close()


if __name__ == "__main__":
    main()
