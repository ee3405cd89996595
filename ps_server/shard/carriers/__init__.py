"""How the messages and payloads of a step stream travel: one interface, a carrier per transport."""
