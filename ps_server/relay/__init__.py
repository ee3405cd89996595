"""A relay of published weights: follows a job as a reader, and serves other readers from what it has received.

``held.py`` owns the versions that are here and answers for them, on the relay's event loop. ``following.py`` receives
them, in one thread for each name. ``service.py`` is the gRPC face, ``process.py`` the process.
"""
