"""What ps-run writes: `Screen` owns the terminal or the JSON records, and the lines of every process go through it.

``lines`` and ``json_lines`` split what a process writes, ``progress`` asks the coordinator for the status line, and
``summary`` is the text at the end.
"""
