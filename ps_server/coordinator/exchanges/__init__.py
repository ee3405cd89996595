"""Small collectives of workers. ``Exchanges`` owns those that are open and the results of those that are complete."""
