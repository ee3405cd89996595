"""Arguments of optimizers by chance, as their messages: right ones, and those that no process of ours sends."""

from __future__ import annotations

from hypothesis import strategies as st

from ps_protocol.model.spec import Option
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.convert.options import option_to_pb

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
#: What an option may be.
VALUES: st.SearchStrategy[Option] = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["lr", "momentum", "dampening", "nesterov", "betas", "eps", "foreach", "max_norm", "other", ""])
_LIKELY: list[Option] = [[0.9, 0.99], [0.9, None], [2, 2], 1e308, float("nan"), 0, -1, True, None, "fast"]


def deep(levels: int) -> pb.OptionValue:
    """A list in a list in a list …"""
    value = pb.OptionValue(number=1.0)
    for _ in range(levels):
        value = pb.OptionValue(list=pb.OptionValues(values=[value]))
    return value


_MESSAGES = (
    (VALUES | st.sampled_from(_LIKELY)).map(option_to_pb)
    | st.just(pb.OptionValue())
    | st.just(deep(40))
    | st.just(pb.OptionValue(list=pb.OptionValues(values=[pb.OptionValue()])))
)
OPTIONS = st.lists(st.builds(pb.Option, name=NAMES, value=_MESSAGES), max_size=3).map(
    lambda options: pb.Options(options=options)
)
