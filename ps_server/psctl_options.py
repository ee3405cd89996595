"""What every psctl command to a running job has: the option that says where it is, a connection, an eye on the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import click

from ps_protocol.address import split_address
from ps_protocol.client.coordinator import CONNECT_SECONDS, CoordinatorClient
from ps_protocol.errors import ConfigError
from ps_server.cli import clean_errors

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
"""How often a command that takes long says that it goes on."""


def _address(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """The option as given after the command, before it, or in the environment."""
    address = value or context.find_root().params.get("coordinator")
    if not address:
        raise click.UsageError("where is the coordinator? Give --coordinator HOST:PORT or set PS_COORDINATOR", context)
    try:
        split_address(str(address), setting="--coordinator or PS_COORDINATOR")
    except ConfigError as error:
        raise click.UsageError(str(error), context) from error
    return str(address)


coordinator_option = click.option(
    "--coordinator", metavar="HOST:PORT", callback=_address, help="Where the job's coordinator serves."
)


@contextmanager
def connected(address: str) -> Iterator[CoordinatorClient]:
    """A client of the coordinator there, which answers; errors of the block are shown as one line.

    One that does not answer within CONNECT_SECONDS ends the command, which says why.
    """
    with clean_errors(), CoordinatorClient(address) as client:
        client.connect(CONNECT_SECONDS)
        yield client


def patiently(what: str, call: Callable[[], T]) -> T:
    """The result of ``call``, which blocks for long; every few seconds it is said on stderr that ``what`` goes on.

    It runs in a thread of its own: Ctrl-C ends the command at once, wherever the call is.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 -- raised again by whoever waits
            result.set_exception(error)

    begin = time.monotonic()
    thread = threading.Thread(target=run, name="ps-call", daemon=True)
    thread.start()
    while True:
        thread.join(PATIENCE_SECONDS)
        if not thread.is_alive():
            return result.result()
        click.echo(f"{what} for {time.monotonic() - begin:.0f} s", err=True)
