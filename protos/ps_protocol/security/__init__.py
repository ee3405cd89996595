"""Who may do what, and how that is proven: TLS, tokens, roles and sessions.

``security.py``: ``Security``, which every listener and dialler of a process takes, owns the files and re-reads them
when they change. ``roles.py`` owns the table of methods and roles. Nothing here opens a connection.
"""
