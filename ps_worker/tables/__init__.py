"""Sparse tables in a model: modules whose rows live on the shards."""

from ps_worker.tables.modules import Embedding, EmbeddingBag, EmbeddingBags
from ps_worker.tables.table import Table

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBags", "Table"]
