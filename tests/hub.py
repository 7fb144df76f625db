"""A stand-in for the hub on this machine: the endpoints that huggingface_hub's uploads call, files kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What was pushed, by repository."""

    def __init__(self, url: str):
        self.url = url
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuses: Callable[[str, bytes], int] = lambda path, body: 0
        """The status of requests that are refused, by path and body; 0 of the others."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if status := self.refuses(path, body):
            return status, {"error": "refused by the stand-in"}
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = "/".join(filter(None, [wanted.get("organization") or "someone", wanted["name"]]))
            self.files.setdefault(name, {})
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": name}
        if path == "/api/whoami-v2":
            return 200, {"name": "someone", "type": "user", "orgs": [], "auth": {}}
        if re.fullmatch(r"/api/models/[\w.-]+/[\w.-]+/auth-check/write", path):
            return 200, {}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.match(r"/large/(\w+)", path):
            self.large[match[1]] = body
            return 200, {}
        if match := re.match(r"/([\w./-]+)\.git/info/lfs/objects/batch", path):
            return 200, {"transfer": "basic", "objects": [self._upload(o) for o in json.loads(body)["objects"]]}
        if match := re.match(r"/api/models/([\w.-]+/[\w.-]+)/(\w+)", path):
            return self._of_repository(match[1], match[2], body)
        return 404, {"error": f"{method} {path} is nothing that this stand-in knows"}

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        known = wanted["oid"] in self.large
        actions = {} if known else {"actions": {"upload": {"href": f"{self.url}/large/{wanted['oid']}"}}}
        return {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True} | actions

    def _of_repository(self, name: str, what: str, body: bytes) -> tuple[int, Any]:
        if name not in self.files:
            return 404, {"error": "no such repository"}
        if what == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                self._commit(self.files[name], line["key"], line["value"])
            oid = hashlib.sha1(body).hexdigest()
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}
        siblings = [{"rfilename": path} for path in self.files[name]]
        return 200, {"id": name, "sha": "0" * 40, "siblings": siblings, "xetEnabled": False}

    def _commit(self, files: dict[str, bytes], key: str, value: dict[str, Any]) -> None:
        if key == "header":
            self.commits.append(value["summary"])
        elif key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.large[value["oid"]]


@contextmanager
def stand_in() -> Iterator[Hub]:
    """A hub at its `url`, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
            hub.tokens.add(self.headers.get("Authorization"))
            status, answer = hub.answer(self.command, self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _serve

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
