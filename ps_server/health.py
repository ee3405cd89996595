"""The program ``python -m ps_server.health``: asks a server over gRPC whether it serves, for health checks."""

from __future__ import annotations

from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from ps_protocol.client.coordinator import connect_channel
from ps_protocol.client.errors import translate
from ps_protocol.errors import Unavailable
from ps_server.cli import clean_errors

TIMEOUT_SECONDS = 3.0


def check(address: str, service: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Return when the server at ``address`` says that ``service`` (empty: all of it) is serving.

    Raises Unavailable when it says otherwise, does not know the service, or does not answer within the time.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    with connect_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            call: Any = error
            if call.code() is grpc.StatusCode.NOT_FOUND:
                raise Unavailable(f"{address} has no service {service}") from error
            raise translate(error, address) from error
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        raise Unavailable(f"{address} is {status}")


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.argument("service", default="")
def main(address: str, service: str) -> None:
    """Ask the server at HOST:PORT whether it serves. SERVICE is a full protobuf name; without it the whole server.

    Exit code 0 when it does, 1 with the reason when it does not.
    """
    with clean_errors():
        check(address, service)


if __name__ == "__main__":
    main(prog_name="python -m ps_server.health")
