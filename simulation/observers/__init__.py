"""Tells the judge what the shipped classes do, from outside: each observed method is wrapped for the time of a run.

``subjects`` knows which process is whose; ``shards``, ``workers`` and ``coordinator`` have the wrappers of one side
each, and ``watching`` puts them in place.
"""
