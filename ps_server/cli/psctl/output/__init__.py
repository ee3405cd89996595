"""How psctl writes: results on stdout as text or JSON, and notes on stderr, which are no part of a result."""
