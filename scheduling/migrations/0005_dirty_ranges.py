"""Any change of the past marks the time whose roll-up it makes out of date, whoever makes it and by whatever way."""

from django.db import migrations

FORWARD = """
-- Ranges that begin in the running hour are not worth a row: that hour is always worked out anew.
CREATE FUNCTION gpuportal_dirty(since timestamptz, until timestamptz) RETURNS void LANGUAGE sql AS $$
    INSERT INTO scheduling_dirtyrange (since, until)
    SELECT since, greatest(until, since + interval '1 microsecond')
    WHERE since < date_trunc('hour', clock_timestamp(), 'UTC');
$$;

CREATE FUNCTION gpuportal_allocation_dirty() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO scheduling_dirtyrange (since, until)
        SELECT min(lower(during)), max(coalesce(upper(during), clock_timestamp())) FROM changed
        WHERE NOT isempty(during) AND lower(during) < date_trunc('hour', clock_timestamp(), 'UTC')
        GROUP BY attempt_id;
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO scheduling_dirtyrange (since, until)
        SELECT lower(during), coalesce(upper(during), clock_timestamp()) FROM previous WHERE NOT isempty(during);
    ELSE
        -- Only the time between the old and the new end, unless more than the end was corrected.
        INSERT INTO scheduling_dirtyrange (since, until)
        SELECT since, until FROM (
            SELECT
                min(CASE WHEN lower(n.during) = lower(o.during) AND n.gpu_id = o.gpu_id AND n.share = o.share
                              AND n.team_id = o.team_id AND n.pool_id = o.pool_id
                    THEN least(coalesce(upper(n.during), clock_timestamp()), coalesce(upper(o.during), clock_timestamp()))
                    ELSE least(lower(o.during), lower(n.during)) END) AS since,
                max(greatest(coalesce(upper(n.during), clock_timestamp()), coalesce(upper(o.during), clock_timestamp())))
                    AS until
            FROM changed n JOIN previous o USING (id) WHERE n IS DISTINCT FROM o GROUP BY n.attempt_id
        ) AS ranges
        WHERE since < date_trunc('hour', clock_timestamp(), 'UTC');
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION gpuportal_attempt_dirty() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO scheduling_dirtyrange (since, until)
    SELECT since, until FROM (
        SELECT
            CASE WHEN n.outcome <> o.outcome OR n.last_checkpoint_at IS DISTINCT FROM o.last_checkpoint_at
                 THEN least(coalesce(o.last_checkpoint_at, n.started_at), coalesce(n.last_checkpoint_at, n.started_at))
                 ELSE least(
                     CASE WHEN n.running_at IS DISTINCT FROM o.running_at THEN n.started_at END,
                     CASE WHEN n.stop_requested_at IS DISTINCT FROM o.stop_requested_at
                          THEN least(n.stop_requested_at, o.stop_requested_at) END,
                     CASE WHEN n.ended_at IS DISTINCT FROM o.ended_at THEN least(n.ended_at, o.ended_at) END)
            END AS since,
            coalesce(n.ended_at, clock_timestamp()) AS until
        FROM changed n JOIN previous o USING (id)
        WHERE (n.outcome, n.running_at, n.stop_requested_at, n.ended_at)
              IS DISTINCT FROM (o.outcome, o.running_at, o.stop_requested_at, o.ended_at)
           OR n.outcome <> '' AND n.last_checkpoint_at IS DISTINCT FROM o.last_checkpoint_at
    ) AS ranges
    WHERE since < date_trunc('hour', clock_timestamp(), 'UTC');
    RETURN NULL;
END $$;

CREATE FUNCTION gpuportal_interval_dirty() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' AND NOT isempty(OLD.during) THEN
        PERFORM gpuportal_dirty(lower(OLD.during), coalesce(upper(OLD.during), clock_timestamp()));
    END IF;
    IF TG_OP <> 'DELETE' AND NOT isempty(NEW.during) THEN
        PERFORM gpuportal_dirty(lower(NEW.during), coalesce(upper(NEW.during), clock_timestamp()));
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION gpuportal_device_dirty() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        PERFORM gpuportal_dirty(
            CASE WHEN TG_OP = 'UPDATE' AND NEW.pool_id = OLD.pool_id AND lower(NEW.exists) = lower(OLD.exists)
                 THEN least(upper(OLD.exists), upper(NEW.exists)) ELSE lower(OLD.exists) END,
            coalesce(upper(OLD.exists), clock_timestamp()));
    END IF;
    IF TG_OP <> 'DELETE' THEN
        PERFORM gpuportal_dirty(lower(NEW.exists), coalesce(upper(NEW.exists), clock_timestamp()))
        WHERE TG_OP = 'INSERT' OR NEW.pool_id <> OLD.pool_id OR lower(NEW.exists) <> lower(OLD.exists);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER allocation_dirty_insert AFTER INSERT ON scheduling_allocation
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION gpuportal_allocation_dirty();
CREATE TRIGGER allocation_dirty_update AFTER UPDATE ON scheduling_allocation
    REFERENCING NEW TABLE AS changed OLD TABLE AS previous
    FOR EACH STATEMENT EXECUTE FUNCTION gpuportal_allocation_dirty();
CREATE TRIGGER allocation_dirty_delete AFTER DELETE ON scheduling_allocation
    REFERENCING OLD TABLE AS previous FOR EACH STATEMENT EXECUTE FUNCTION gpuportal_allocation_dirty();
CREATE TRIGGER attempt_dirty AFTER UPDATE ON scheduling_attempt
    REFERENCING NEW TABLE AS changed OLD TABLE AS previous
    FOR EACH STATEMENT EXECUTE FUNCTION gpuportal_attempt_dirty();
CREATE TRIGGER interval_dirty AFTER INSERT OR UPDATE OR DELETE ON scheduling_nodeinterval
    FOR EACH ROW EXECUTE FUNCTION gpuportal_interval_dirty();
CREATE TRIGGER device_dirty AFTER INSERT OR DELETE OR UPDATE OF exists, pool_id ON scheduling_gpu
    FOR EACH ROW EXECUTE FUNCTION gpuportal_device_dirty();
"""

BACKWARD = """
DROP TRIGGER device_dirty ON scheduling_gpu;
DROP TRIGGER interval_dirty ON scheduling_nodeinterval;
DROP TRIGGER attempt_dirty ON scheduling_attempt;
DROP TRIGGER allocation_dirty_delete ON scheduling_allocation;
DROP TRIGGER allocation_dirty_update ON scheduling_allocation;
DROP TRIGGER allocation_dirty_insert ON scheduling_allocation;
DROP FUNCTION gpuportal_device_dirty();
DROP FUNCTION gpuportal_interval_dirty();
DROP FUNCTION gpuportal_attempt_dirty();
DROP FUNCTION gpuportal_allocation_dirty();
DROP FUNCTION gpuportal_dirty(timestamptz, timestamptz);
"""


class Migration(migrations.Migration):
    dependencies = [("scheduling", "0004_rollups")]

    operations = [migrations.RunSQL(FORWARD, BACKWARD)]
