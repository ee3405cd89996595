import pytest

from ps_protocol.tracing.context import TraceContext, parse_traceparent


def test_a_context_comes_back_from_its_text() -> None:
    context = TraceContext("0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7")
    assert context.traceparent == "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
    assert parse_traceparent(context.traceparent) == context
    unsampled = TraceContext(context.trace, context.span, sampled=False)
    assert parse_traceparent(unsampled.traceparent) == unsampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7",
        "01-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01",
        "00-0AF7651916CD43DD8448EB211C80319C-00F067AA0BA902B7-01",
        "00-" + 32 * "0" + "-00f067aa0ba902b7-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + 16 * "0" + "-01",
        "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01\n",
        "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01-more",
        '00-0af7651916cd43dd8448eb211c80319"-00f067aa0ba902b7-01',
    ],
)
def test_what_is_no_context_counts_as_none(text: str) -> None:
    assert parse_traceparent(text) is None
