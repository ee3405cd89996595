"""What two processes of a torch-ps cluster must agree on: messages, errors, frames, models and their layout."""

PROTOCOL_VERSION = 8
"""Raised when an older process could misread a newer one. Join and Open refuse another version."""
