"""The server's side of a round: gate, aggregation, evaluation, rounds (Algorithms 1 and 3)."""

# These modules fill the tables of aggregators and server optimizers.
from fedp3.server import aggregators, attention, optimizer

__all__ = ["aggregators", "attention", "optimizer"]
