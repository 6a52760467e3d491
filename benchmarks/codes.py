"""Codes of changes: how short they are, and what they cost of a round's CPU time."""

from collections import Counter
from collections.abc import Callable, Mapping
from math import log2

import torch

from benchmarks import fleets
from benchmarks.ratio import Work, compare
from fedp3.client.update import local_update
from fedp3.core.types import ClientPlan, LayerPlan, Task
from fedp3.engines.in_process import sequential
from fedp3.experiment.experiment import Experiment
from fedp3.messages import tensor_code
from fedp3.messages.compression import UploadSettings
from fedp3.messages.compressors import COMPRESSORS, pack_tensor
from fedp3.server.rounds import run_round

CODES = ("int8", "int4", "ternary")
BOTH = "upload.compress={0} download.compress={0}"


def bits(pairs: int) -> str:
    """Bits per value of one client's change of W1, and the entropy of its symbols."""
    e = fleets.mlp(*fleets.DENSE)
    plan = ClientPlan(0, dict.fromkeys(e.server.layers.layers, LayerPlan()))
    task = Task(t=0, plan=plan, weights=e.start.W)
    update, _ = local_update(e.client, e.shards[0], task, None)
    parts = []
    for name in CODES:
        code, coding = COMPRESSORS.pick(name), UploadSettings(compress=name, entropy=True)
        assert code is not None
        written = values = entropy = 0.0
        for n, w in update.tensors.items():
            sent, scale = pack_tensor(w - e.start.W[n], None, code, 1.0, torch.Generator())
            written += 8 * len(tensor_code.encode(sent, scale, None, code, coding))
            counts = Counter(sent.flatten().tolist())
            total = sum(counts.values())
            entropy -= sum(k * log2(k / total) for k in counts.values())
            values += total
        parts.append(f"{name} {written / values:.2f} (entropy {entropy / values:.2f})")
    return ", ".join(parts) + " bits per value, scales included"


def _round_of(e: Experiment) -> Work:
    engine = sequential(e.client, e.shards)

    def work() -> None:
        run_round(e.server, e.start, engine.execute)

    return work


def cost(make: Callable[..., Experiment], pairs: int) -> str:
    """What codes in both directions add to a round's CPU time."""
    plain = _round_of(make(*fleets.DENSE))
    parts = []
    for name in CODES:
        for entropy in ("", "upload.entropy=true download.entropy=true"):
            settings = f"{BOTH.format(name)} {entropy}".split()
            ratio = compare(_round_of(make(*fleets.DENSE, *settings)), plain, pairs)
            low, high = (100 * (x - 1) for x in ratio[1:])
            with_entropy = " with entropy code" if entropy else ""
            middle = 100 * (ratio[0] - 1)
            parts.append(f"{name}{with_entropy} {middle:+.1f} % [{low:+.1f}, {high:+.1f}]")
    return "; ".join(parts)


ROWS: Mapping[str, Callable[[int], str]] = {
    "B1 bits of a change of W1": bits,
    "B2 W1 with codes in both directions": lambda n: cost(fleets.mlp, n),
    "B3 W2 with codes in both directions": lambda n: cost(fleets.cnn, n),
}
