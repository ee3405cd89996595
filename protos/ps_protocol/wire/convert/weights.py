"""Between published weights and their messages."""

from __future__ import annotations

from ps_protocol.cluster.weights import (
    FollowAnswer,
    FollowAsk,
    PublishAsk,
    WeightsPiece,
    WeightsPin,
    WeightsReader,
    WeightsState,
    WeightsVersion,
)
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.fields import Converter, Special

PUBLISH_ASK = Converter(PublishAsk, pb.PublishRequest)
VERSION = Converter(WeightsVersion, pb.WeightsVersion, pieces=Converter(WeightsPiece, pb.WeightsPiece))
FOLLOW_ASK = Converter(FollowAsk, pb.FollowWeightsRequest, printable)
FOLLOW_ANSWER = Converter(
    FollowAnswer, pb.FollowWeightsReply, version=VERSION, addresses=Special(lambda known: known, dict)
)
STATE = Converter(
    WeightsState,
    pb.WeightsState,
    printable,
    versions=VERSION,
    pins=Converter(WeightsPin, pb.WeightsPin, printable),
    readers=Converter(WeightsReader, pb.WeightsReader, printable),
)
