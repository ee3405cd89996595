"""The history of a job for people: curves, checkpoints, alerts. Its size is fixed for any job.

``JobRecorder`` owns the history and runs on the coordinator's event loop; with a data directory it writes a
``HistoryFile``. ``CurveBook`` and ``RateWindow`` do no I/O and read no clock.
"""
