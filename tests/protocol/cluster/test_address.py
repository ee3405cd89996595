"""Addresses: what is wrong with one is said, each thing in its own words."""

import pytest

from ps_protocol.cluster.address import split_address
from ps_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("host:7000", ("host", 7000)),
        ("my_host-1.example.com:1", ("my_host-1.example.com", 1)),
        ("10.0.0.5:65535", ("10.0.0.5", 65535)),
        ("[::1]:7000", ("::1", 7000)),
        ("[fe80::1%eth0]:7000", ("fe80::1%eth0", 7000)),
    ],
)
def test_an_address_is_host_and_port(text, parts):
    assert split_address(text) == parts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("foo", "it has no port"),
        ("foo:", "its port is no number from 1 to 65535"),
        ("foo:99999", "its port is no number from 1 to 65535"),
        ("foo:0", "its port is no number from 1 to 65535"),
        ("foo:7000x", "its port is no number from 1 to 65535"),
        ("foo:٧", "its port is no number from 1 to 65535"),
        ("http://foo:7000", "it begins with a scheme; .*write 'foo:7000', without http://"),
        (":7000", "it has no host"),
        ("[]:7000", "its host is not valid"),
        ("::1:7000", "its host is not valid; .*in brackets, as \\[::1\\]:7000"),
        ("a b:7000", "its host is not valid"),
        ("a\x1b[2J:7000", "its host is not valid"),
    ],
)
def test_what_is_none_is_refused_with_what_is_wrong_and_where_it_was_given(text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        split_address(text, setting="PS_COORDINATOR")
    assert caught.value.remedy.endswith("in PS_COORDINATOR")
    assert caught.value.actual == repr(text)
