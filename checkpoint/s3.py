"""Downloads models from S3 into a cache folder: `<cache>/s3/<bucket>-<name>-<digest of the listing>`.

A folder with that name is complete and never changes. Files are downloaded into `<folder>.partial`, each under a
temporary name until it is complete; when all files are complete, the folder is renamed. An interrupted download resumes
with the missing files. Only one process downloads a model; others wait for it. If objects in the bucket change, the
listing and so the folder's name change. Credentials, region and AWS_ENDPOINT_URL are read as by other AWS tools.
"""

import fnmatch
import threading
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from checkpoint.source import FILES, NAMED_TEMPLATES, NOT_FILES, Progress
from mesh.domain.errors import ConfigurationError, missing_extra

try:
    import boto3
    from boto3.exceptions import Boto3Error
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError
    from filelock import FileLock
    from s3transfer.exceptions import S3DownloadFailedError
except ImportError as error:
    raise missing_extra("models in S3 need boto3", "s3") from error

_FAULTS = (BotoCoreError, ClientError, Boto3Error, S3DownloadFailedError, OSError)
_PART_BYTES = 16 << 20
_NUM_PARTS_AT_ONCE = 16
_TEMPLATES = NAMED_TEMPLATES.rpartition("/")[0] + "/"


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    name: str  # in the model's folder, so a path if it is in a folder of it
    size: int
    etag: str


def download(uri: str, cache_dir: Path, on_progress: Progress) -> Path:
    """Download the model under `uri` if needed and return its folder. Raises ConfigurationError."""
    bucket, prefix = _parse(uri)
    try:
        with closing(_client()) as client:
            objects = _list(client, bucket, prefix)
            if not objects:
                raise ConfigurationError(f"{uri} holds no model files")
            folder = cache_dir / "s3" / _folder_name(client.meta.endpoint_url, bucket, prefix, objects)
            if folder.exists():  # also in a cache that is only to be read
                return folder
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    partial = folder.with_name(folder.name + ".partial")
                    _fill(partial, objects, client, bucket, _Meter(objects, on_progress))
                    if _list(client, bucket, prefix) != objects:
                        raise ConfigurationError(f"{uri} has changed while it was copied: start again")
                    partial.rename(folder)
    except _FAULTS as error:
        raise ConfigurationError(f"cannot get {uri}: {error}") from error
    return folder


def _parse(uri: str) -> tuple[str, str]:
    """Return the bucket, and the prefix with a trailing slash."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not bucket:
        raise ConfigurationError(f"{uri} names no bucket: want s3://bucket/prefix")
    return bucket, f"{prefix}/" if prefix else ""


def _client() -> Any:
    """Open a client. Endpoints outside AWS get path-style addresses, because few support buckets as host names."""
    client = boto3.client("s3", config=_config())
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    if host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        return client
    return boto3.client("s3", config=_config(s3={"addressing_style": "path"}))


def _config(**options: Any) -> Config:
    return Config(max_pool_connections=_NUM_PARTS_AT_ONCE, retries={"mode": "standard", "max_attempts": 5}, **options)


def _list(client: Any, bucket: str, prefix: str) -> list[_Object]:
    """List the checkpoint's files directly under the prefix and its named templates, sorted by name."""
    entries, folders = _list_folder(client, bucket, prefix)
    if prefix + _TEMPLATES in folders:
        entries += _list_folder(client, bucket, prefix + _TEMPLATES)[0]
    objects = [
        _Object(entry["Key"], entry["Key"].removeprefix(prefix), entry["Size"], entry["ETag"])
        for entry in entries
        if entry["Key"].startswith(prefix)
    ]
    return sorted((entry for entry in objects if _is_model_file(entry.name)), key=lambda entry: entry.key)


def _list_folder(client: Any, bucket: str, prefix: str) -> tuple[list[Any], set[str]]:
    """The objects directly under the prefix, and the prefixes of the folders there."""
    paginator = client.get_paginator("list_objects_v2")
    pages = list(paginator.paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"))
    entries = [entry for page in pages for entry in page.get("Contents", ())]
    return entries, {folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ())}


def _is_model_file(name: str) -> bool:
    if "/" in name:
        return name.count("/") == 1 and fnmatch.fnmatchcase(name, NAMED_TEMPLATES)
    return _matches(name, FILES) and not _matches(name, NOT_FILES)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _folder_name(endpoint: str, bucket: str, prefix: str, objects: Iterable[_Object]) -> str:
    digest = blake2b(repr((endpoint, bucket, prefix)).encode(), digest_size=8)
    for entry in objects:
        digest.update(repr((entry.key, entry.size, entry.etag)).encode())
    last = prefix.rstrip("/").rpartition("/")[2]
    return "-".join(filter(None, (bucket, last, digest.hexdigest())))


class _Meter:
    """Adds up downloaded bytes and reports the fraction. Called on the library's threads."""

    def __init__(self, objects: Iterable[_Object], on_progress: Progress) -> None:
        self._total = sum(entry.size for entry in objects)
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done = 0

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._on_progress(min(1.0, self._done / max(1, self._total)))


def _fill(partial: Path, objects: Iterable[_Object], client: Any, bucket: str, meter: _Meter) -> None:
    """Download the objects that are missing in the folder `partial`: a large one as several ranges in parallel. A file
    gets its name when it is complete.
    """
    config = TransferConfig(
        multipart_threshold=_PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        max_concurrency=_NUM_PARTS_AT_ONCE,
        use_threads=True,
    )
    partial.mkdir(exist_ok=True)
    paths = {partial / entry.name for entry in objects}
    for path in list(partial.rglob("*")):
        if path.is_file() and path not in paths:  # an incomplete file of a killed process
            path.unlink()
    for entry in objects:
        path = partial / entry.name
        if path.exists():
            meter.add(entry.size)
            continue
        path.parent.mkdir(exist_ok=True)
        client.download_file(bucket, entry.key, str(path), Callback=meter.add, Config=config)
        if path.stat().st_size != entry.size:
            path.unlink()
            raise OSError(f"{entry.key} has changed in the bucket meanwhile")
