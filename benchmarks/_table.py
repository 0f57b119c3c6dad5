"""Rows of a benchmark and how they are shown, peers run in their own venvs, and what machine this is.

A benchmark's ``main`` is: ``options = parse_options(__doc__)``, measure, ``return show(rows, options)``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks.peers.__main__ import environment

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
COLUMNS = ("case", "value", "spread", "against", "ratio", "target", "met")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number beside what it is compared with.

    Attributes:
        value: In ``unit``; ``None`` if it could not be measured, and ``note`` says why.
        spread: Smallest to largest of the repeats, for people.
        ratio: Above 1 means better than ``against``, whatever the unit.
        target: What was to be reached, for people; ``reported`` where there is none.
        met: Whether it was; ``None`` without a target or a number.
    """

    bench: str
    case: str
    value: float | None
    unit: str
    spread: str = ""
    against: str = ""
    against_value: float | None = None
    ratio: float | None = None
    target: str = "reported"
    met: bool | None = None
    note: str = ""


def compare(
    bench: str,
    case: str,
    value: float | None,
    unit: str,
    *,
    against: str,
    against_value: float | None,
    better: Literal["lower", "higher"],
    target: float | None = None,
    spread: str = "",
    note: str = "",
) -> Row:
    """A row whose target is a ratio to something measured in the same run; an absent peer gives no ratio."""
    ratio = None
    if value and against_value:
        ratio = against_value / value if better == "lower" else value / against_value
    return Row(
        bench=bench,
        case=case,
        value=value,
        unit=unit,
        spread=spread,
        against=against,
        against_value=against_value,
        ratio=ratio,
        target="reported" if target is None else f">= {target:g}x",
        met=None if target is None or ratio is None else ratio >= target,
        note=note or (f"{against} absent" if against_value is None else ""),
    )


def repeated(
    bench: str,
    case: str,
    ours: Sequence[float],
    unit: str,
    *,
    against: str,
    theirs: float | None,
    better: Literal["lower", "higher"],
    target: float | None = None,
    scale: float = 1.0,
) -> Row:
    """The row of a number of repeats, in ``unit`` once multiplied by ``scale``; a target without a ratio is missed."""
    middle = median_of(ours)
    row = compare(
        bench, case, None if middle is None else middle * scale, unit, against=against,
        against_value=None if theirs is None else theirs * scale, better=better, target=target,
        spread=spread(ours, scale=scale),
    )  # fmt: skip
    return replace(row, met=False) if target is not None and row.ratio is None else row


def bounded(
    bench: str,
    case: str,
    value: float | None,
    unit: str,
    *,
    limit: float,
    better: Literal["lower", "higher"],
    spread: str = "",
    note: str = "",
) -> Row:
    """A row whose target is a number."""
    met = None if value is None else (value <= limit if better == "lower" else value >= limit)
    sign = "<=" if better == "lower" else ">="
    target = f"{sign} {limit:g} {unit}"
    return Row(bench=bench, case=case, value=value, unit=unit, target=target, met=met, spread=spread, note=note)


def number(value: float | None) -> str:
    """Three significant digits without an exponent."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{3 - len(str(int(abs(value))))}f}" if abs(value) >= 1 else f"{value:.3g}"


def size(nbytes: int) -> str:
    """``16 MiB`` and the like."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of 100 of them do not exceed."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def spread(values: Sequence[float], *, scale: float = 1.0) -> str:
    return f"{number(min(values) * scale)}..{number(max(values) * scale)} (n={len(values)})" if values else ""


@dataclass(frozen=True, slots=True)
class Options:
    """What every benchmark understands.

    Attributes:
        quick: Fewer repeats and the smaller sizes: whether it runs, not how fast it is.
        as_json: One JSON object per row on standard output instead of the table.
        record: Append the rows to ``benchmarks/RESULTS.md``.
    """

    quick: bool
    as_json: bool
    record: bool


def parse_options(description: str | None, argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and the smaller sizes")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    args = parser.parse_args(argv)
    return Options(quick=args.quick, as_json=args.json, record=args.record)


def show(rows: Sequence[Row], options: Options) -> int:
    """Print the rows, and record them if asked. A missed target is a result, so the exit code is 0 all the same."""
    if options.as_json:
        for row in rows:
            print(json.dumps({**asdict(row), "machine": machine()}))
    else:
        print(f"{machine()}\n")
        print(_text_table(rows), flush=True)
    if options.record:
        _record(rows, options)
    return 0


def _cells(row: Row) -> tuple[str, ...]:
    value = "absent" if row.value is None else f"{number(row.value)} {row.unit}"
    against = row.against
    if row.against:
        against += ": absent" if row.against_value is None else f": {number(row.against_value)} {row.unit}"
    ratio = "" if row.ratio is None else f"{number(row.ratio)}x"
    met = "" if row.met is None else ("yes" if row.met else "NO")
    case = f"{row.case} ({row.note})" if row.note else row.case
    return (case, value, row.spread, against, ratio, row.target, met)


def _text_table(rows: Sequence[Row]) -> str:
    lines = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([shown[0], "  ".join("-" * width for width in widths), *shown[1:]])


def _record(rows: Sequence[Row], options: Options) -> None:
    """Append below what is there; the file is a log, no row is ever rewritten."""
    header = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
    body = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in _cells(row))} |\n" for row in rows)
    command = f"python -m benchmarks.{rows[0].bench}{' --quick' if options.quick else ''}" if rows else ""
    today = datetime.now(UTC).date().isoformat()
    new = not RESULTS.exists()
    with RESULTS.open("a", encoding="utf-8") as file:
        if new:
            file.write(
                "# Results\n\nAppended by `--record`; a ratio above 1 is better than what it is compared with.\n"
            )
        file.write(f"\n## {today}, commit {commit()}, `{command}`\n\n{machine()}\n\n{header}{body}")


def commit() -> str:
    """The short id of the commit, with ``+`` if the tree differs from it."""
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    run = subprocess.run(ask, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def machine() -> str:
    """Processor, memory, kernel and Python in one line."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        info = ""
    names = (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    return (
        f"{next(names, platform.machine())}, {cores} cores, {memory:.0f} GiB, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )


def peer_python(peer: str) -> Path | None:
    """The interpreter of a peer's venv, or ``None`` if ``make bench-peers`` has not installed it."""
    path = PEERS / peer / "bin" / "python"
    return path if path.is_file() and (PEERS / peer / ".installed").is_file() else None


def run_peer(peer: str, script: str, args: Sequence[str] = (), *, timeout_s: float = 600) -> list[dict[str, Any]]:
    """Run ``benchmarks/peers/<script>`` in the peer's venv and read its JSON lines.

    Returns:
        Its results; none, with the reason on standard error, if the peer is absent or failed. A number from a run that
        failed half-way is not used.
    """
    python = peer_python(peer)
    if python is None:
        print(f"{peer} is absent; `make bench-peers` installs it", file=sys.stderr)
        return []
    command = [str(python), str(ROOT / "benchmarks" / "peers" / script), *args]
    # A session of its own, so that a peer's helpers can be ended with it.
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment(PEERS / peer),
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end_session(child.pid)
        child.communicate()
        print(f"{peer} did not finish within {timeout_s:g} s", file=sys.stderr)
        return []
    finally:
        _end_session(child.pid)
    if child.returncode != 0:
        print(f"{peer} failed with {child.returncode}: {err.strip()[-2000:]}", file=sys.stderr)
        return []
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _end_session(leader: int) -> None:
    """Kill what is left of the session that we started: some peers leave servers in process groups of their own."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == leader and int(stat.parent.name) != os.getpid():
                os.kill(int(stat.parent.name), 9)
        except (OSError, ValueError, IndexError):
            continue


def find(results: Sequence[dict[str, Any]], *, case: str, nbytes: int) -> list[float]:
    """The repeats in seconds of one case of a peer's results; empty if it has none."""
    for result in results:
        if result.get("case") == case and result.get("nbytes") == nbytes:
            return [float(value) for value in result["runs_s"]]
    return []


def median_of(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
