"""Parts of the Slurm back end that need no Slurm: settings, readers, dialects, scripts, SSH."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from scheduling.backends.base import Cause, Rejected, RunState, Unreachable, WorkerSlot
from scheduling.backends.fields import ConfigError
from scheduling.backends.slurm import from_config
from scheduling.backends.slurm.backend import choose
from scheduling.backends.slurm.commands import CommandTransport
from scheduling.backends.slurm.config import SlurmConfig, parse
from scheduling.backends.slurm.errors import classify
from scheduling.backends.slurm.hostlist import expand
from scheduling.backends.slurm.inventory import describe_nodes, gpu_nodes, read_topology
from scheduling.backends.slurm.records import SlurmJob, Tag, merge_components, parse_gres, read_job, read_node
from scheduling.backends.slurm.reports import run_report
from scheduling.backends.slurm.rest_dialects import choose_dialect
from scheduling.backends.slurm.runner import Result, SSHRunner
from scheduling.backends.slurm.script import batch_script
from scheduling.backends.slurm.submission import build_submission
from scheduling.backends.slurm.transport import Submission
from tests.backends.slurm_cluster import start_command

KEY = base64.b64encode(b"k" * 32).decode()
PLAIN = SlurmConfig("commands", "/shared/out")


# settings


def test_every_wrong_setting_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(
            {
                "transport": "carrier-pigeon",
                "output_directory": "out",
                "timeout": 0,
                "colour": "red",
                "levels": ["rack"],
            },
            None,
        )
    assert set(caught.value.errors) == {"transport", "timeout", "colour"}
    with pytest.raises(ConfigError) as caught:
        parse({"output_directory": "out", "levels": ["rack"], "partition": "a b"}, None)
    assert caught.value.errors.keys() == {"output_directory", "levels", "partition"}
    assert "'out'" in str(caught.value)
    assert "LEVEL=PREFIX" in str(caught.value)


def test_rest_needs_url_reader_and_key() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"transport": "rest", "output_directory": "/o"}, None)
    assert caught.value.errors.keys() == {"url", "reader", "jwt_key"}
    with pytest.raises(ConfigError, match="base64"):
        parse(
            {"transport": "rest", "output_directory": "/o", "url": "http://s:6820", "reader": "root"}, {"jwt_key": "%"}
        )


def test_a_secret_among_the_plain_settings_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"output_directory": "/o", "jwt_key": KEY}, None)
    assert "jwt_key" in caught.value.errors
    assert KEY not in str(caught.value)


def test_the_key_is_in_no_text_form_of_the_settings() -> None:
    config = parse(
        {"transport": "rest", "output_directory": "/o", "url": "http://s", "reader": "root"}, {"jwt_key": KEY}
    )
    assert config.jwt_key == b"k" * 32
    assert "kkkk" not in repr(config)
    assert KEY not in repr(config)


# readers


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[0-2]", ["n0", "n1", "n2"]),
        ("n[08-10,3],login", ["n08", "n09", "n10", "n3", "login"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("", []),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a]", "n1]", "n[0-99999999]"])
def test_host_lists_that_make_no_sense_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        expand(text)


def test_gres_are_read_with_types_counts_and_notes() -> None:
    found = parse_gres("gpu:h100:8(S:0-1),gpu:1g.10gb:7,shard:32,gpu:4(IDX:0-1,3,7)")
    assert [(gres.name, gres.type, gres.count, gres.note) for gres in found] == [
        ("gpu", "h100", 8, "S:0-1"),
        ("gpu", "1g.10gb", 7, ""),
        ("shard", "", 32, ""),
        ("gpu", "", 4, "IDX:0-1,3,7"),
    ]


OLD = {
    "job_id": 12, "job_state": "RUNNING", "user_name": "ada", "comment": "", "nodes": "n[0-1]",
    "start_time": 1700000000,
    "end_time": 1700003600, "exit_code": 1792, "derived_exit_code": 768, "restart_cnt": 0, "time_limit": 60,
    "gres_detail": ["gpu:h100:2(IDX:0-1)", "gpu:h100:2(IDX:2,5)"], "state_reason": "None", "het_job_id": 0,
}  # fmt: skip
NEW = OLD | {
    "job_state": ["RUNNING"], "start_time": {"set": True, "infinite": False, "number": 1700000000},
    "end_time": {"set": True, "infinite": False, "number": 1700003600}, "het_job_id": {"set": True, "number": 0},
    "exit_code": {"status": ["ERROR"], "return_code": {"set": True, "infinite": False, "number": 7},
                  "signal": {"id": {"set": False, "number": 0}, "name": ""}},
    "derived_exit_code": {"return_code": {"set": True, "number": 3}, "signal": {"id": {"set": False}}},
    "time_limit": {"set": True, "infinite": False, "number": 60},
}  # fmt: skip


def test_both_dialects_of_slurms_json_say_the_same() -> None:
    old = read_job(OLD)
    assert read_job(NEW) == old
    assert old.started == datetime.fromtimestamp(1700000000, UTC)
    assert (old.exit_status, old.exit_signal, old.step_status, old.time_limit) == (7, 0, 3, 60)
    assert old.devices == {"n0": (0, 1), "n1": (2, 5)}
    assert read_job(NEW | {"time_limit": {"set": True, "infinite": True, "number": 0}}).time_limit is None


def test_a_waiting_jobs_expected_start_is_not_its_start() -> None:
    assert read_job(OLD | {"job_state": "PENDING"}).started is None


def test_components_of_a_heterogeneous_job_become_one() -> None:
    first = read_job(OLD | {"job_id": 20, "het_job_id": 20, "nodes": "n0", "gres_detail": ["gpu:2(IDX:0-1)"]})
    second = read_job(
        OLD | {"job_id": 21, "het_job_id": 20, "het_job_offset": 1, "nodes": "n1", "gres_detail": ["gpu:1(IDX:4)"]}
    )
    merged = merge_components([second, first])
    assert (merged.id, merged.devices) == (20, {"n0": (0, 1), "n1": (4,)})
    assert merge_components([first, read_job(OLD | {"job_state": "NODE_FAIL", "het_job_offset": 1})]).states == (
        "NODE_FAIL",
    )


def test_a_tag_survives_its_way_through_the_comment() -> None:
    tag = Tag("gpuportal", uuid4(), stop_by=1700000000)
    assert Tag.read(tag.text()) == tag
    for foreign in ("", "hello", "{}", '{"attempt": 3}', "[1]", '{"portal":"x","attempt":"no-uuid"}'):
        assert Tag.read(foreign) is None


def test_topology_levels_are_read_widest_first() -> None:
    levels, domains = read_topology(
        "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[0-1]\n"
        "SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[2-3]\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-3] Switches=leaf[1-2]\n"
    )
    assert levels == ("switch-1", "leaf")
    assert domains["n2"] == {"switch-1": "spine", "leaf": "leaf2"}


def test_topology_can_come_from_features_and_gpu_names_from_the_settings() -> None:
    config = SlurmConfig("commands", "/o", gpu_models={"": "A100-80GB"}, levels=(("block", "blk-"), ("rack", "rack-")))
    node = read_node({"name": "n0", "state": "idle", "gres": "gpu:8,shard:16", "features": "blk-1,rack-07,fast"})
    usable, warnings = gpu_nodes(config, [node])
    levels, infos = describe_nodes(config, usable, None)
    assert warnings == []
    assert levels == ("block", "rack")
    assert (infos[0].gpu_model, infos[0].gpus, infos[0].shareable) == ("A100-80GB", 8, True)
    assert infos[0].domains == {"block": "1", "rack": "07"}


def test_gpus_without_a_name_and_mixed_nodes_are_left_out_with_a_warning() -> None:
    nodes = [
        read_node({"name": "a", "state": "idle", "gres": "gpu:8"}),
        read_node({"name": "b", "state": "idle", "gres": "gpu:h100:4,gpu:a100:4"}),
        read_node({"name": "c", "state": "idle", "gres": ""}),
    ]
    usable, warnings = gpu_nodes(PLAIN, nodes)
    assert usable == []
    assert len(warnings) == 2
    assert "=MODEL" in warnings[0]
    assert "several models" in warnings[1]


# which of several jobs it is


def _job(number: int, *states: str, started: int = 0, status: int = 0) -> SlurmJob:
    instant = datetime.fromtimestamp(started, UTC) if started else None
    return SlurmJob(number, states, "ada", started=instant, exit_status=status)


def test_of_two_jobs_of_an_attempt_the_one_that_ran_first_is_it() -> None:
    assert choose([_job(2, "RUNNING", started=50), _job(1, "PENDING")]).id == 2
    assert choose([_job(1, "RUNNING", started=50), _job(2, "RUNNING", started=60)]).id == 1
    assert choose([_job(1, "FAILED", started=40, status=76), _job(2, "RUNNING", started=60)]).id == 2
    assert choose([_job(1, "CANCELLED"), _job(2, "PENDING")]).id == 2
    assert choose([_job(1, "PENDING"), _job(2, "PENDING")]).id == 1


@pytest.mark.parametrize(
    ("job", "state", "cause", "code"),
    [
        (_job(1, "COMPLETED", started=1), RunState.SUCCEEDED, Cause.NONE, 0),
        (_job(1, "FAILED", started=1, status=2), RunState.FAILED, Cause.USER, 2),
        (_job(1, "OUT_OF_MEMORY", started=1, status=137), RunState.FAILED, Cause.OUT_OF_MEMORY, 137),
        (_job(1, "FAILED", started=1, status=76), RunState.NODE_FAILED, Cause.NODE, 76),
        (_job(1, "FAILED", started=1, status=73), RunState.NODE_FAILED, Cause.NODE, 73),
        (_job(1, "FAILED", started=1, status=77), RunState.FAILED, Cause.REJECTED, 77),
        (_job(1, "CANCELLED"), RunState.CANCELLED, Cause.NONE, None),
    ],
)
def test_what_a_report_says(job: SlurmJob, state: RunState, cause: Cause, code: int | None) -> None:
    found = run_report(uuid4(), job)
    assert (found.state, found.cause, found.exit_code) == (state, cause, code)


# what is submitted


def _submission(config: SlurmConfig = PLAIN, **changes: object) -> Submission:
    return build_submission(config, start_command(**changes), lambda _: 4)  # type: ignore[arg-type]


def test_nodes_with_the_same_number_of_workers_go_together() -> None:
    slots = [WorkerSlot(node, ()) for node in ("a", "b", "b", "c", "d", "d")]
    groups = _submission(slots=tuple(slots)).groups
    assert [(group.nodes, group.workers_per_node, group.gres) for group in groups] == [
        (("b", "d"), 2, "gpu:h100:4"),
        (("a", "c"), 1, "gpu:h100:2"),
    ]


def test_walltimes_become_whole_minutes_rounded_up() -> None:
    assert [_submission(walltime=timedelta(seconds=s)).time_limit for s in (1, 60, 61, 3600)] == [1, 1, 2, 60]
    assert _submission(walltime=None).time_limit is None


@pytest.mark.parametrize(("share", "gres"), [(0.25, "shard:1"), (0.5, "shard:2"), (0.75, "shard:3")])
def test_a_share_becomes_shards(share: float, gres: str) -> None:
    assert _submission(slots=(WorkerSlot("n0", (0,), share),), gpus_per_worker=0).groups[0].gres == gres


def test_a_share_that_slurm_cannot_give_is_rejected() -> None:
    with pytest.raises(Rejected, match="multiple of 1/4"):
        _submission(slots=(WorkerSlot("n0", (0,), 0.3),), gpus_per_worker=0)
    with pytest.raises(Rejected, match="does not divide"):
        build_submission(PLAIN, start_command(slots=(WorkerSlot("n0", (0,), 0.5),), gpus_per_worker=0), lambda _: 0)


def test_cpus_and_memory_follow_the_gpus() -> None:
    found = _submission(SlurmConfig("commands", "/o", cpus_per_gpu=6, memory_per_gpu=1000), gpus_per_worker=2)
    assert (found.cpus_per_worker, found.memory_per_worker) == (12, 2000)


def test_every_script_is_valid_bash(tmp_path: Path) -> None:
    slots = (WorkerSlot("a", ()), WorkerSlot("b", ()), WorkerSlot("b", ()))
    for containers in ("pyxis", "apptainer"):
        config = parse(
            {"output_directory": str(tmp_path), "containers": containers, "checkpoint_directory": "/c"}, None
        )
        command = start_command(
            "echo 'a' \"b\" $(c) `d` \\ \n e", image="img; rm -rf /", slots=slots, working_directory="/x y"
        )
        script = batch_script(config, command, build_submission(config, command, lambda _: 0).groups)
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
        assert "--het-group=1" in script


# dialects of slurmrestd


def _openapi(*versions: int, fields: Sequence[str] = ()) -> dict[str, object]:
    return {
        "paths": {f"/slurm/v0.0.{number}/job/submit": {} for number in versions},
        "components": {
            "schemas": {
                f"v0.0.{number}_job_desc_msg": {"properties": {field: {} for field in fields}} for number in versions
            }
        },
    }


FIELDS_40 = [
    "name",
    "comment",
    "current_working_directory",
    "standard_output",
    "requeue",
    "open_mode",
    "environment",
    "required_nodes",
    "minimum_nodes",
    "maximum_nodes",
    "tasks",
    "tasks_per_node",
    "tres_per_node",
    "time_limit",
    "kill_warning_signal",
    "kill_warning_delay",
    "partition",
    "qos",
    "reservation",
    "account",
    "cpus_per_task",
    "memory_per_node",
]


def test_the_newest_version_that_can_name_nodes_is_spoken() -> None:
    dialect = choose_dialect(_openapi(38, 39, 40, fields=FIELDS_40))
    assert (dialect.version, dialect.needs_nodes) == ("v0.0.40", False)
    body = dialect.submission(
        _submission(slots=(WorkerSlot("n1", ()), WorkerSlot("n2", ())), grace=timedelta(seconds=30)), []
    )
    job = body["job"]
    assert job["required_nodes"] == ["n1", "n2"]
    assert job["minimum_nodes"] == job["maximum_nodes"] == 2
    assert job["tres_per_node"] == "gres/gpu:h100:2"
    assert job["time_limit"] == {"set": True, "infinite": False, "number": 5}
    assert (job["kill_warning_signal"], job["kill_warning_delay"]["number"]) == ("TERM", 30)
    assert job["requeue"] is False
    assert job["environment"][0].startswith("PATH=")


def test_a_daemon_that_cannot_pin_is_refused_with_the_reason() -> None:
    with pytest.raises(Rejected, match=r"v0\.0\.36, v0\.0\.37; v0\.0\.38 or later"):
        choose_dialect(_openapi(36, 37))
    with pytest.raises(Rejected, match="no required_nodes"):
        choose_dialect(_openapi(41, fields=["name"]))


def test_a_daemon_that_lacks_a_field_refuses_the_job_rather_than_dropping_it() -> None:
    dialect = choose_dialect(_openapi(40, fields=[name for name in FIELDS_40 if name != "tres_per_node"]))
    with pytest.raises(Rejected, match="tres_per_node"):
        dialect.submission(_submission(), [])


def test_v38_pins_by_features_and_refuses_nodes_without_one() -> None:
    dialect = choose_dialect(_openapi(38))
    nodes = [read_node({"name": f"n{i}", "state": "idle", "features": f"h100,n{i}"}) for i in range(3)]
    plain = [read_node({"name": f"p{i}", "state": "idle", "features": "h100"}) for i in range(2)]
    dialect.check(nodes, nodes)
    with pytest.raises(Rejected, match="2 nodes have no feature of their own"):
        dialect.check([*nodes, *plain], [*nodes, *plain])
    body = dialect.submission(_submission(slots=(WorkerSlot("n0", ()), WorkerSlot("n2", ()))), nodes)
    assert body["job"]["constraints"] == "[n0*1&n2*1]"
    assert body["job"]["nodes"] == [2, 2]


# errors


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            Unreachable,
        ),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", Unreachable),
        ("Zero Bytes were transmitted or received", Unreachable),
        ("Protocol authentication error", Unreachable),
        ("", Unreachable),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", Rejected),
        ("sbatch: error: invalid partition specified: x", Rejected),
        ("Invalid account or account/partition combination specified", Rejected),
    ],
)
def test_which_refusals_are_final(said: str, kind: type[Exception]) -> None:
    assert type(classify(said)) is kind


class _Scripted:
    def __init__(self, *results: Result) -> None:
        self.results = list(results)
        self.calls: list[tuple[list[str], str]] = []

    def run(self, argv: Sequence[str], *, account: str = "", stdin: bytes = b"") -> Result:
        self.calls.append((list(argv), account))
        return self.results.pop(0)


def test_output_that_is_no_json_means_unreachable() -> None:
    for out in (b"", b"<html>", b"[]", b'{"errors": ["down"], "jobs": []}'):
        with pytest.raises(Unreachable):
            CommandTransport(_Scripted(Result(0, out, ""))).jobs()


def test_options_are_single_words_whatever_they_hold() -> None:
    runner = _Scripted(Result(0, b"77;cluster\n", ""))
    job = _submission(job_name="--uid=0; rm -rf / \n x")
    assert CommandTransport(runner).submit(job) == 77
    argv, account = runner.calls[0]
    assert "--job-name=--uid=0; rm -rf / x" in argv
    assert account == "gpu-ada"


def test_ssh_quotes_every_word_and_checks_the_host_key(tmp_path: Path) -> None:
    fake = tmp_path / "ssh"
    # What sshd does with the words: hands them to a shell.
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@" >"$(dirname "$0")/args"\nexec /bin/sh -c "${@: -1}"\n')
    fake.chmod(0o755)
    config = SlurmConfig("commands", "/o", run_as="self", ssh_host="login1", ssh_user="portal", slurm_conf="/etc/a b")
    runner = SSHRunner(config, program=str(fake))
    result = runner.run(["printf", "%s|", "a b", "$HOME; id", "it's"])
    assert result.out == b"a b|$HOME; id|it's|"
    words = (tmp_path / "args").read_text().splitlines()
    assert "StrictHostKeyChecking=yes" in words
    assert "BatchMode=yes" in words
    assert "portal@login1" in words
    assert runner.run(["printenv", "SLURM_CONF"]).out == b"/etc/a b\n"
    assert runner.run(["cat"], stdin=b"script").out == b"script"


def test_no_ssh_connection_is_unreachable(tmp_path: Path) -> None:
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\necho 'Connection refused' >&2\nexit 255\n")
    fake.chmod(0o755)
    with pytest.raises(Unreachable, match="Connection refused"):
        SSHRunner(SlurmConfig("commands", "/o", ssh_host="x"), program=str(fake)).run(["squeue"])


def test_missing_commands_are_unreachable_and_named() -> None:
    backend = from_config(
        {"output_directory": "/o", "run_as": "self", "bin_directory": "/nowhere", "slurm_conf": "/none"}
    )
    with pytest.raises(Unreachable):
        backend.observe("", [])
