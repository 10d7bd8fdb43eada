"""Readers of public traces: jobs and node tables as parts of a scenario.

Each reader takes the text of a file and gives jobs whose ids, names and requests the scenario makes its own. Times
become seconds from the beginning of the chosen range. A job of more than eight GPUs becomes a gang of workers that
share one node each; where the number does not divide, it is rounded up to equal workers.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from scheduling.engine.scenario import JobSpec
from scheduling.engine.scenario_yaml import ScenarioError, Value
from scheduling.engine.snapshot import GPU, Pool, Request

FORMATS = ("philly", "openb", "muri", "swf", "csv")
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class NodeRow:
    name: str
    pool: str
    gpus: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class NodeTable:
    nodes: tuple[NodeRow, ...]
    #: Whether the trace shares GPUs.
    shareable: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A job of a trace before it is fitted to the scenario."""

    at: float
    runs: float
    gpus: int
    team: str
    share: int = 0
    models: tuple[str, ...] = ()
    name: str = ""


def _error(where: Value, line: int, message: str) -> ScenarioError:
    return ScenarioError(f"{where.text()} line {line}: {message}", file=where.file, line=where.line, key=where.path)


def _table(text: str, where: Value, *needed: str) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise _error(where, 1, f"the columns {', '.join(missing)} are missing")
    for row in reader:
        yield reader.line_num, row


def _number(where: Value, line: int, row: Mapping[str, str], field: str) -> float:
    try:
        return float(row[field])
    except (ValueError, TypeError):
        raise _error(where, line, f"{field}: {row[field]!r} is not a number") from None


# -- node tables -----------------------------------------------------------------------------------------------


def read_nodes(text: str, where: Value, *, scale: float, pool: str | None) -> NodeTable:
    """A table of nodes: by virtual cluster (``vc``, ``node num``), by node (openb: ``sn``, ``gpu``, ``model``), or one row
    of counts (Muri: switches × nodes × GPUs). ``scale`` keeps that part of each virtual cluster, or of all nodes."""
    header = text.split("\n", 1)[0]
    if "vc" in header and "node num" in header:
        return _virtual_clusters(text, where, scale, pool or "gpu")
    if "sn" in header and "model" in header:
        return _openb_nodes(text, where, scale, pool)
    if "num_gpu_p_node" in header:
        return _muri_nodes(text, where, scale, pool or "gpu")
    raise _error(
        where, 1, "the columns are not those of a known node table (vc, node num | sn, gpu, model | num_switch …)"
    )


def _virtual_clusters(text: str, where: Value, scale: float, pool: str) -> NodeTable:
    nodes = []
    for line, row in _table(text, where, "vc", "node num"):
        count = round(_number(where, line, row, "node num") * scale)
        nodes += [NodeRow(f"{row['vc']}-{n}", pool, GPUS_PER_NODE, row["vc"]) for n in range(1, count + 1)]
    return NodeTable(tuple(nodes))


def _openb_nodes(text: str, where: Value, scale: float, pool: str | None) -> NodeTable:
    nodes = []
    for at, (line, row) in enumerate(_table(text, where, "sn", "gpu", "model")):
        gpus = int(_number(where, line, row, "gpu"))
        if gpus and int((at + 1) * scale) > int(at * scale):
            nodes.append(NodeRow(row["sn"], pool or row["model"], gpus))
    return NodeTable(tuple(nodes), shareable=True)


def _muri_nodes(text: str, where: Value, scale: float, pool: str) -> NodeTable:
    for line, row in _table(text, where, "num_switch", "num_node_p_switch", "num_gpu_p_node"):
        count = round(_number(where, line, row, "num_switch") * _number(where, line, row, "num_node_p_switch") * scale)
        gpus = int(_number(where, line, row, "num_gpu_p_node"))
        return NodeTable(tuple(NodeRow(f"n{n}", pool, gpus) for n in range(1, count + 1)))
    raise _error(where, 2, "the table is empty")


# -- jobs ------------------------------------------------------------------------------------------------------


def _philly(text: str, where: Value) -> Iterator[Row]:
    for line, row in _table(text, where, "timestamp", "duration", "num_gpus", "cluster"):
        try:
            at = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC).timestamp()
        except ValueError:
            raise _error(where, line, f"timestamp: {row['timestamp']!r} is not a time") from None
        gpus = int(_number(where, line, row, "num_gpus"))
        yield Row(at, _number(where, line, row, "duration"), gpus, row["cluster"], name=f"philly-{line - 1}")


def _openb(text: str, where: Value) -> Iterator[Row]:
    for line, row in _table(text, where, "name", "num_gpu", "gpu_milli"):
        gpus = int(_number(where, line, row, "num_gpu"))
        milli = int(_number(where, line, row, "gpu_milli"))
        if gpus == 0:
            continue
        at = float(row.get("creation_time") or 0)
        runs = max(1.0, float(row.get("deletion_time") or 0) - at) if row.get("deletion_time") else 1e9
        models = tuple(part for part in (row.get("gpu_spec") or "").split("|") if part)
        share = milli * 1000 if gpus == 1 and milli < 1000 else 0
        yield Row(at, runs, 0 if share else gpus, "", share, models, row["name"])


def _muri(text: str, where: Value) -> Iterator[Row]:
    """Submit time and duration are in milliseconds."""
    for line, row in _table(text, where, "job_id", "num_gpu", "submit_time", "duration"):
        yield Row(
            _number(where, line, row, "submit_time") / 1000,
            _number(where, line, row, "duration") / 1000,
            int(_number(where, line, row, "num_gpu")),
            "",
            name=f"muri-{row['job_id']}",
        )


def _swf(text: str, where: Value) -> Iterator[Row]:
    """Standard Workload Format, 18 fields: Feitelson's Parallel Workloads Archive. Users are the teams."""
    for line, raw in enumerate(text.splitlines(), start=1):
        if not raw.strip() or raw.startswith(";"):
            continue
        fields = raw.split()
        if len(fields) < 18:
            raise _error(where, line, f"{len(fields)} fields; the format has 18")
        try:
            number, submit, runs, processors, user = (
                int(fields[0]),
                float(fields[1]),
                float(fields[3]),
                int(fields[4]),
                int(fields[11]),
            )
        except ValueError:
            raise _error(where, line, "a field is not a number") from None
        if runs >= 0 and processors > 0:
            yield Row(submit, runs, processors, f"user-{user}", name=f"swf-{number}")


def _csv(text: str, where: Value) -> Iterator[Row]:
    """Own format: ``submit`` [s], ``duration`` [s], ``gpus``, and optionally ``team``, ``name``."""
    for line, row in _table(text, where, "submit", "duration", "gpus"):
        yield Row(
            _number(where, line, row, "submit"),
            _number(where, line, row, "duration"),
            int(_number(where, line, row, "gpus")),
            row.get("team") or "",
            name=row.get("name") or f"job-{line - 1}",
        )


_READERS: Mapping[str, Callable[[str, Value], Iterator[Row]]] = {
    "philly": _philly,
    "openb": _openb,
    "muri": _muri,
    "swf": _swf,
    "csv": _csv,
}


def read_jobs(
    text: str, where: Value, parts: Mapping[str, Value], teams: Mapping[str, int], pools: Mapping[str, Pool]
) -> Iterator[JobSpec]:
    """Jobs of a trace in the order of their submit times; jobs of teams that the scenario does not have are left out."""
    kind = parts["format"].text()
    if kind not in _READERS:
        raise parts["format"].error(f"{kind!r} is not one of {', '.join(FORMATS)}")
    fitter = _Fitter(where, parts, teams, pools)
    rows = list(_READERS[kind](text, parts["file"]))
    if fitter.demand is not None:
        rows = fitter.sample(rows)
    rows = [row for row in rows if fitter.wanted(row)]
    rows.sort(key=lambda row: row.at)
    first = fitter.begins if fitter.begins is not None else (rows[0].at if rows else 0.0)
    for row in rows:
        spec = fitter.job(row, first)
        if spec is not None:
            yield spec


class _Fitter:
    """The trace's options, and how its rows become jobs of the scenario."""

    def __init__(
        self, where: Value, parts: Mapping[str, Value], teams: Mapping[str, int], pools: Mapping[str, Pool]
    ) -> None:
        self.teams, self.pools = teams, pools
        self.begins = _bound(parts.get("from"), end=False)
        self.ends = _bound(parts.get("to"), end=True)
        self.team = parts["team"].text() if "team" in parts else None
        if self.team is not None and self.team not in teams:
            raise parts["team"].error(f"unknown team {self.team!r}")
        self.only = next(iter(teams)) if len(teams) == 1 else None
        names = [v.text() for v in parts["pools"].elements()] if "pools" in parts else list(pools)
        unknown = [name for name in names if name not in pools]
        if unknown:
            raise parts["pools"].error(f"unknown pool {unknown[0]!r}; there are {', '.join(pools)}")
        self.accepted = tuple(pools[name].id for name in names)
        self.free = _interruptible(parts.get("interruptible"))
        self.checkpoint = parts["checkpoint_every"].duration(1) if "checkpoint_every" in parts else None
        self.grace = parts["grace"].duration() if "grace" in parts else 0.0
        self.random = random.Random(parts["seed"].integer() if "seed" in parts else 1)
        self.demand = parts["demand"].number(0.01, 100) if "demand" in parts else None
        self.fixed_runs = parts["runs"].duration(1) if "runs" in parts else None
        self.total = 0

    def wanted(self, row: Row) -> bool:
        if self.begins is not None and row.at < self.begins:
            return False
        if self.ends is not None and row.at >= self.ends:
            return False
        return self._team(row) is not None

    def _team(self, row: Row) -> str | None:
        if self.team is not None:
            return self.team
        if row.team in self.teams:
            return row.team
        return self.only if not row.team else None

    def sample(self, rows: list[Row]) -> list[Row]:
        """``demand``: rows in random order, again from the front, until so many GPUs are asked for in all."""
        order = rows.copy()
        self.random.shuffle(order)
        return [Row(float(at), 1e9, r.gpus, r.team, r.share, r.models, f"{r.name}.{at}") for at, r in enumerate(order)]

    def job(self, row: Row, first: float) -> JobSpec | None:
        name = self._team(row)
        assert name is not None
        accepted = self.accepted
        if row.models:
            accepted = tuple(self.pools[model].id for model in row.models if model in self.pools)
            if not accepted:
                return None
        workers, gpus = (1, 0) if row.share else split(row.gpus)
        free = self.free if isinstance(self.free, bool) else self.random.random() < self.free
        request = Request(
            pools=accepted,
            gpus=gpus,
            share=min(row.share, GPU),
            workers=workers,
            min_workers=workers,
            interruptible=free,
            checkpoint_every=self.checkpoint if free else None,
            grace=self.grace if free else 0.0,
        )
        runs = self.fixed_runs if self.fixed_runs is not None else row.runs
        return JobSpec(0, row.name, self.teams[name], request, runs=runs, at=row.at - first)


def split(gpus: int) -> tuple[int, int]:
    """(workers, GPUs per worker): whole nodes above eight GPUs, equal workers."""
    if gpus <= GPUS_PER_NODE:
        return 1, gpus
    workers = -(-gpus // GPUS_PER_NODE)
    return workers, -(-gpus // workers)


def _bound(value: Value | None, *, end: bool) -> float | None:
    """A date or instant, or seconds; ``to`` as a date includes that day."""
    if value is None:
        return None
    raw = value.raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    instant = value.instant() if isinstance(raw, datetime) or "T" in str(raw) or ":" in str(raw) else None
    if instant is not None:
        return instant.timestamp()
    try:
        day = datetime.fromisoformat(str(raw)).replace(tzinfo=UTC)
    except ValueError:
        raise value.error(f"a date, an instant or seconds are expected, not {value.kind}") from None
    return (day + timedelta(days=1) if end else day).timestamp()


def _interruptible(value: Value | None) -> bool | float:
    if value is None:
        return False
    raw = value.raw
    if raw in ("all", "none"):
        return bool(raw == "all")
    return value.number(0, 1)
