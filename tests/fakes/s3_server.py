"""S3 as far as a download needs it: ListObjectsV2, and GET and HEAD of objects, with ranges. Keys are `bucket/key`."""

from hashlib import md5
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.fakes.http_files import FileHandler, FileServer


class _Handler(FileHandler):
    def do_GET(self) -> None:
        target = urlsplit(self.path)
        name = unquote(target.path).strip("/")
        query = parse_qs(target.query)
        if "list-type" in query:
            self._list(name, query.get("prefix", [""])[0])
        elif name in self.server.files:
            self.send_file(name, {"ETag": _etag(self.server.files[name])})
        else:
            self.send_text(404, "<Error><Code>NoSuchKey</Code></Error>", "application/xml")

    do_HEAD = do_GET

    def _list(self, bucket: str, prefix: str) -> None:
        if not any(name.startswith(f"{bucket}/") for name in self.server.files):
            error = "<Error><Code>NoSuchBucket</Code><Message>There is none</Message></Error>"
            self.send_text(404, error, "application/xml")
            return
        entries = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size><ETag>{escape(_etag(body))}</ETag></Contents>"
            for name, body in sorted(self.server.files.items())
            if (key := name.removeprefix(f"{bucket}/")).startswith(prefix) and "/" not in key.removeprefix(prefix)
        ]
        self.send_text(
            200,
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(entries)}</ListBucketResult>",
            "application/xml",
        )


class S3Server(FileServer):
    handler = _Handler


def _etag(body: bytes) -> str:
    return f'"{md5(body, usedforsecurity=False).hexdigest()}"'
