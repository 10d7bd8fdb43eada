"""A scenario file that cannot be used says where, which key, and what is allowed."""

from __future__ import annotations

import pytest

from scheduling.engine.scenario import ScenarioError, read_scenario

GOOD = """scenario: x
clusters: {main: {nodes: [{name: "a[1-2]", pool: a100, gpus: 8}]}}
teams: {vision: {quota: {a100: {guaranteed: 8}}}}
jobs:
  - {name: j, team: vision, gpus: 1, runs: 1h}
"""


def test_a_good_file_is_read() -> None:
    scenario = read_scenario(GOOD)
    assert [node.name for node in scenario.nodes] == ["a1", "a2"]
    assert scenario.jobs[0].runs == 3600


@pytest.mark.parametrize(
    ("wrong", "line", "says"),
    [
        (GOOD.replace("gpus: 1,", "gpu: 1,"), 5, "unknown key"),
        (GOOD.replace("runs: 1h", "runs: soon"), 5, "a duration is expected"),
        (GOOD.replace("team: vision", "team: nobody"), 5, "unknown team 'nobody'"),
        (GOOD.replace("guaranteed: 8", "guaranteed: 17"), 3, "add up to 17, more than the capacity of pool a100, 16"),
        (GOOD.replace("guaranteed: 8", "guaranteed: 8, limit: 4"), 3, "limit 4 is below the guaranteed 8"),
        (GOOD.replace("gpus: 8", "gpus: many"), 2, "a whole number is expected"),
        (GOOD.replace("gpus: 8", "gpus: 99"), 2, "out of range: from 1 to 62"),
        (GOOD + "tick: 0\n", 6, "out of range: at least 1"),
        (GOOD + "policy: {half_live: 7d}\n", 6, "unknown key; allowed are half_life"),
        (GOOD + "policy: {discipline: lottery}\n", 6, "not one of fair-share, fifo, shortest, private"),
        (GOOD + "events: [{at: 1h, node: b7, is: down}]\n", 6, "unknown node 'b7'"),
        (GOOD + "expect: [{at: 0, running: [k]}]\n", 6, "unknown job 'k'"),
        (GOOD + "expect: [{at: 0, waiting: {j: [bored]}}]\n", 6, "'bored' is not one of unsatisfiable"),
        (GOOD + "jobs: []\n", 6, "given twice"),
        ("scenario: [", 1, "not YAML"),
        ("", 1, "empty"),
        (GOOD.replace("name: j,", "name: j, after: [other],"), 5, "unknown job 'other'"),
        (GOOD.replace("gpus: 1,", "gpus: 1, share: 0.5,"), 5, "give either"),
        (GOOD.replace("gpus: 1,", "share: 1.5,"), 5, "out of range"),
        (
            GOOD.replace("- {name: j", "- {trace: {file: t.csv, format: philly}}\n  - {name: j"),
            5,
            "cannot be read here",
        ),
    ],
)
def test_an_error_names_line_and_what_is_allowed(wrong: str, line: int, says: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_scenario(wrong, "my.yaml")
    assert f"my.yaml:{line}:" in str(caught.value)
    assert says in str(caught.value)


def test_a_trace_becomes_jobs_of_the_scenario() -> None:
    text = GOOD.replace(
        "  - {name: j, team: vision, gpus: 1, runs: 1h}",
        "  - trace: {file: t.csv, format: csv, interruptible: all, checkpoint_every: 30m}",
    )
    csv = "submit,duration,gpus,team,name\n100,60,1,vision,a\n160,30,16,vision,b\n170,5,1,elsewhere,c\n"
    scenario = read_scenario(text, open_file=lambda name: csv)
    assert [(job.name, job.at, job.runs) for job in scenario.jobs] == [("a", 0, 60), ("b", 60, 30)]
    gang = scenario.jobs[1].request
    assert (gang.workers, gang.gpus, gang.interruptible, gang.checkpoint_every) == (2, 8, True, 1800)


def test_a_broken_trace_names_file_and_line() -> None:
    text = GOOD.replace("  - {name: j, team: vision, gpus: 1, runs: 1h}", "  - trace: {file: t.csv, format: csv}")
    with pytest.raises(ScenarioError, match=r"t\.csv line 3: duration: 'x' is not a number"):
        read_scenario(text, open_file=lambda name: "submit,duration,gpus\n1,2,1\n2,x,1\n")
