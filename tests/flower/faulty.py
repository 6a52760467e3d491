"""A Flower app that plays one scenario per round: what the server does is real, what clients do is arranged.

PLACE/scenario names the scenario of this round, PLACE/records.jsonl has a line for every round that closed.
"""

import json
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

from fedp3 import config, record
from fedp3.engines.flower import client
from fedp3.engines.flower.app import as_registered
from fedp3.engines.flower.grid import Roster, Wire, over
from fedp3.engines.flower.records import frame_of, put_frame
from fedp3.experiment import assemble
from fedp3.server import run_round

from flwr.app import Message, RecordDict  # isort: skip
from flwr.serverapp import ServerApp  # isort: skip

CONFIG = config.load(Path(__file__).with_name("config.toml"))
SLOW = 600.0
server = ServerApp()


@server.main()
def main(grid, context):
    given = context.run_config
    place, deadline = Path(given["place"]), float(given["deadline"])
    experiment = assemble(CONFIG)
    problem = replace(experiment.problem, quorum=2, rounds=1000, eval_every=0)  # nothing but training travels
    wire = Wire(problem.layers, problem.pruning, CONFIG.digest(), "f0" * 16, deadline)
    roster = Roster()
    roster.gather(grid, wire, experiment.shards, 240)
    assert as_registered(experiment, roster).problem == experiment.problem
    engine, state = over(grid, wire, roster), experiment.start
    for scenario in given["scenarios"].split():
        (place / "scenario").write_text(scenario)
        while scenario == "joins" and 2 not in roster.nodes:
            roster.refresh(grid, wire)
            time.sleep(1)
        state, done = run_round(problem, state, engine.execute)
        line = asdict(done) | {"scenario": scenario, "model": record.model_sha256(state.W)}
        with (place / "records.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def raises(*_):
    raise ValueError("this client cannot")


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def waits(*_):
    time.sleep(SLOW)


def lingers(*asked):
    time.sleep(late["seconds"])
    return honestly(*asked)


honestly, late = client.attempt, {"seconds": 0.0}
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
    client.attempt = act or honestly
    reply = honest._registered_funcs["train.default"](message, context)
    if act is None:
        return Message(put_frame(RecordDict(), frame_of(reply.content)[:-7]), reply_to=message)
    return reply


honest = client.client_app(client.configured(CONFIG))
app = client.client_app(client.configured(CONFIG))
app._registered_funcs["train.default"] = played
