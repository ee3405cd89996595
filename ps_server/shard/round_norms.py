"""Answers other shards: what this one adds to the norm of a gradient that is clipped over all of them."""

from __future__ import annotations

from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency.messages import position_from_pb
from ps_server.shard.models.registry import Registry
from ps_server.shard.transport.grpc_stream import Context


async def get_round_norm(registry: Registry, request: pb.RoundNormRequest, _: Context) -> pb.RoundNormReply:
    """Raises InvalidRequest for a model that has no such norm, ModelMoved, UnknownModel, Unavailable."""
    model = await registry.model(request.model, request.epoch)
    if model.clipped is None:
        raise InvalidRequest(
            f"gradients of model '{model.name}' are not clipped over several shards",
            shard=str(registry.context.shard),
            expected="a model with clip_grad_norm that several shards hold",
        )
    return pb.RoundNormReply(squared_norm=await model.clipped.part(position_from_pb(request.position)))
