"""Guarantees that no constraint can express: shares on one GPU never exceed 1, the ledger is append-only."""

from django.db import migrations

SHARES = """
CREATE FUNCTION gpuportal_allocation_fits() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    most numeric;
BEGIN
    -- One writer per device at a time, so that two of them cannot each see room for themselves.
    PERFORM 1 FROM scheduling_gpu WHERE id = NEW.gpu_id FOR UPDATE;
    IF NEW.share = 1 AND NOT EXISTS (
        SELECT 1 FROM scheduling_allocation a
        WHERE a.gpu_id = NEW.gpu_id AND a.id <> NEW.id AND a.share < 1 AND a.during && NEW.during
    ) THEN
        RETURN NEW;  -- whole against whole is the exclusion constraint's
    END IF;
    -- The sum over time is largest at the start of some interval.
    SELECT max(total) INTO most FROM (
        SELECT (
            SELECT coalesce(sum(b.share), 0) FROM scheduling_allocation b
            WHERE b.gpu_id = NEW.gpu_id AND b.id <> NEW.id AND b.during @> point.at
        ) AS total
        FROM (
            SELECT lower(NEW.during) AS at
            UNION
            SELECT lower(a.during) FROM scheduling_allocation a
            WHERE a.gpu_id = NEW.gpu_id AND a.id <> NEW.id AND a.during && NEW.during
              AND lower(a.during) > lower(NEW.during)
        ) AS point
    ) AS sums;
    IF coalesce(most, 0) + NEW.share > 1 THEN
        RAISE EXCEPTION 'GPU % is held by % already, % more does not fit', NEW.gpu_id, most, NEW.share
            USING ERRCODE = 'exclusion_violation', CONSTRAINT = 'gpu_shares_at_most_1';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER allocation_fits BEFORE INSERT OR UPDATE OF gpu_id, share, during ON scheduling_allocation
    FOR EACH ROW WHEN (NOT isempty(NEW.during)) EXECUTE FUNCTION gpuportal_allocation_fits();
"""

APPEND_ONLY = """
-- A correction by reconcile, a retention run or the reset of a demonstration sets gpuportal.correcting for its
-- transaction (SET LOCAL), with its reason.
CREATE FUNCTION gpuportal_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(current_setting('gpuportal.correcting', true), '') <> '' THEN
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    END IF;
    RAISE EXCEPTION '% is append-only: % refused', TG_TABLE_NAME, lower(TG_OP)
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = TG_TABLE_NAME || '_append_only';
END $$;

CREATE FUNCTION gpuportal_allocation_closed_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(current_setting('gpuportal.correcting', true), '') <> '' THEN
        RETURN NEW;
    END IF;
    IF upper_inf(OLD.during) AND lower(NEW.during) = lower(OLD.during) AND NEW.gpu_id = OLD.gpu_id
       AND NEW.attempt_id = OLD.attempt_id AND NEW.share = OLD.share AND NEW.team_id = OLD.team_id
       AND NEW.pool_id = OLD.pool_id THEN
        RETURN NEW;
    END IF;
    IF upper_inf(OLD.during) AND isempty(NEW.during) THEN
        RETURN NEW;  -- it ended at the instant it began
    END IF;
    RAISE EXCEPTION 'allocation % is closed: the ledger is append-only', OLD.id
        USING ERRCODE = 'integrity_constraint_violation', CONSTRAINT = 'allocation_closed_once';
END $$;

CREATE TRIGGER allocation_kept BEFORE DELETE ON scheduling_allocation
    FOR EACH ROW EXECUTE FUNCTION gpuportal_append_only();
CREATE TRIGGER allocation_closed_once BEFORE UPDATE ON scheduling_allocation
    FOR EACH ROW EXECUTE FUNCTION gpuportal_allocation_closed_once();
CREATE TRIGGER job_events_kept BEFORE DELETE OR UPDATE ON scheduling_jobevent
    FOR EACH ROW EXECUTE FUNCTION gpuportal_append_only();
"""

AUDIT = """
CREATE TRIGGER audit_kept BEFORE DELETE OR UPDATE ON teams_auditevent
    FOR EACH ROW EXECUTE FUNCTION gpuportal_append_only();
"""


class Migration(migrations.Migration):
    dependencies = [("scheduling", "0002_initial"), ("teams", "0001_initial")]

    operations = [
        migrations.RunSQL(
            SHARES,
            "DROP TRIGGER allocation_fits ON scheduling_allocation; DROP FUNCTION gpuportal_allocation_fits();",
        ),
        migrations.RunSQL(
            APPEND_ONLY,
            "DROP TRIGGER allocation_kept ON scheduling_allocation;"
            "DROP TRIGGER allocation_closed_once ON scheduling_allocation;"
            "DROP TRIGGER job_events_kept ON scheduling_jobevent;"
            "DROP FUNCTION gpuportal_allocation_closed_once(); DROP FUNCTION gpuportal_append_only() CASCADE;",
        ),
        migrations.RunSQL(AUDIT, "DROP TRIGGER IF EXISTS audit_kept ON teams_auditevent;"),
    ]
