"""Clicks of a stream whose ids and tastes change: events, model, results, and one process of plain torch."""
