"""The server's side of a round: gate, aggregation, evaluation, rounds (Algorithms 1 and 3)."""

# These modules fill the tables of aggregators, server optimizers and recycled layers.
from fedp3.server import aggregators, attention, optimizer, products, recycling

__all__ = ["aggregators", "attention", "optimizer", "products", "recycling"]
