"""What the coordinator remembers of the job for people: curves, checkpoints, alerts. Of fixed size for any job.

``JobRecorder`` owns all of it and runs on the coordinator's event loop; with a data directory it keeps it in a
``HistoryFile``. ``CurveBook`` and ``RateWindow`` do no I/O and read no clock.
"""
