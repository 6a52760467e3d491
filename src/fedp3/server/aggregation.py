"""The aggregator of a run: its rule, products, damping, server optimizer, recycling, intervals.

They apply in this order.  Whether the model is an average of W over rounds changes none of them.
"""

from dataclasses import replace

from fedp3.client.context import RunSpec
from fedp3.server.aggregators import AGGREGATORS, AggregateSettings, Aggregator
from fedp3.server.damping import with_damping
from fedp3.server.intervals import with_intervals
from fedp3.server.optimizer import with_optimizer
from fedp3.server.products import with_products
from fedp3.server.recycling import with_recycling


def make_aggregator(settings: AggregateSettings, spec: RunSpec) -> Aggregator:
    """How the uploads of a run become its next model."""
    aggregator = AGGREGATORS.pick(settings.rule)(settings, spec)
    for wrap in (with_products, with_damping, with_optimizer, with_recycling, with_intervals):
        aggregator = wrap(aggregator, settings, spec)
    return replace(aggregator, average=settings.average)
