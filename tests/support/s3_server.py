"""A server of S3 on loopback: moto's, which notes what is read from it."""

from __future__ import annotations

import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

__all__ = ["S3Server", "s3_server"]


class S3Server:
    """A server with one bucket.

    Attributes:
        environment: what a process needs to find it.
        reads: how often each path was read from it.
    """

    def __init__(self, endpoint: str) -> None:
        self.environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.reads = Counter[str]()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Run a server with the bucket `bucket`, which pyarrow finds by the environment."""
    pytest.importorskip("moto")
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from pyarrow.fs import FileSystem
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = DomainDispatcherApplication(create_backend_app)
    # Else it looks through the folders of its 200 services for each request.
    moto.get_backend_for_host = cache(moto.get_backend_for_host)

    def counted(environment: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        if environment["REQUEST_METHOD"] == "GET":
            server.reads[environment["PATH_INFO"]] += 1
        yield from moto(environment, start_response)

    http = make_server("127.0.0.1", 0, counted, threaded=True)
    endpoint = f"http://127.0.0.1:{http.server_port}"
    server = S3Server(endpoint)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    try:
        filesystem, _ = FileSystem.from_uri("s3://bucket?allow_bucket_creation=true")
        filesystem.create_dir("bucket")
        yield server
    finally:
        # It is the process's, and would be the next server's too.
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")).close()
        http.shutdown()
        thread.join()
        http.server_close()
