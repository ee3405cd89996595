"""A real coordinator in this process, on a loop of its own, and the client the product uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.launch.ports import free_port
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.engines.kept_request import KeptRequest
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.service import MAX_REQUEST_BYTES, SERVICE_NAME, CoordinatorService
from ps_server.coordinator.settings import ClusterSettings
from ps_server.limits import LimitCounts
from ps_server.serving import grpc_server
from tests.support.loops import LoopThread


class TestCoordinator:
    """May be stopped and started again on the same port, as an operator would, or cut off and found again.

    With ``data_dir`` it keeps a journal there, and goes on from it when it is started again.
    """

    __test__ = False

    def __init__(
        self, loop: LoopThread, settings: ClusterSettings, port: int = 0, data_dir: Path | None = None
    ) -> None:
        self._loop = loop
        self.settings = settings
        #: A port that servers and clients of other tests do not get meanwhile: it is stopped and started again.
        self.port = port or free_port()
        self.address = ""
        self.limit_counts = LimitCounts()
        #: Of the next start.
        self.kept_request = KeptRequest()
        self._data_dir = data_dir
        self._driver: Driver | None = None
        self._journal: Journal | None = None
        self._server: grpc_server.RunningServer | None = None

    def start(self, settings: ClusterSettings | None = None) -> None:
        self._loop.run(self._start(settings or self.settings))

    def stop(self) -> None:
        self.disconnect()
        if self._driver is not None:
            self._loop.run(self._driver.close())
            self._driver = None
        if self._journal is not None:
            self._loop.run(self._close_journal(self._journal))
            self._journal = None

    def disconnect(self) -> None:
        """Out of reach; the state lives on."""
        if self._server is not None:
            self._loop.run(self._server.stop(0))
            self._server = None

    def reconnect(self) -> None:
        self._loop.run(self._serve())

    async def _start(self, settings: ClusterSettings) -> None:
        if self._data_dir is not None:
            self._journal = Journal.open(self._data_dir)
        self._driver = Driver(settings, journal=self._journal)
        self._driver.start()
        await self._serve()

    async def _close_journal(self, journal: Journal) -> None:
        journal.close()

    async def _serve(self) -> None:
        assert self._driver is not None
        service = CoordinatorService(self._driver, limit_counts=self.limit_counts, kept_request=self.kept_request)
        self._server = await grpc_server.start(
            "127.0.0.1",
            self.port,
            [(SERVICE_NAME, service.register)],
            MAX_REQUEST_BYTES,
            limit_counts=self.limit_counts,
        )
        self.port, self.address = self._server.port, self._server.address


@contextmanager
def running_coordinator(
    settings: ClusterSettings | None = None, data_dir: Path | None = None
) -> Iterator[TestCoordinator]:
    """Serve a coordinator on a free port of 127.0.0.1."""
    with stopped_coordinator(settings, data_dir) as coordinator:
        coordinator.start()
        yield coordinator


@contextmanager
def stopped_coordinator(
    settings: ClusterSettings | None = None, data_dir: Path | None = None
) -> Iterator[TestCoordinator]:
    """A coordinator that the test starts itself."""
    with LoopThread() as loop:
        coordinator = TestCoordinator(loop, settings or ClusterSettings(), data_dir=data_dir)
        try:
            yield coordinator
        finally:
            coordinator.stop()


@contextmanager
def connected(settings: ClusterSettings | None = None) -> Iterator[CoordinatorClient]:
    """A client of a coordinator of its own."""
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        yield client
