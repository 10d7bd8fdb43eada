"""Every scenario file comes out as it says: the acceptance cases unchanged, and one per sentence of the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduling.engine.scenario import read_scenario
from scheduling.engine.scenario_result import check, result
from scheduling.engine.simulation import simulate

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}/{path.stem}" for path in FILES])
def test_a_scenario_comes_out_as_it_expects(path: Path) -> None:
    run = simulate(read_scenario(path.read_text(), path.name))
    assert [str(difference) for difference in check(run)] == []


def test_the_acceptance_cases_are_all_there() -> None:
    assert len(list((FOLDER / "acceptance").glob("*.yaml"))) == 20


def test_the_same_scenario_gives_the_same_result_twice() -> None:
    text = (FOLDER / "acceptance" / "06-interruptible-filler.yaml").read_text()
    first, second = (result(simulate(read_scenario(text))) for _ in range(2))
    first.pop("cycles")
    second.pop("cycles")
    assert first == second
    assert first["totals"]["evictions"] == 1
