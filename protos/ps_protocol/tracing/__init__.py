"""Traces of steps: one tracer interface with two back ends, trace files and OpenTelemetry; trace files made one.

A ``Tracer`` belongs to one process and owns its output. A ``TraceSpan`` belongs to the code that began it.
"""
