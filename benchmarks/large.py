"""A large installation for benchmarks: 10,000 GPUs, 100,000 waiting and 1,000,000 finished jobs, on a server of its own.

``serve`` starts an embedded PostgreSQL in a folder and points the settings at it; call it before anything of Django is
imported. ``fill`` writes the rows without the loop, then lets it judge nothing: orders and reasons are written as a
cycle would leave them.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from array import array
from pathlib import Path

_SCHEMA_DEFAULTS = """
SET LOCAL session_replication_role = replica;
SET LOCAL synchronous_commit = off;
SET LOCAL work_mem = '128MB';
"""

HARDWARE = """
INSERT INTO scheduling_cluster (name, kind, config, levels, enabled, reachable, last_error, observed_until, created_at)
    VALUES ('big', 'simulated', '{"nodes": [], "seed": 1}', '["block", "rack"]', true, true, '', '', now());
INSERT INTO scheduling_gpumodel (name, memory_bytes, tdp_watts, idle_watts, price_per_hour, mig_profiles, relative_speed)
    VALUES ('A100', 80000000000, 400, 50, 2, '[]', 1), ('H100', 80000000000, 700, 70, 4, '[]', 2);
INSERT INTO scheduling_pool (name, cluster_id, gpu_model_id)
    SELECT lower(m.name), c.id, m.id FROM scheduling_gpumodel m, scheduling_cluster c ORDER BY m.id;
INSERT INTO scheduling_node (cluster_id, pool_id, name, state, state_reason, drained_by_portal, domains, shareable,
        state_seen_at)
    SELECT p.cluster_id, p.id, 'node-' || lpad(i::text, 4, '0'),
           CASE WHEN i %% 97 = 0 THEN 'down' WHEN i %% 89 = 0 THEN 'drained' ELSE 'up' END, '', false,
           jsonb_build_object('block', 'b' || i / 250, 'rack', 'r' || lpad((i / 25)::text, 2, '0')), false, now()
    FROM generate_series(0, 1249) i JOIN scheduling_pool p ON p.name = CASE WHEN i < 625 THEN 'a100' ELSE 'h100' END;
INSERT INTO scheduling_gpu (node_id, pool_id, index, uuid, broken, exists)
    SELECT n.id, n.pool_id, g, '', n.id %% 211 = 0 AND g = 3, tstzrange(now() - interval '400 days', NULL)
    FROM scheduling_node n, generate_series(0, 7) g;
INSERT INTO scheduling_nodeinterval (node_id, state, during, reason, actor_label)
    SELECT n.id, 'down', tstzrange(t, t + interval '7 hours'), 'bench', 'cluster big' FROM scheduling_node n, generate_series(1, 40) k,
    LATERAL (SELECT now() - interval '390 days' + k * interval '9 days' AS t) x;
"""

PEOPLE = """
INSERT INTO teams_team (name, title, created_at) SELECT 'dept-' || i, '', now() FROM generate_series(1, 8) i;
INSERT INTO teams_team (name, title, parent_id, created_at)
    SELECT 'team-' || lpad(i::text, 2, '0'), '', p.id, now() FROM generate_series(1, 48) i
    JOIN teams_team p ON p.name = 'dept-' || 1 + i %% 8;
INSERT INTO teams_quota (team_id, pool_id, guaranteed, "limit", weight, during, reason, created_at)
    SELECT t.id, p.id, CASE WHEN t.parent_id IS NULL THEN 600 ELSE 100 END, NULL, 1, tstzrange(now() - interval '400 days', NULL),
           '', now() FROM teams_team t, scheduling_pool p;
INSERT INTO teams_user (username, password, is_superuser, first_name, last_name, email, is_staff, is_active, date_joined,
    staff_role, time_zone, color_scheme, must_change_password, cluster_account)
    SELECT 'user-' || i, '', false, '', '', '', false, true, now(), CASE i WHEN 1 THEN 'admin' WHEN 2 THEN 'manager' ELSE '' END,
           'Europe/Berlin', 'auto', false, '' FROM generate_series(1, 400) i;
INSERT INTO teams_membership (user_id, team_id, role, from_groups, created_at)
    SELECT u.id, t.id, CASE WHEN u.id %% 8 = 0 THEN 'lead' ELSE 'member' END, false, now()
    FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM teams_user) u
    JOIN (SELECT id, row_number() OVER (ORDER BY id) AS n FROM teams_team WHERE parent_id IS NOT NULL) t ON t.n = 1 + u.n %% 48
    WHERE u.n > 2;
"""

_JOB = """
INSERT INTO scheduling_job (name, team_id, owner_id, state, workload_class, priority, workers, min_workers, gpus, pools,
    topology_level, topology_required, walltime, interruptible, grace, retries, command, image, environment, working_directory,
    held, submitted_at, eligible_at, unmet_dependencies, user_failures, infrastructure_failures, avoid_nodes,
    unsatisfiable, first_started_at, first_result_at, finished_at, array_id, version)
"""

FINISHED = (
    _JOB
    + """
    SELECT 'finished ' || n, m.team_id, m.user_id, (ARRAY['succeeded', 'failed', 'succeeded', 'cancelled'])[1 + n %% 4],
           (ARRAY['training', 'batch', 'interactive'])[1 + n %% 3], 1, 1, 1, 8, ARRAY[p.id], '', false, interval '4 hours',
           n %% 2 = 0, interval '30 seconds', 2, 'python train.py', '', '{}', '', false, s, s, 0, 0, 0, '{}', '',
           s + interval '10 minutes', NULL, s + interval '2 hours', '', 3
    FROM generate_series(%(low)s::bigint, %(high)s::bigint) n
    JOIN (SELECT *, row_number() OVER (ORDER BY id) AS k FROM teams_membership) m ON m.k = 1 + n %% 398
    JOIN (SELECT id, row_number() OVER (ORDER BY id) AS k FROM scheduling_pool) p ON p.k = 1 + n %% 2,
    LATERAL (SELECT now() - interval '365 days' + n * interval '31 seconds' AS s) x;
INSERT INTO scheduling_attempt (uuid, job_id, team_id, pool_id, number, state, outcome, cause, detail, workers, gpus,
    placement, filler, started_at, running_at, ended_at, eligible_at, stop_reason, lost_gpu_seconds, backend_id, token_hash)
    SELECT gen_random_uuid(), j.id, j.team_id, j.pools[1], 1, 'ended', j.state, '', '', 1, 8, '[]', false,
           j.first_started_at, j.first_started_at, j.finished_at, j.submitted_at, '', 0, '', ''
    FROM scheduling_job j WHERE j.id > %(before)s AND j.finished_at IS NOT NULL;
INSERT INTO scheduling_jobevent (job_id, at, kind, from_state, to_state, actor_label, reason, data)
    SELECT j.id, j.submitted_at, 'submitted', '', 'waiting', 'bench', '', '{}' FROM scheduling_job j
    WHERE j.id > %(before)s AND j.finished_at IS NOT NULL;
"""
)

RUNNING = (
    _JOB
    + """
    SELECT 'running ' || n.id || '-' || g, m.team_id, m.user_id, 'running', 'training', 1, 1, 1, CASE WHEN n.id %% 10 = 0 THEN 1 ELSE 8 END,
           ARRAY[n.pool_id], '', false, interval '8 hours', true, interval '30 seconds', 2, 'python train.py', '', '{}', '', false,
           now() - interval '2 hours', now() - interval '2 hours', 0, 0, 0, ARRAY[n.id], '', now() - interval '1 hour', NULL, NULL,
           n.id || ',' || g, 2
    FROM scheduling_node n CROSS JOIN generate_series(0, 7) g
    JOIN (SELECT *, row_number() OVER (ORDER BY id) AS k FROM teams_membership) m ON m.k = 1 + (n.id * 7 + g) %% 398
    WHERE n.state = 'up' AND n.id %% 12 <> 0 AND (n.id %% 10 = 0 OR g = 0);
INSERT INTO scheduling_attempt (uuid, job_id, team_id, pool_id, number, state, outcome, cause, detail, workers, gpus,
    placement, filler, started_at, running_at, eligible_at, stop_reason, lost_gpu_seconds, backend_id, token_hash)
    SELECT gen_random_uuid(), j.id, j.team_id, j.pools[1], 1, 'running', '', '', '', 1, j.gpus,
           jsonb_build_array(jsonb_build_array(j.avoid_nodes[1],
               CASE WHEN j.gpus = 8 THEN 255 ELSE 1 << split_part(j.array_id, ',', 2)::int END, 1000000)),
           false, j.first_started_at, j.first_started_at, j.submitted_at, '', 0, '', ''
    FROM scheduling_job j WHERE j.state = 'running';
INSERT INTO scheduling_allocation (attempt_id, gpu_id, team_id, pool_id, share, during)
    SELECT a.id, g.id, a.team_id, a.pool_id, 1, tstzrange(a.started_at, NULL)
    FROM scheduling_attempt a JOIN scheduling_job j ON j.id = a.job_id
    JOIN scheduling_gpu g ON g.node_id = j.avoid_nodes[1] AND (j.gpus = 8 OR g.index = split_part(j.array_id, ',', 2)::int)
    WHERE a.state = 'running' AND NOT g.broken;
UPDATE scheduling_job SET array_id = '', avoid_nodes = '{}' WHERE state = 'running';
INSERT INTO scheduling_gpusample (gpu_id, attempt_id, at, seconds, activity, metric, power_watts)
    SELECT gpu_id, attempt_id, now() - k * interval '1 minute', 60, (gpu_id * 37 + k) %% 100 / 100.0, 'sm_active', 300
    FROM scheduling_allocation, generate_series(1, 20) k WHERE upper_inf(during);
"""
)

WAITING = (
    _JOB
    + """
    SELECT 'waiting ' || n, m.team_id, m.user_id, 'waiting', 'training', n %% 3, 1 + n %% 2, 1, 8, ARRAY[p.id], '', false,
           interval '4 hours', n %% 2 = 0, interval '30 seconds', 2, 'python train.py', '', '{}', '', false, s, s, 0, 0, 0, '{}',
           '', NULL, NULL, NULL, '', 1
    FROM generate_series(1, %(waiting)s::bigint) n
    JOIN (SELECT *, row_number() OVER (ORDER BY id) AS k FROM teams_membership) m ON m.k = 1 + n %% 398
    JOIN (SELECT id, row_number() OVER (ORDER BY id) AS k FROM scheduling_pool) p ON p.k = 1 + n %% 2,
    LATERAL (SELECT now() - interval '2 days' + n * interval '1 second' AS s) x;
INSERT INTO scheduling_reasongroup (team_id, key, code, blockers, worked_out_at)
    SELECT t.id, p.id || '-' || k, c.code,
           jsonb_build_array(
               jsonb_build_object('code', c.code, 'pool', p.id, 'team', t.id, 'asked', 8000000 * k, 'free', 3000000,
                                  'limit', 100000000, 'in_use', 96000000, 'largest', 1000000),
               jsonb_build_object('code', 'no-capacity', 'pool', p.id, 'asked', 8000000 * k, 'free', 3000000)),
           now()
    FROM teams_team t, scheduling_pool p, generate_series(1, 2) k,
    LATERAL (SELECT (ARRAY['limit', 'guarantee', 'fragmented'])[1 + t.id %% 3] AS code) c WHERE t.parent_id IS NOT NULL;
UPDATE scheduling_job j SET reason_group_id = r.id FROM scheduling_reasongroup r
    WHERE j.state = 'waiting' AND r.team_id = j.team_id AND r.key = j.pools[1] || '-' || j.workers;
INSERT INTO scheduling_jobevent (job_id, at, kind, from_state, to_state, actor_label, reason, data)
    SELECT j.id, j.submitted_at, 'submitted', '', 'waiting', 'bench', '', '{}' FROM scheduling_job j WHERE j.state <> 'succeeded' AND j.finished_at IS NULL;
INSERT INTO scheduling_estimate (job_id, made_at, p50_at, p90_at, basis)
    SELECT id, now(), now() + interval '3 hours', now() + interval '9 hours', 'bench' FROM scheduling_job WHERE state = 'waiting' AND id %% 3 = 0;
"""
)

#: A job with a long life, for its page.
EVENTFUL = """
INSERT INTO scheduling_attempt (uuid, job_id, team_id, pool_id, number, state, outcome, cause, detail, workers, gpus, placement,
    filler, started_at, running_at, ended_at, eligible_at, stop_reason, lost_gpu_seconds, backend_id, token_hash)
    SELECT gen_random_uuid(), j.id, j.team_id, j.pools[1], n, 'ended', CASE n %% 3 WHEN 0 THEN 'failed' ELSE 'preempted' END, '',
           'bench', 1, 8, '[]', false, t, t, t + interval '30 minutes', t - interval '10 minutes', 'reclaim', 3600, '', ''
    FROM scheduling_job j, generate_series(2, 60) n,
    LATERAL (SELECT now() - interval '4 days' + n * interval '1 hour' AS t) x WHERE j.id = %(job)s;
INSERT INTO scheduling_jobevent (job_id, attempt_id, at, kind, from_state, to_state, actor_label, reason, data)
    SELECT a.job_id, a.id, a.started_at + k * interval '5 minutes', 'checkpoint', '', '', 'attempt', '', '{}'
    FROM scheduling_attempt a, generate_series(1, 10) k WHERE a.job_id = %(job)s;
INSERT INTO scheduling_waitreason (job_id, code, blocker, since)
    SELECT a.job_id, (ARRAY['no-capacity', 'reserved'])[1 + a.number %% 2], '{"asked": 8000000, "free": 0}', a.eligible_at
    FROM scheduling_attempt a WHERE a.job_id = %(job)s;
"""


def serve(folder: Path | None = None) -> Path:
    """An embedded PostgreSQL in ``folder`` (default: a new one, removed by the caller); ends with this process."""
    from gpuportal.embedded import Postgres

    data = folder or Path(tempfile.mkdtemp(prefix="gpuportal-bench-"))
    data.mkdir(parents=True, exist_ok=True)
    data.chmod(0o755)
    server = Postgres(data, durable=False)
    server.start()
    server.create_database("gpuportal")
    os.environ["GPUPORTAL_DATA"] = str(data)
    os.environ["DATABASE_URL"] = server.address("gpuportal")
    os.environ["DJANGO_SETTINGS_MODULE"] = "gpuportal.settings"
    os.environ.setdefault("LOG_LEVEL", "WARNING")
    return data


def fill(*, waiting: int = 100_000, finished: int = 1_000_000) -> None:
    """All rows, unless they are there. Needs ``django.setup()`` and migrated tables."""
    from django.db import connection, transaction

    from scheduling.models import Cycle, Job, QueueOrder

    if Job.objects.exists():
        return

    def run(script: str, **values: int) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            for statement in (_SCHEMA_DEFAULTS + script).split(";\n"):
                if statement.strip():
                    cursor.execute(statement, values)

    run(HARDWARE)
    run(PEOPLE)
    step = 200_000
    for low in range(1, finished + 1, step):
        last = Job.objects.order_by("-id").values_list("id", flat=True).first() or 0
        run(FINISHED, low=low, high=min(finished, low + step - 1), before=last)
    run(RUNNING)
    run(WAITING, waiting=waiting)
    running = Job.objects.filter(state="running").order_by("-id").values_list("id", flat=True)[0]
    run(EVENTFUL, job=running)
    from django.utils import timezone

    order = array(
        "q", Job.objects.filter(state="waiting").order_by("team_id", "-priority", "id").values_list("id", flat=True)
    )
    now = timezone.now()
    cycle = Cycle.objects.create(started_at=now, waiting=len(order))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT t.id, p.id FROM teams_team t, scheduling_pool p WHERE t.parent_id IS NOT NULL ORDER BY 1, 2"
        )
        shares = [[team, pool, 104_000_000, 96_000_000, 500_000_000] for team, pool in cursor.fetchall()]
        QueueOrder.objects.create(
            cycle=cycle, worked_out_at=now, count=len(order), job_ids=zlib.compress(order.tobytes(), 1), shares=shares
        )
        cursor.execute("VACUUM (ANALYZE)")
