"""A real S3 server in this process, moto's, and what may go wrong with one: it goes away, it throttles."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.request import Request, urlopen

import s3fs
from moto.moto_server import threaded_moto_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer

BUCKET = "bucket"
KEY = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY01"
"""The key of the tests' account, which must be in no file of a run."""


@dataclass
class S3Server:
    """An S3 server with one bucket, whose address and credentials are in the environment."""

    server: ThreadedMotoServer | None = None
    port: int = 0
    url: str = f"s3://{BUCKET}/runs"
    refusals: list[str] = field(default_factory=list)
    """What the next writes are refused with, such as SlowDown."""
    num_refused: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def files(self) -> dict[str, bytes]:
        """Return the contents of the bucket by name."""
        system = self.system()
        return {name.removeprefix(f"{BUCKET}/"): system.cat_file(name) for name in system.find(BUCKET)}

    def system(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(key=KEY, secret=SECRET, endpoint_url=self.endpoint, use_listings_cache=False)

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        """Start, or start again: moto keeps the objects in this process."""
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()
        _, self.port = self.server.get_host_and_port()

    def answer(self, application, environ, start_response):
        """Answer a request with moto's application, or refuse it."""
        if environ["REQUEST_METHOD"] not in {"PUT", "POST"} or not self.refusals:
            return application(environ, start_response)
        code = self.refusals.pop(0)
        self.num_refused += 1
        content = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(content))), ("Connection", "close")]
        start_response("503 Service Unavailable", headers)
        return [content]


@contextlib.contextmanager
def s3_server(environment: dict[str, str]) -> Iterator[S3Server]:
    """Run a server with an empty bucket; ``environment`` gets what leads to it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = S3Server()

    class Refusing(DomainDispatcherApplication):
        def __call__(self, environ, start_response):
            return running.answer(super().__call__, environ, start_response)

    threaded_moto_server.DomainDispatcherApplication = Refusing
    running.start()
    environment.update(
        AWS_ENDPOINT_URL=running.endpoint,
        AWS_ACCESS_KEY_ID=KEY,
        AWS_SECRET_ACCESS_KEY=SECRET,
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    s3fs.S3FileSystem.clear_instance_cache()
    urlopen(Request(f"{running.endpoint}/moto-api/reset", method="POST")).close()
    running.system().mkdir(BUCKET)
    try:
        yield running
    finally:
        running.stop()
        threaded_moto_server.DomainDispatcherApplication = DomainDispatcherApplication
        s3fs.S3FileSystem.clear_instance_cache()
