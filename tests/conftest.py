"""Loaded before any test: the SDK first, for it tells gRPC about forks before gRPC is loaded."""

import ps_worker  # noqa: F401
