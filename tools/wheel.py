"""Is this wheel what we mean to publish?  `python tools/wheel.py dist/NAME.whl [options of pip]`.

It checks the contents: the package and nothing else.  Then it installs the wheel into an empty
environment and uses it in an empty folder, where nothing of the repository can help.
"""

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PROGRAM = """
import fedp3, torch
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
x = torch.randn(400, 4)
y = (x[:, 0] > 0).long()
print(fedp3.run(net, (x, y), partition={"kind": "iid"}, run={"rounds": 2}))
"""


def check_contents(wheel: Path) -> None:
    """The wheel holds every file of src/fedp3, its own description, and nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if name.startswith("fedp3/")}
    described = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    source = {
        f"{p.relative_to(ROOT / 'src')}" for p in (ROOT / "src" / "fedp3").rglob("*") if p.is_file()
    }
    source = {name for name in source if "__pycache__" not in name}
    for wrong, text in (
        (
            sorted(name for name in names - inside if not name.startswith(described)),
            "does not belong there",
        ),
        (
            sorted(
                name
                for name in names
                if any(p.startswith(("test_", "tests")) for p in Path(name).parts)
            ),
            "is a test",
        ),
        (sorted(inside - source), "is not in src/fedp3"),
        (sorted(source - inside), "is missing"),
        ([] if "fedp3/py.typed" in names else ["fedp3/py.typed"], "is missing"),
        (
            [] if any(name.endswith(".html") for name in inside) else ["the report's templates"],
            "is missing",
        ),
    ):
        if wrong:
            sys.exit(f"{wheel.name}: {text}: {', '.join(wrong)}")
    print(f"{wheel.name}: {len(inside)} files of the package, and nothing else")


def try_out(wheel: Path, pip_arguments: Sequence[str]) -> None:
    """Install the wheel into an empty environment; run commands, the demo and a small program."""
    with TemporaryDirectory(prefix="fedp3-wheel-") as temporary:
        place, empty = Path(temporary) / "env", Path(temporary) / "empty"
        empty.mkdir()
        venv.create(place, with_pip=True)
        python, fedp3 = str(place / "bin" / "python"), str(place / "bin" / "fedp3")
        ours = {"XDG_CACHE_HOME": str(Path(temporary) / "cache"), "OMP_NUM_THREADS": "1"}
        without = ("PYTHONPATH", "VIRTUAL_ENV", "FEDP3_DATA")
        environment = {
            name: value for name, value in os.environ.items() if name not in without
        } | ours

        def call(*command: str) -> bool:
            shown = " ".join("'...'" if "\n" in part else part for part in command).replace(
                f"{place}/", ""
            )
            print(f"$ {shown}", flush=True)
            done = subprocess.run(
                command, cwd=empty, env=environment, capture_output=True, text=True, check=False
            )
            lines = f"{done.stdout}{done.stderr if done.returncode else ''}".strip().splitlines()
            print(*lines[-20 if done.returncode else -3 :], sep="\n", flush=True)
            return done.returncode == 0

        constraints = ROOT / "constraints.txt"
        torch = next(
            line for line in constraints.read_text().splitlines() if line.startswith("torch==")
        )
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "-q",
            "-c",
            str(constraints),
        ]
        works = (
            call(*install, *pip_arguments, torch)
            and call(*install, *pip_arguments, str(wheel.absolute()))
            and call(python, "-m", "pip", "check")
            and (call(fedp3, "--version") or call(fedp3, "--help"))
            and call(fedp3, "demo", "--workers", "1")
            and call(python, "-c", PROGRAM)
        )
    if not works:
        sys.exit(f"{wheel.name}: the last command failed")
    print(f"{wheel.name}: works in an empty environment")


if __name__ == "__main__":
    check_contents(Path(sys.argv[1]))
    try_out(Path(sys.argv[1]), sys.argv[2:])
