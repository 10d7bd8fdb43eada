"""A scenario on standard input, its result on standard output, in a process of its own with bounded time and memory.

Started by ``scheduling.services.whatif``; knows the engine only.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from scheduling.engine.scenario import ScenarioError, read_scenario
from scheduling.engine.scenario_result import check, result
from scheduling.engine.simulation import Livelock, Simulation


def main() -> None:
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        run = Simulation(read_scenario(sys.stdin.read(), "scenario"), timeline=False).run()
        answer: dict[str, Any] = {"result": result(run, check(run))}
    except (ScenarioError, Livelock) as error:
        answer = {"error": str(error)}
    except (MemoryError, RecursionError):
        answer = {"error": "The scenario needs more memory than is allowed here."}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
