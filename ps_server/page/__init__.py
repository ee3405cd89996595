"""The page: a job at a glance in a browser, live or as one file. Needs the extra ``page``; nothing else imports it.

``PageServer`` in ``server`` owns the thread, the event loop and the listener; ``Broadcast`` polls the job's history and
owns the state that all viewers receive; ``app`` answers requests; ``PageAccess`` decides who may view. ``messages`` and
``report`` are pure. ``static`` and ``templates`` are what a browser loads: written by hand, without a build step, and
without a request to another host.
"""
