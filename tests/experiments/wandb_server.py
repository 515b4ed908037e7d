"""As much of a Weights & Biases server as an upload needs: it answers, and remembers what it was sent.

With `silent=True` it takes a run's start and answers nothing after, as a network that dies would.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "schedlab", "entity": {"id": "e", "name": "someone"}}
RUN = {"id": "r", "name": "run", "displayName": "run", "config": "{}", "historyLineCount": 0, "project": PROJECT}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, silent: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.silent = silent
        self.closing = threading.Event()
        self.uploads: dict[str, bytes] = {}
        self.operations: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no news."""

    def upload_slot(self, name: str) -> dict[str, Any]:
        return {
            "id": name, "name": name, "displayName": name, "storagePath": name, "uploadHeaders": [],
            "uploadUrl": f"{self.url}/upload/{name}", "uploadMultipartUrls": None, "artifact": {"id": "a"},
        }  # fmt: skip

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": RUN, "inserted": True}}
        if operation == "CreateArtifact":
            sequence = {"id": "s", "latestArtifact": None}
            return {"createArtifact": {"artifact": {"id": "a", "state": "PENDING", "artifactSequence": sequence}}}
        if operation == "CreateArtifactManifest":
            manifest = {"id": "m", "file": self.upload_slot("manifest")}
            return {"createArtifactManifest": {"artifactManifest": manifest}}
        if operation == "CreateArtifactFiles":
            slots = [{"node": self.upload_slot(file["name"])} for file in variables["input"]["artifactFiles"]]
            return {"createArtifactFiles": {"files": {"edges": slots}}}
        if operation == "CommitArtifact":
            return {"commitArtifact": {"artifact": {"id": "a", "digest": "d"}}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/run/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply({})

    def do_PUT(self) -> None:
        self.server.uploads[self.path.removeprefix("/upload/")] = self.body()
        self.reply({})

    def do_POST(self) -> None:
        body = self.body()
        query = json.loads(body) if self.path == "/graphql" else {}
        operation = query.get("operationName") or ""
        self.server.operations.append(operation)
        if self.server.silent and operation != "UpsertBucket":
            self.server.closing.wait()
            return
        self.reply({"data": self.server.answer(operation, query.get("variables") or {})})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def reply(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def wandb_server(*, silent: bool = False) -> Iterator[Server]:
    server = Server(silent)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
