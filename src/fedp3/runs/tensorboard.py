"""Rounds as TensorBoard scalars, in addition to the record in the run folder."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from fedp3.core.errors import InputError
from fedp3.server.context import RoundRecord


def check_installed() -> None:
    """Raise an error if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            "TensorBoard is not installed; add it with: pip install 'fedp3[tensorboard]'"
        )


def writer(folder: Path) -> Callable[[RoundRecord], None]:
    """A function that writes one round; raises if TensorBoard is not installed."""
    check_installed()
    from torch.utils.tensorboard import SummaryWriter

    sink = SummaryWriter(str(folder))

    def write(record: RoundRecord) -> None:
        kinds = {"G": record.G, "D": record.D, "P": record.P}
        scores = {kind: s for kind, s in kinds.items() if s is not None}
        scalars = {
            "train/loss": record.loss,
            "bytes/up": record.bytes_up,
            "bytes/down": record.bytes_down,
            "clients/accepted": len(record.accepted),
            "clients/late": len(record.late),
            "clients/rejected": len(record.rejected),
            "time/seconds": record.seconds,
            **{f"{s.score.name}/{kind}": s.mean for kind, s in scores.items()},
            **{f"{s.score.name}/{kind} worst client": s.worst for kind, s in scores.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                sink.add_scalar(name, value, record.t + 1)
        sink.flush()

    return write
