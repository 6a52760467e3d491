"""Write complete apps for `flwr run`."""

from collections.abc import Mapping
from pathlib import Path

from fedp3 import config as configs
from fedp3.config import Config
from fedp3.core.errors import InputError
from fedp3.deploy.flower_app import check_deployable

PACKAGE = "fedp3_app"


def write_app(folder: Path, config: Config, out: Path, data_dir: Path | None) -> Path:
    """Write a complete app for `flwr run`.

    Args:
        folder: the app's folder, which must be empty or not exist.
        config: the run.
        out: the run folder, on the machine of the SuperLink.
        data_dir: the folder of data sets; None uses the default ones of each machine.
    """
    check_deployable(config)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another folder for the app")
    project = _PROJECT.format(
        package=PACKAGE,
        out=str(out.absolute()),
        data_dir=str(data_dir.absolute()) if data_dir else "",
    )
    files = {
        "pyproject.toml": project,
        "README.md": _README.format(folder=folder.name),
        f"{PACKAGE}/__init__.py": _INIT,
        f"{PACKAGE}/server.py": _SERVER,
        f"{PACKAGE}/client.py": _CLIENT,
        f"{PACKAGE}/config.toml": configs.to_toml(config),
    }
    _write(folder, files)
    return folder


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        (folder / PACKAGE).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise InputError(f"cannot write the app to {folder}: {error.strerror or error}") from None


_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedp3-app"
version = "1.0.0"
description = "A FedP3 run on Flower"
license = "Apache-2.0"
dependencies = ["fedp3[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fedp3"

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

[tool.flwr.app.config]
# the run folder, on the machine of the SuperLink
out = "{out}"
# continue the run in `out`
resume = false
# seconds to wait for all nodes before the first round
wait = 60.0
# where the data set is; data-dir in a node's --node-config has precedence
data-dir = "{data_dir}"
# files that register your own parts, separated by spaces, on the machine of the SuperLink
use = ""
# a permit of a run owner (fedp3 permit sign), for nodes whose policy needs one
permit = ""
"""

_README = """\
# {folder}

A FedP3 run as a Flower app; `fedp3_app/config.toml` describes the run.

    flwr run . --stream                                     # over the nodes of your SuperLink
    flwr run . --stream --run-config 'resume=true'          # continue after a crash

Every node needs the number of its client: `flower-supernode ... --node-config "partition-id=0"`.
"""

_INIT = '''"""A FedP3 run as a Flower app."""
'''

_SERVER = '''"""The server: the run that config.toml describes."""

from pathlib import Path

from fedp3.deploy.flower_app import server_app

app = server_app(Path(__file__).with_name("config.toml"))
'''

_CLIENT = '''"""A node: one client of the run that config.toml describes."""

from pathlib import Path

from fedp3.engines.flower.client_app import client_app, configured_file

app = client_app(configured_file(Path(__file__).with_name("config.toml")))
'''
