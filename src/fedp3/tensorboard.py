"""Rounds as TensorBoard scalars: an optional sink, the run folder stays the record."""

from collections.abc import Callable
from pathlib import Path

from fedp3.errors import InputError
from fedp3.server import RoundRecord


def writer(folder: Path) -> Callable[[RoundRecord], None]:
    """A function that writes one round; raises before training where the extra is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("TensorBoard is not installed; add it with: pip install 'fedp3[tensorboard]'") from None
    sink = SummaryWriter(str(folder))

    def write(record: RoundRecord) -> None:
        scores = {kind: a for kind in ("G", "D", "P") if (a := getattr(record, kind)) is not None}
        scalars = {
            "train/loss": record.loss,
            "bytes/up": record.bytes_up,
            "bytes/down": record.bytes_down,
            "clients/accepted": len(record.accepted),
            "clients/late": len(record.late),
            "clients/rejected": len(record.rejected),
            "time/seconds": record.seconds,
            **{f"accuracy/{kind}": a.mean for kind, a in scores.items()},
            **{f"accuracy/{kind} worst client": a.worst for kind, a in scores.items()},
        }
        for name, value in scalars.items():
            if value is not None:
                sink.add_scalar(name, value, record.t + 1)
        sink.flush()

    return write
