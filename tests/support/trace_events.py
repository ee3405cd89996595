"""Judges a trace file by the rules of Chrome's Trace Event format, as far as torch-ps uses it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

NUMBER = (int, float)


def read(path: Path) -> list[Event]:
    """The events of a file in one of the two forms: an array, or an object with ``traceEvents``."""
    document = json.loads(path.read_text(encoding="ascii"))
    events: list[Event] = document["traceEvents"] if isinstance(document, dict) else document
    return events


def check(events: list[Event]) -> None:
    """Assert what the format demands of every event, and that the spans of each thread nest."""
    assert events
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["ts"], NUMBER)
        match event["ph"]:
            case "X":
                assert isinstance(event["dur"], NUMBER)
                assert event["dur"] >= 0
                assert isinstance(event["args"], dict)
                assert isinstance(event["cat"], str)
            case "M":
                assert isinstance(event["args"], dict)
            case "s" | "f":
                assert isinstance(event["id"], str)
                assert isinstance(event["cat"], str)
                assert event["ph"] == "s" or event["bp"] == "e"
            case other:
                raise AssertionError(f"no phase {other!r} is used")
    check_nesting(events)
    check_flows(events)


def check_nesting(events: list[Event]) -> None:
    """Two spans of one thread are one inside the other, or apart. Times are written with three digits."""
    threads = defaultdict(list)
    for event in spans(events):
        threads[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    for found in threads.values():
        ends: list[int] = []
        for begin, length in sorted(found, key=lambda each: (each[0], -each[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or begin + length <= ends[-1]
            ends.append(begin + length)


def check_flows(events: list[Event]) -> None:
    """No message arrives before it was sent."""
    sent = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    arrived = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert all(sent[name] <= arrived[name] for name in sent.keys() & arrived.keys())


def spans(events: list[Event], name: str = "") -> list[Event]:
    return [event for event in events if event["ph"] == "X" and name in ("", event["name"])]


def nanoseconds(span: Event) -> tuple[int, int]:
    """Begin and end. Sums of floats would not be exact: microseconds since the machine started are large numbers."""
    begin = round(span["ts"] * 1000)
    return begin, begin + round(span["dur"] * 1000)


def parts_of(events: list[Event], span: Event) -> list[Event]:
    """The spans inside ``span``, by their beginnings."""
    begin, end = nanoseconds(span)
    inside = [
        each
        for each in spans(events)
        if each is not span
        and (each["pid"], each["tid"]) == (span["pid"], span["tid"])
        and begin <= nanoseconds(each)[0]
        and nanoseconds(each)[1] <= end
    ]
    return sorted(inside, key=lambda each: each["ts"])


def process_names(events: list[Event]) -> dict[int, str]:
    return {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
