"""Gradients clipped by their norm: ClippedSteps make a model's steps, ClippedRounds settle those over several shards.

Entered for models with ``clip_grad_norm`` only. ClippedRounds own the round that is closed and the memory of its step;
the Tracker owns the norms.
"""
