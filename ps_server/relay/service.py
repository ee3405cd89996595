"""The gRPC face of a relay: the calls of readers to coordinator and shards. It refuses all others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import coordinator_pb2, shard_pb2
from ps_protocol.wire.convert.weights import FOLLOW_ANSWER, FOLLOW_ASK, STATE
from ps_server.coordinator.service import wait_seconds
from ps_server.relay.held import RelayedWeights
from ps_server.serving.grpc_server import Register
from ps_server.serving.rpc_errors import translated

Context = grpc.aio.ServicerContext[Any, Any]

_COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
_SHARD = shard_pb2.DESCRIPTOR.services_by_name["Shard"]

_KINDS: Mapping[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether the client streams, and whether the server does."""


class RelayService:
    """Called by gRPC on the relay's event loop."""

    def __init__(self, held: RelayedWeights) -> None:
        self._held = held

    @property
    def services(self) -> list[tuple[str, Register]]:
        """For ``grpc_server.start``."""
        return [(each.full_name, partial(self._register, each)) for each in (_COORDINATOR, _SHARD)]

    def _register(self, service: ServiceDescriptor, server: grpc.aio.Server) -> None:
        served: Mapping[str, tuple[Callable[[Any, Context], Awaitable[Any]], type[Any]]] = {
            "FollowWeights": (self.follow_weights, coordinator_pb2.FollowWeightsRequest),
            "GetWeights": (self.get_weights, coordinator_pb2.GetWeightsRequest),
            "GetPiece": (self.get_piece, shard_pb2.GetPieceRequest),
        }
        handlers = {}
        for method in service.methods:
            kind = _KINDS[method.client_streaming, method.server_streaming]
            if method.name in served:
                handler, request = served[method.name]
                to_bytes = None if method.server_streaming else methodcaller("SerializeToString")
                handlers[method.name] = kind(handler, request.FromString, to_bytes)
            else:
                handlers[method.name] = kind(_refuse)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    async def follow_weights(
        self, request: coordinator_pb2.FollowWeightsRequest, context: Context
    ) -> coordinator_pb2.FollowWeightsReply:
        """The newest version of a name that is here, after waiting for one that is newer than the reader's."""
        async with translated(context):
            wait = wait_seconds(request.wait_seconds, context)
            return FOLLOW_ANSWER.to_pb(await self._held.follow(FOLLOW_ASK.from_pb(request), wait))

    async def get_weights(
        self, request: coordinator_pb2.GetWeightsRequest, context: Context
    ) -> coordinator_pb2.GetWeightsReply:
        """What is here, and who reads it."""
        async with translated(context):
            return coordinator_pb2.GetWeightsReply(names=STATE.all_to_pb(self._held.states()))

    async def get_piece(self, request: shard_pb2.GetPieceRequest, context: Context) -> None:
        """A piece, as a shard sends it."""
        async with translated(context):
            await self._held.serve(request, context)


async def _refuse(_: object, context: Context) -> None:
    async with translated(context):
        raise InvalidRequest(
            "a relay of published weights answers readers alone",
            expected="ps_worker.subscribe, psctl weights list, follow or relay",
            remedy="give the address of the job's coordinator",
        )
