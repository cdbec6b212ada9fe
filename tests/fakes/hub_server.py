"""The Hugging Face hub as far as a snapshot needs it. Files are `org/name/file`; all have one revision, `main`."""

import json
from hashlib import sha1
from urllib.parse import urlsplit

from tests.fakes.http_files import FileHandler, FileServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(FileHandler):
    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._describe("/".join(parts[2:4]), *parts[4:])
        elif (
            len(parts) == 5
            and parts[2] == "resolve"
            and (name := f"{parts[0]}/{parts[1]}/{parts[4]}") in self.server.files
        ):
            body = self.server.files[name]
            self.send_file(name, {"ETag": f'"{_oid(body)}"', "X-Repo-Commit": COMMIT})
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET

    def _describe(self, model: str, kind: str = "", revision: str = "", *rest: str) -> None:
        files = {
            name.removeprefix(f"{model}/"): body
            for name, body in self.server.files.items()
            if name.startswith(f"{model}/")
        }
        if not files:
            self._missing("RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._missing("RevisionNotFound")
        elif kind == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(body), "oid": _oid(body)} for path, body in files.items()
            ]
            self.send_text(200, json.dumps(entries), "application/json")
        else:
            siblings = [{"rfilename": path} for path in files]
            self.send_text(200, json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}), "application/json")

    def _missing(self, code: str) -> None:
        self.send_text(404, "{}", "application/json", {"X-Error-Code": code, "X-Error-Message": "there is none"})


class HubServer(FileServer):
    handler = _Handler


def _oid(body: bytes) -> str:
    return sha1(body, usedforsecurity=False).hexdigest()
