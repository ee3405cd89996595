"""TLS and tokens of a process: ``connect(security=SecuritySettings(tls_ca=...))`` in place of the environment.

``SecuritySettings`` names files; it never holds their contents, except for one token. The pages on security say what
each role may do.
"""

from ps_protocol.security.settings import BulkSecurity, SecuritySettings

__all__ = ["BulkSecurity", "SecuritySettings"]
