"""An HTTP server on this machine whose answers a test defines."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A request that the server received."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: Any


class Server:
    """Answers each POST with (status, body) from `answer(request, number)`; the body is sent as JSON or raw bytes."""

    def __init__(self, answer: Callable[[Request, int], tuple[int, Any]]) -> None:
        self.requests: list[Request] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                request = Request(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                with lock:
                    outer.requests.append(request)
                    number = len(outer.requests) - 1
                status, answered = answer(request, number)
                content = answered if isinstance(answered, bytes) else json.dumps(answered).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # the client has closed the connection

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serving(answer: Callable[[Request, int], tuple[int, Any]]) -> Iterator[Server]:
    """Runs a server during the block."""
    server = Server(answer)
    thread = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
