"""`iris trace view`: one trace and the page that draws it, served on loopback only."""

from __future__ import annotations

import http.server
import pathlib
import shutil
from typing import Any

import pydantic

from iris_core.documents import read_document

PAGE = pathlib.Path(__file__).with_name("viewer.html")
_HOSTS = ("127.0.0.1", "localhost")


class TraceServer(http.server.ThreadingHTTPServer):
    """Serves one file and the page.

    Args:
        trace: the file.
        port: 0 for any that is free.

    Raises:
        OSError: the port is taken.
        ValueError: the file cannot be read, or is not a trace.
    """

    daemon_threads = True

    def __init__(self, trace: pathlib.Path, port: int = 0) -> None:
        read_document(trace, pydantic.TypeAdapter(_Trace))  # an error here and now, not in the browser
        self.trace = trace
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/"


class _Trace(pydantic.BaseModel):
    traceEvents: list[Any]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: TraceServer

    def do_GET(self) -> None:
        """Send the page or the trace."""
        # A page of another site whose name leads here must not read the trace.
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            self.send_error(403, "this server is for 127.0.0.1")
            return
        kinds = {"/": (PAGE, "text/html; charset=utf-8"), "/trace.json": (self.server.trace, "application/json")}
        found = kinds.get(self.path.partition("?")[0])
        if found is None:
            self.send_error(404, "there are / and /trace.json")
            return
        path, kind = found
        try:
            file = path.open("rb")
        except OSError as error:
            self.send_error(500, f"{path.name} cannot be read: {error.strerror}")
            return
        with file:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""
