"""Checking the ledger against itself: every guarantee that a report relies on."""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken guarantee, with the row that breaks it."""

    check: str
    detail: str

    def __str__(self) -> str:
        return f"{self.check}: {self.detail}"


#: name -> a query whose every row (one text column) is a problem.
CHECKS: dict[str, str] = {
    "a device held by more than it has": """
        SELECT format('GPU %s is held %s times over at %s', a.gpu_id, sum(b.share), lower(a.during))
        FROM scheduling_allocation a JOIN scheduling_allocation b
          ON b.gpu_id = a.gpu_id AND b.during @> lower(a.during)
        WHERE NOT isempty(a.during)
        GROUP BY a.id, a.gpu_id, a.during HAVING sum(b.share) > 1
    """,
    "an ended attempt that still holds devices": """
        SELECT format('attempt %s of job %s ended at %s', t.id, t.job_id, t.ended_at)
        FROM scheduling_attempt t JOIN scheduling_allocation a ON a.attempt_id = t.id
        WHERE t.state = 'ended' AND upper_inf(a.during) AND NOT isempty(a.during) GROUP BY t.id
    """,
    "an open attempt whose devices differ from its amount": """
        SELECT format('attempt %s of job %s has %s GPUs and holds %s', t.id, t.job_id, t.gpus, coalesce(sum(a.share), 0))
        FROM scheduling_attempt t LEFT JOIN scheduling_allocation a
          ON a.attempt_id = t.id AND upper_inf(a.during) AND NOT isempty(a.during)
        WHERE t.state <> 'ended' GROUP BY t.id HAVING coalesce(sum(a.share), 0) <> t.gpus
    """,
    "an allocation that does not end with its attempt": """
        SELECT format('allocation %s ends at %s, attempt %s at %s', a.id, upper(a.during), t.id, t.ended_at)
        FROM scheduling_attempt t JOIN scheduling_allocation a ON a.attempt_id = t.id
        WHERE t.state = 'ended' AND NOT isempty(a.during) AND upper(a.during) <> t.ended_at
          AND NOT EXISTS (  -- it went on, on another device (services/devices.py)
              SELECT 1 FROM scheduling_allocation b
              WHERE b.attempt_id = t.id AND b.gpu_id <> a.gpu_id AND lower(b.during) = upper(a.during))
    """,
    "an allocation outside the life of its device": """
        SELECT format('allocation %s on GPU %s', a.id, a.gpu_id)
        FROM scheduling_allocation a JOIN scheduling_gpu g ON g.id = a.gpu_id
        WHERE NOT isempty(a.during) AND NOT (g.exists @> a.during)
    """,
    "a running job without an open attempt": """
        SELECT format('job %s', j.id) FROM scheduling_job j
        WHERE j.state = 'running'
          AND NOT EXISTS (SELECT 1 FROM scheduling_attempt t WHERE t.job_id = j.id AND t.state <> 'ended')
    """,
    "an open attempt of a job that does not run": """
        SELECT format('attempt %s of job %s, which is %s', t.id, j.id, j.state)
        FROM scheduling_attempt t JOIN scheduling_job j ON j.id = t.job_id
        WHERE t.state <> 'ended' AND j.state <> 'running'
    """,
    "an open attempt that no command starts": """
        SELECT format('attempt %s of job %s', t.id, t.job_id) FROM scheduling_attempt t
        WHERE t.state <> 'ended'
          AND NOT EXISTS (SELECT 1 FROM scheduling_command c WHERE c.attempt_id = t.id AND c.kind = 'start')
    """,
    "a wrong count of unmet dependencies": """
        SELECT format('job %s says %s, there are %s', j.id, j.unmet_dependencies,
                      count(o.id) FILTER (WHERE o.state <> 'succeeded'))
        FROM scheduling_job j LEFT JOIN scheduling_jobdependency d ON d.job_id = j.id
        LEFT JOIN scheduling_job o ON o.id = d.on_id
        WHERE j.state = 'waiting' GROUP BY j.id
        HAVING j.unmet_dependencies <> count(o.id) FILTER (WHERE o.state <> 'succeeded')
    """,
    "a state that its last event does not tell": """
        SELECT format('job %s is %s, its last event says %s', j.id, j.state, e.to_state)
        FROM scheduling_job j
        JOIN LATERAL (
            SELECT to_state FROM scheduling_jobevent
            WHERE job_id = j.id AND kind IN ('state', 'submitted') ORDER BY id DESC LIMIT 1
        ) e ON true
        WHERE e.to_state <> j.state
    """,
}

#: Rows told per check; the count is always whole.
MOST_TOLD = 20


def check_ledger() -> list[Problem]:
    """Everything that is wrong; empty = consistent."""
    problems: list[Problem] = []
    with connection.cursor() as cursor:
        for name, query in CHECKS.items():
            cursor.execute(f"SELECT count(*) OVER (), rows.* FROM ({query}) AS rows LIMIT {MOST_TOLD}")
            rows = cursor.fetchall()
            problems += [Problem(name, str(row[1])) for row in rows]
            if rows and rows[0][0] > len(rows):
                problems.append(Problem(name, f"… {rows[0][0] - len(rows)} more"))
    return problems
