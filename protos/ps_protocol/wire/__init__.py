"""Bytes between processes: messages and dataclasses into each other, chunks, wire formats, shared memory."""
