"""The connection of a psctl command to a running job: its option, a client, and messages during long calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import click

from ps_protocol import times
from ps_protocol.client.admin import AdminClient
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.address import split_address
from ps_protocol.errors import ConfigError
from ps_protocol.security.expiry import ExpiryWatch
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.cli.options.common import clean_errors
from ps_server.cli.psctl.output import note

T = TypeVar("T")


def _address(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """The address given after the command, before it, or in the environment."""
    address = value or context.find_root().params.get("coordinator")
    if not address:
        raise click.UsageError(
            "the address of the coordinator is missing: give --coordinator HOST:PORT or set PS_COORDINATOR", context
        )
    try:
        split_address(str(address), setting="--coordinator or PS_COORDINATOR")
    except ConfigError as error:
        raise click.UsageError(str(error), context) from error
    return str(address)


coordinator_option = click.option(
    "--coordinator", metavar="HOST:PORT", callback=_address, help="Address of the job's coordinator."
)


@contextmanager
def client_of(address: str) -> Iterator[AdminClient]:
    """A client of the coordinator at ``address``, which need not serve yet. Shows an error of the block as one line."""
    settings = click.get_current_context().find_object(SecuritySettings) or SecuritySettings()
    with clean_errors():
        security = Security(settings, AccessRole.ADMIN)
        with AdminClient(CoordinatorClient(address, security)) as job:
            ExpiryWatch(security).ends()
            yield job


@contextmanager
def connected(address: str) -> Iterator[AdminClient]:
    """As ``client_of``; ends the command with an error when the coordinator does not answer within 5 s."""
    with client_of(address) as job:
        job.connect(times.CONNECT_SECONDS)
        yield job


def patiently(what: str, call: Callable[[], T]) -> T:
    """Return the result of ``call``, which may block for long, and print ``what`` to stderr every few seconds.

    The call runs in its own thread, so that Ctrl-C ends the command at once.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 -- raised again by result()
            result.set_exception(error)

    begin = time.monotonic()
    thread = threading.Thread(target=run, name="ps-call", daemon=True)
    thread.start()
    while True:
        thread.join(times.HINT_SECONDS)
        if not thread.is_alive():
            return result.result()
        note(f"{what} for {time.monotonic() - begin:.0f} s")
