"""How payloads are made smaller: pure functions of tensors and bytes, the same on worker and shard; no I/O.

This package imports torch; the rest of ``ps_protocol`` does not import this package.
"""

from ps_protocol.codecs.codec import Buffer, Codec
from ps_protocol.codecs.feedback import ErrorFeedback
from ps_protocol.codecs.payload import PayloadCodec
from ps_protocol.codecs.reference import Reference
from ps_protocol.codecs.registry import codec_of
from ps_protocol.codecs.runs import Run, payload_runs

__all__ = ["Buffer", "Codec", "ErrorFeedback", "PayloadCodec", "Reference", "Run", "codec_of", "payload_runs"]
