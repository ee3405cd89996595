"""What programs that start servers share: ps-run, its program on hosts, Ray's actors, a script's own cluster.

``commands`` has the command line of a server. ``child`` owns its process, which ``shim`` lets die with the thread that
started it. ``life`` notices one that hangs. ``restarts`` decides whether and when one that ended is started again.
"""
