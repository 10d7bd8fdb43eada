"""Reports at the size of a large installation: one million attempts over twelve months.

    python benchmarks/reports.py [--attempts 1000000] [--keep]

Fills the database that the settings name (it must hold no attempts), rebuilds all roll-ups, then asks for every report
of the whole year, and prints a table. The rows are removed again unless ``--keep`` is given. Nothing is cached between
the questions but what PostgreSQL itself keeps.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gpuportal.settings")

import django

django.setup()

from django.db import connection, transaction

from scheduling.models import Attempt

YEAR = (datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC))

# 256 nodes of 8 GPUs in two pools. On the first half every device runs single-GPU jobs one after the other, on the
# second half every node runs gangs of 8. Lengths vary by a factor of about 20; an eighth of the time is idle.
FILL = """
SET LOCAL session_replication_role = replica;
SET LOCAL synchronous_commit = off;
INSERT INTO scheduling_cluster (name, kind, config, levels, enabled, reachable, last_error, observed_until, created_at)
    VALUES ('bench', 'simulated', '{}', '[]', true, true, '', '', now());
INSERT INTO scheduling_gpumodel (name, memory_bytes, tdp_watts, idle_watts, price_per_hour, mig_profiles, relative_speed)
    SELECT 'BENCH' || i, 80000000000, 400, 50, 2, '[]', 1 FROM generate_series(1, 2) i;
INSERT INTO scheduling_pool (name, cluster_id, gpu_model_id)
    SELECT lower(m.name), c.id, m.id FROM scheduling_gpumodel m, scheduling_cluster c
    WHERE m.name LIKE 'BENCH%%' AND c.name = 'bench' ORDER BY m.id;
INSERT INTO teams_team (name, title, created_at) SELECT 'bench-' || i, '', now() FROM generate_series(1, 15) i;
INSERT INTO teams_user (username, password, is_superuser, first_name, last_name, email, is_staff, is_active, date_joined,
    staff_role, time_zone, color_scheme, must_change_password, cluster_account)
    VALUES ('bench', '', false, '', '', '', false, false, now(), '', 'UTC', 'auto', false, '');
INSERT INTO scheduling_node (cluster_id, pool_id, name, state, state_reason, drained_by_portal, domains, shareable)
    SELECT p.cluster_id, p.id, 'bench-' || i, 'up', '', false, '{}', false FROM generate_series(0, 255) i
    JOIN scheduling_pool p ON p.name = 'bench' || (1 + i %% 2);
INSERT INTO scheduling_gpu (node_id, pool_id, index, uuid, broken, exists)
    SELECT n.id, n.pool_id, g, '', false, tstzrange('2025-01-01 00:00Z', NULL)
    FROM scheduling_node n, generate_series(0, 7) g WHERE n.name LIKE 'bench-%%';
INSERT INTO scheduling_nodeinterval (node_id, state, during, reason, actor_label)
    SELECT n.id, (ARRAY['down', 'drained', 'maintenance'])[1 + k %% 3],
           tstzrange(t, t + interval '7 hours 13 minutes'), '', ''
    FROM scheduling_node n, generate_series(1, 6) k,
    LATERAL (SELECT timestamptz '2025-01-01 00:00Z' + k * interval '55 days' + n.id %% 97 * interval '5 hours' AS t) x
    WHERE n.name LIKE 'bench-%%' AND n.id %% 4 = 0;
CREATE TEMP TABLE lane ON COMMIT DROP AS
    SELECT row_number() OVER () AS lane, n.id AS node, n.pool_id AS pool, 1::int AS gpus, g AS first, %(singles)s::int AS runs
    FROM scheduling_node n, generate_series(0, 7) g
    WHERE n.name LIKE 'bench-%%' AND substr(n.name, 7)::int < 128
    UNION ALL
    SELECT 100000 + n.id, n.id, n.pool_id, 8, 0, %(gangs)s::int FROM scheduling_node n
    WHERE n.name LIKE 'bench-%%' AND substr(n.name, 7)::int >= 128;
CREATE TEMP TABLE run ON COMMIT DROP AS
    SELECT row_number() OVER (ORDER BY start, lane) AS n, *,
           start + length * (0.7 + 0.25 * ((lane * 31 + k * 17) %% 100) / 100.0) AS finish
    FROM (
        SELECT l.*, k, weight / sum(weight) OVER w * interval '365 days' AS length,
               timestamptz '2025-01-01 00:00Z'
               + (sum(weight) OVER (w ORDER BY k) - weight) / sum(weight) OVER w * interval '365 days' AS start
        FROM lane l, LATERAL (
            SELECT k, 1.0 + 19 * power(((l.lane * 7919 + k * 104729) %% 1000) / 1000.0, 4) AS weight
            FROM generate_series(1, l.runs) k
        ) x WINDOW w AS (PARTITION BY l.lane)
    ) y;
CREATE INDEX ON run (n);
INSERT INTO scheduling_job (name, team_id, owner_id, state, workload_class, priority, workers, min_workers, gpus, pools,
    topology_level, topology_required, interruptible, grace, retries, command, image, environment, working_directory,
    held, submitted_at, eligible_at, unmet_dependencies, user_failures, infrastructure_failures, avoid_nodes,
    unsatisfiable, first_started_at, first_result_at, finished_at, array_id, version)
    SELECT 'bench ' || n, t.first + n %% 15, u.id, 'succeeded', (ARRAY['training', 'batch', 'interactive'])[1 + n %% 3], 1,
           1, 1, gpus, ARRAY[pool], '', false, n %% 2 = 0, interval '30 seconds', 2, '', '', '{}', '', false, s, s, 0, 0, 0,
           '{}', '', start, start + (finish - start) * 0.4, finish, '', 1
    FROM run, (SELECT min(id) AS first FROM teams_team WHERE name LIKE 'bench-%%') t,
    (SELECT id FROM teams_user WHERE username = 'bench') u,
    LATERAL (SELECT start - interval '1 second' * (10 + power(n %% 1000, 2) / 50) AS s) w ORDER BY n;
INSERT INTO scheduling_attempt (uuid, job_id, team_id, pool_id, number, state, outcome, cause, detail, workers, gpus,
    placement, filler, started_at, running_at, ended_at, eligible_at, last_checkpoint_at, stop_reason, lost_gpu_seconds,
    backend_id, token_hash)
    SELECT gen_random_uuid(), j.id, j.team_id, pool, 1, 'ended', o.outcome, o.cause, '', 1, run.gpus, '[]', false, start,
           start + interval '20 seconds', finish, j.submitted_at,
           CASE WHEN run.n %% 2 = 0 THEN start + (finish - start) * 0.8 END, o.reason, 0, '', ''
    FROM run JOIN scheduling_job j ON j.name = 'bench ' || run.n,
    LATERAL (SELECT CASE run.n %% 20 WHEN 0 THEN 'failed' WHEN 1 THEN 'preempted' WHEN 2 THEN 'node_failed' ELSE 'succeeded'
             END AS outcome, CASE run.n %% 20 WHEN 0 THEN 'user' WHEN 1 THEN 'preemption' WHEN 2 THEN 'xid' ELSE '' END AS cause,
             CASE run.n %% 20 WHEN 1 THEN 'reclaim' ELSE '' END AS reason) o ORDER BY run.n;
INSERT INTO scheduling_allocation (attempt_id, gpu_id, team_id, pool_id, share, during)
    SELECT a.id, g.id, a.team_id, a.pool_id, 1, tstzrange(a.started_at, a.ended_at)
    FROM run JOIN scheduling_job j ON j.name = 'bench ' || run.n JOIN scheduling_attempt a ON a.job_id = j.id
    JOIN scheduling_gpu g ON g.node_id = run.node AND g.index >= run.first AND g.index < run.first + run.gpus;
INSERT INTO scheduling_activityspan (allocation_id, during, active, activity, metric)
    SELECT id, tstzrange(lower(during), lower(during) + (upper(during) - lower(during)) * 0.9), id %% 7 <> 0,
           CASE WHEN id %% 7 <> 0 THEN 0.75 ELSE 0.01 END, 'sm_active'
    FROM scheduling_allocation WHERE id %% 3 <> 0;
INSERT INTO scheduling_poolstate (pool_id, at, free, reserved, stranded, demand, pieces)
    SELECT p.id, t, 100, 10 + n %% 5, 20 + n %% 30, 50, '{"1": 4, "8": 3}'
    FROM scheduling_pool p, generate_series(1, 365 * 24) n,
    LATERAL (SELECT timestamptz '2025-01-01 00:00Z' + n * interval '1 hour' + interval '137 seconds' AS t) x
    WHERE p.name LIKE 'bench%%';
"""

EMPTY = """
SET LOCAL session_replication_role = replica;
TRUNCATE scheduling_activityspan, scheduling_poolstate, scheduling_hourlyuse, scheduling_hourlyenergy, scheduling_gpu,
    scheduling_node, scheduling_nodeinterval, scheduling_job, scheduling_attempt, scheduling_allocation, scheduling_pool,
    scheduling_gpumodel, scheduling_cluster, scheduling_rollupstate, scheduling_dirtyrange CASCADE;
DELETE FROM teams_user WHERE username = 'bench';
DELETE FROM teams_team WHERE name LIKE 'bench-%%';
"""


def fill(attempts: int) -> None:
    singles = round(attempts * 0.9226 / 1024)
    with transaction.atomic(), connection.cursor() as cursor:
        for statement in FILL.split(";\n"):
            if statement.strip():
                cursor.execute(statement, {"singles": singles, "gangs": round((attempts - singles * 1024) / 128)})
    with connection.cursor() as cursor:
        cursor.execute("VACUUM (ANALYZE)")


def timed(what: str, task: Callable[[], object], limit: float) -> bool:
    began = time.perf_counter()
    task()
    seconds = time.perf_counter() - began
    print(f"{what:<58} {seconds:>8.2f} s   limit {limit:g} s   {'ok' if seconds <= limit else 'TOO SLOW'}", flush=True)
    return seconds <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--keep", action="store_true", help="leave the rows in the database")
    parser.add_argument("--only-rollup", action="store_true", help="no reports")
    parser.add_argument("--filled", action="store_true", help="the rows are there already")
    options = parser.parse_args()
    if not options.filled:
        if Attempt.objects.exists():
            print("The database holds attempts: give DATABASE_URL of an empty one.", file=sys.stderr)
            return 1
        timed("filling the ledger", lambda: fill(options.attempts), 3600)
    print(f"{Attempt.objects.count():,} attempts")
    return 0 if _questions(options) else 1


def _questions(options: argparse.Namespace) -> bool:
    from scheduling.services import rollup

    fine = timed("rebuild of all roll-ups", lambda: rollup.rebuild(YEAR[1]), 120)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE scheduling_hourlyuse")
    fine &= timed("bringing them up to date, nothing changed", lambda: rollup.roll_up(YEAR[1]), 1)
    if not options.only_rollup:
        fine &= _reports()
    if not options.keep:
        with transaction.atomic(), connection.cursor() as cursor:
            for statement in EMPTY.replace("%%", "%").split(";\n"):
                if statement.strip():
                    cursor.execute(statement)
    return fine


def _reports() -> bool:
    from scheduling.reports.pages import REPORTS
    from scheduling.reports.scope import Scope

    fine = True
    for zone in ("UTC", "Europe/Berlin"):
        scope = Scope(*YEAR, YEAR[1], ZoneInfo(zone))
        for name, report in REPORTS.items():
            fine &= timed(
                f"{name}, twelve months, days of {zone}", lambda report=report, scope=scope: report.make(scope), 1
            )
    return fine


if __name__ == "__main__":
    sys.exit(main())
