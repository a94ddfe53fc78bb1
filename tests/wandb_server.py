"""A small W&B server on this machine: it knows runs and their history, and refuses everything else."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Answers the client's requests; `history` holds the logged rows by run id."""

    def __init__(self, status: int = 200) -> None:
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.exit_codes: list[int] = []
        self.requests = 0
        self.status = status
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    @contextmanager
    def running(self) -> Iterator["Server"]:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        self.requests += 1
        if self.status != 200:
            return self.status, {"error": "refused"}
        if path == "/graphql":
            query = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", query["query"])[1]
            return 200, self._graphql(name, query.get("variables", {}))
        if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
            self._append(self.history[stream[1]], json.loads(body))
        return 200, {}

    def _graphql(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": "team"}}
        if name == "RunResumeStatus":
            known = given["name"] in self.history
            return {"data": {"model": {**project, "bucket": self._run(given["name"]) if known else None}}}
        if name == "UpsertBucket":
            self.history.setdefault(given["name"], [])
            bucket = {"id": "b", "name": given["name"], "displayName": given["displayName"], "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        return {"data": None, "errors": [{"message": f"{name} is not known here"}]}

    def _run(self, run: str) -> dict[str, Any]:
        rows = self.history[run]
        counts = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "historyLineCount": len(rows)}
        tail = json.dumps([json.dumps(row) for row in rows[-1:]])
        return {"name": run, **counts, "historyTail": tail, "summaryMetrics": "{}", "config": "{}", "tags": []}

    def _append(self, rows: list[dict[str, Any]], sent: dict[str, Any]) -> None:
        if history := sent.get("files", {}).get("wandb-history.jsonl"):
            rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        if sent.get("complete"):
            self.exit_codes.append(sent["exitcode"])


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, content = server.answer(self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        do_GET = do_PUT = do_POST

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler
