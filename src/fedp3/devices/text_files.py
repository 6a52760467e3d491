"""Small text files of users: read with limits, and refused with all their mistakes at once."""

from collections.abc import Sequence
from pathlib import Path

from fedp3.core.errors import InputError

LARGEST = 100 * 2**20  # bytes of a file that is read
MOST_SHOWN = 50  # mistakes of a file that are listed


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file, or raise an `InputError`.

    Args:
        path: the file.
        what: the kind of file, for the error message, e.g. "fleet file".
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror or error}") from None
    if len(data) > LARGEST:
        raise InputError(f"{what} {path} is longer than {LARGEST:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {path} is not UTF-8 text: {error}") from None


def refuse(path: Path, wrong: Sequence[str]) -> None:
    """Raise an `InputError` with all mistakes of a file, if there are any."""
    if not wrong:
        return
    shown = [f"  {text}" for text in wrong[:MOST_SHOWN]]
    if len(wrong) > MOST_SHOWN:
        shown.append(f"  and {len(wrong) - MOST_SHOWN} more")
    count = "1 mistake" if len(wrong) == 1 else f"{len(wrong)} mistakes"
    raise InputError("\n".join([f"{path} has {count}:", *shown]))
