"""A real HTTP server on loopback that takes webhooks, or does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """``answers`` are used up one by one, the last one stays: a status code, "hang", "drip" or "redirect"."""

    url: str = ""
    answers: list[int | str] = field(default_factory=lambda: [200])
    body: bytes = b"thanks"
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def next_answer(self) -> int | str:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def receiver(*answers: int | str) -> Iterator[Receiver]:
    state = Receiver()
    if answers:
        state.answers = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            answer = state.next_answer()
            if answer == "hang":
                state.closing.wait(30)
                return
            if answer == "drip":
                for _ in range(300):
                    if state.closing.wait(0.1):
                        return
                    self.wfile.write(b"H")
                return
            if answer == "redirect":
                self.send_response(302)
                self.send_header("Location", state.url + "elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            assert isinstance(answer, int)
            self.send_response(answer)
            self.send_header("Content-Length", str(len(state.body)))
            self.end_headers()
            self.wfile.write(state.body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
