"""A Flower app that plays one scenario per round: a real server, and clients with arranged faults.

PLACE/scenario names the scenario of this round.  PLACE/records.jsonl has a line for every round.
"""

import json
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

from fedp3 import config
from fedp3.core import hashing
from fedp3.deploy.flower_app import as_registered
from fedp3.engines.flower import client_app
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.engines.flower.records import frame_of, put_frame
from fedp3.experiment.assemble import assemble
from fedp3.server.rounds import run_round

from flwr.app import Message, RecordDict  # isort: skip
from flwr.serverapp import ServerApp  # isort: skip

CONFIG = config.load(Path(__file__).with_name("config.toml"))
SLOW = 600.0
server = ServerApp()


@server.main()
def main(grid, context):
    keys = context.run_config
    place, deadline = Path(keys["place"]), float(keys["deadline"])
    experiment = assemble(CONFIG)
    run = replace(experiment.server.run, quorum=2, rounds=1000, eval_every=0)
    server_context = replace(experiment.server, run=run)  # nothing but training tasks are sent
    wire = Wire(
        spec=experiment.server.spec, digest=CONFIG.digest(), run="f0" * 16, deadline=deadline
    )
    roster = Roster()
    roster.gather(grid, wire, experiment.shards, 240)
    assert as_registered(experiment, roster).server == experiment.server
    engine, state = over(grid, wire, roster), experiment.start
    for scenario in keys["scenarios"].split():
        (place / "scenario").write_text(scenario)
        while scenario == "joins" and 2 not in roster.nodes:
            roster.refresh(grid, wire)
            time.sleep(1)
        state, done = run_round(server_context, state, engine.execute)
        line = asdict(done) | {"scenario": scenario, "model": hashing.model_sha256(state.W)}
        with (place / "records.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def raises(*_):
    raise ValueError("this client cannot")


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def waits(*_):
    time.sleep(SLOW)


def lingers(*arguments):
    time.sleep(late["seconds"])
    return honestly(*arguments)


honestly, late = client_app.attempt, {"seconds": 0.0}
# scenario -> client -> what it does instead of training
PLAY = {
    "raises": {1: raises},
    "all": {0: raises, 1: raises, 2: raises},
    "few": {0: raises, 1: raises},
    "dies": {1: dies},
    "slow": {1: lingers},
    "killed": {2: waits},
    "garbage": {1: None},
}


def played(message, context):
    place = Path(context.run_config["place"])
    scenario, i = (place / "scenario").read_text(), int(context.node_config["partition-id"])
    (place / f"{scenario}-{i}-began").touch()
    late["seconds"] = float(context.run_config["deadline"]) + 15
    act = PLAY.get(scenario, {}).get(i, honestly)
    client_app.attempt = act or honestly
    reply = honest._registered_funcs["train.default"](message, context)
    if act is None:
        return Message(put_frame(RecordDict(), frame_of(reply.content)[:-7]), reply_to=message)
    return reply


honest = client_app.client_app(client_app.configured_node(CONFIG))
app = client_app.client_app(client_app.configured_node(CONFIG))
app._registered_funcs["train.default"] = played
