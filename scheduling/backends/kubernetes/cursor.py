"""Where ``observe`` goes on from: the time of the last full list and a resource version of each kind."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Cursor:
    listed: datetime
    jobs: str
    pods: str
    nodes: str

    def version(self, kind: str) -> str:
        return {"jobs": self.jobs, "pods": self.pods, "nodes": self.nodes}[kind]

    def text(self) -> str:
        return f"{int(self.listed.timestamp())} {self.jobs} {self.pods} {self.nodes}"

    @classmethod
    def read(cls, text: str) -> Cursor | None:
        """None for an empty or foreign text: then everything is listed."""
        parts = text.split(" ")
        if len(parts) != 4 or not parts[0].isdigit() or not all(parts):
            return None
        return cls(datetime.fromtimestamp(int(parts[0]), UTC), *parts[1:])
