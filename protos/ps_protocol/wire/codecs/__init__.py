"""How payloads are made smaller: pure functions of tensors and bytes, the same on worker and shard; no I/O.

This package imports torch; the rest of ``ps_protocol`` does not import this package.
"""

from ps_protocol.wire.codecs.built_in import codec_of
from ps_protocol.wire.codecs.codec import Buffer, Codec
from ps_protocol.wire.codecs.feedback import ErrorFeedback, Reference
from ps_protocol.wire.codecs.payload import PayloadCodec, PayloadRun, payload_runs

__all__ = ["Buffer", "Codec", "ErrorFeedback", "PayloadCodec", "PayloadRun", "Reference", "codec_of", "payload_runs"]
