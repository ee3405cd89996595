"""Metrics: what a number is called and means, histograms of constant size, and the HTTP server that shows them.

Owns no number. Each role defines its own beside the code that reads them: ``ps_server.coordinator.metrics``,
``ps_server.shard.metrics`` and ``ps_worker.session.metrics``; ``common`` has those of every process. Only
``exposition`` and ``server`` import prometheus_client.
"""
