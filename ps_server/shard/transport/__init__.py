"""How messages and payloads of a step stream are sent: one interface, an implementation per transport."""
