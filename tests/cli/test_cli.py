"""The commands as a user types them: output, files, exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fedp3 import __version__, cli, config
from fedp3.cli.terminal import share
from fedp3.core import files
from fedp3.methods import METHODS
from fedp3.runs import run_folder
from fedp3.server.aggregators import AGGREGATORS

TINY = [
    "model.width=0.03",
    "partition.clients=6",
    "run.clients_per_round=3",
    "run.rounds=2",
    "local.steps=2",
]
ALONE = ["partition.clients=1", "run.clients_per_round=1"]


def every_command() -> list[str]:
    """All commands and groups of commands, as one types them after `fedp3`."""
    names = []

    def collect(group: Any, prefix: str) -> None:
        for name, command in group.commands.items():
            if not command.hidden:
                names.append(f"{prefix}{name}")
            if hasattr(command, "commands"):
                collect(command, f"{prefix}{name} ")

    collect(typer.main.get_command(cli.command_line(())), "")
    return names


def last(out: str) -> dict:
    return json.loads(out.strip().splitlines()[-1])


def test_all_commands_are_known_to_the_tests_below():
    assert len(every_command()) >= 21
    assert {"run", "data show", "privacy sigma", "flower key", "audit"} <= set(every_command())


@pytest.mark.parametrize("command", every_command())
def test_every_command_has_help_with_an_example(command, fedp3):
    code, out, _ = fedp3(*command.split(), "--help")
    assert code == 0
    assert f"Example: fedp3 {command}" in re.sub(r"\s+", " ", out)


def test_the_help_of_the_program_has_an_example(fedp3):
    code, out, _ = fedp3("--help")
    assert code == 0 and "Example: fedp3 demo" in out


def test_the_version_is_printed(fedp3):
    assert fedp3("--version") == (0, f"fedp3 {__version__}\n", "")


def test_help_explains_arguments_too(fedp3):
    assert "Config file" in fedp3("plan", "--help")[1]


def test_help_answers_without_importing_torch():
    code = "import sys; from fedp3 import cli; cli.main(['--help'])"
    probe = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.strip().endswith("False")


def test_init_plan_run_report_from_nothing(fedp3, tmp_path):
    assert fedp3("init", "my.toml")[0] == 0
    code, out, _ = fedp3("plan", "my.toml", *TINY)
    assert (
        code == 0
        and "what one round requires of each client" in out
        and "next: fedp3 run my.toml" in out
    )
    standing = ("reads the samples themselves", "how many samples of each label", "no formal")
    assert all(out.count(sentence) == 1 for sentence in standing)  # once per plan, and nowhere else
    code, out, err = fedp3("run", "my.toml", *TINY, "--out", "runs/a")
    assert code == 0 and not any(sentence in out + err for sentence in standing)
    assert "round 2/2" in err
    assert out.strip().splitlines()[-1] == "open runs/a/report.html"
    assert (tmp_path / "runs/a/report.html").exists()
    code, out, _ = fedp3("report", "runs/a", "--out", "page.html")
    assert code == 0 and "open page.html" in out and (tmp_path / "figures").is_dir()


def test_init_does_not_overwrite(fedp3):
    fedp3("init", "my.toml")
    code, _, err = fedp3("init", "my.toml")
    assert code == 2 and "--force" in err
    assert fedp3("init", "my.toml", "--force")[0] == 0


def test_run_json_is_one_object_on_the_last_line(fedp3):
    fedp3("init", "my.toml")
    code, out, _ = fedp3("run", "my.toml", *TINY, "--out", "runs/a", "--json")
    result = last(out)
    assert code == 0
    assert len(out.strip().splitlines()) == 1
    assert result["out"] == "runs/a" and result["rounds"] == 2 and result["epsilon_max"] is None
    assert re.fullmatch(r"[0-9a-f]{64}", result["model_sha256"])
    for key in (
        "accuracy_global",
        "accuracy_dispatched",
        "accuracy_personal",
        "accuracy_worst_client",
    ):
        assert 0 <= result[key] <= 1
    events = run_folder.read_events(Path("runs/a"))
    assert result["mb_up"] == pytest.approx(sum(e["bytes_up"] for e in events) / 1e6)
    assert result["mb_down"] == pytest.approx(sum(e["bytes_down"] for e in events) / 1e6)
    assert isinstance(result["rejected"], int) and result["seconds"] > 0


def test_local_pruning_shows_its_realised_density(fedp3):
    fedp3("init", "my.toml")
    code, out, _ = fedp3(
        "run", "my.toml", *TINY, "prune.local_pruner=ordered_dropout", "prune.q=0.5", "--out", "a"
    )
    assert code == 0 and re.search(
        r"local pruning retained \d+\.\d % of the pruned layers' weights", out
    )
    assert "local pruning" not in fedp3("run", "my.toml", *TINY, "--out", "b")[1]


def test_what_to_type_next_keeps_the_overrides(fedp3):
    fedp3("init", "my.toml")
    out = fedp3("plan", "my.toml", *TINY, "privacy.enabled=true", "prune.keep=[0.9, 0.5]")[1]
    assert "next: fedp3 run my.toml model.width=0.03" in out
    assert out.strip().endswith("privacy.enabled=true 'prune.keep=[0.9, 0.5]'")


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("fedp3", "the other layers are sent pruned, trained, not uploaded"),
        ("local", "every layer is never sent, trained, not uploaded"),
        ("fedper", "the other layers are never sent, trained, not uploaded"),
        ("heterofl", "the other layers are sent pruned, trained, uploaded where retained"),
    ],
)
def test_the_plan_shows_what_is_done_with_the_layers(method, text, fedp3):
    fedp3("init", "my.toml")
    assert text in fedp3("plan", "my.toml", *TINY, f"method={method}")[1]


def test_a_damaged_run_folder_is_named_not_traced(fedp3, tmp_path):
    fedp3("init", "my.toml")
    fedp3("run", "my.toml", *TINY, "--out", "a")
    (tmp_path / "a/result.json").unlink()
    with (tmp_path / "a/events.jsonl").open("a") as file:
        file.write('{"step": 1}\n')
    for command in ("report", "resume"):
        code, _, err = fedp3(command, "a")
        assert code == 2 and "line 3 is not a round" in err and "Traceback" not in err
    for damage in ("{", "[]", "{}"):
        (tmp_path / "a/run.json").write_text(damage)
        code, _, err = fedp3("resume", "a")
        assert code == 2 and "run.json" in err and "Traceback" not in err
    (tmp_path / "a/run.json").unlink()
    assert fedp3("resume", "a")[0] == 2


def test_progress_of_a_resumed_run_counts_what_was_before(fedp3, tmp_path):
    fedp3("init", "my.toml")
    first = fedp3("run", "my.toml", *TINY, "run.checkpoint_every=1", "--out", "a")[2].splitlines()
    (tmp_path / "a/result.json").unlink()
    for newest in sorted((tmp_path / "a/checkpoint").glob("00000002*")):
        newest.unlink()
    again = fedp3("resume", "a")[2].splitlines()
    shown = [
        next(l.partition("G ")[2].partition("  MB")[0] for l in lines if "round 2/2" in l)
        for lines in (first, again)
    ]
    assert shown[0] == shown[1] and "ok 6" in shown[0]


def test_compare_explains_what_an_epsilon_means(fedp3):
    fedp3("init", "my.toml")
    ldp = ["privacy.enabled=true", "privacy.randomness=seeded", "plan.others=freeze"]
    code, out, err = fedp3("run", "my.toml", *TINY, *ldp, "--out", "a")
    assert code == 0, err
    for text in (out, fedp3("compare", "a")[1], fedp3("compare", "a", "--markdown")[1]):
        assert "simulation only" in text and "accountant" in text and "delta" in text
    assert last(fedp3("compare", "a", "--json")[1])["runs"][0]["privacy"]["randomness"] == "seeded"


def test_without_out_runs_are_numbered(fedp3):
    fedp3("init", "my.toml")
    assert last(fedp3("run", "my.toml", *TINY, "--json")[1])["out"] == "runs/my-1"
    assert last(fedp3("run", "my.toml", *TINY, "--json")[1])["out"] == "runs/my-2"


def test_plan_json_holds_every_client_and_the_coverage(fedp3):
    fedp3("init", "my.toml")
    code, out, _ = fedp3("plan", "my.toml", *TINY, "prune.keep=[0.9, 0.5]", "--json")
    plan = last(out)
    assert code == 0
    assert [c["id"] for c in plan["clients"]] == list(range(6))
    for c in plan["clients"]:
        assert c["layers"][-1] == "ffc" and len(c["layers"]) == 3
        assert set(c["keep"]) == {"fc1", "fc2", "fc3", "ffc"} and c["keep"]["ffc"] == 1
        assert min(c["keep"].values()) in (0.9, 0.5)
        for key in ("parameters", "mflops_per_example", "peak_mb", "mb_down", "mb_up"):
            assert c[key] > 0
    assert {l: len(who) for l, who in plan["coverage"].items()} == {
        "fc1": 4,
        "fc2": 4,
        "fc3": 4,
        "ffc": 6,
    }


def test_plan_shows_the_rounds_of_a_schedule_and_their_mean(fedp3):
    fedp3("init", "my.toml")
    small = [*TINY, "method=fedpart", "run.clients_per_round=0", "run.rounds=9", "plan.warm=1"]
    code, out, _ = fedp3("plan", "my.toml", *small)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["1", "fc1", "fc2", "fc3", "ffc"] in [line[:5] for line in lines]
    assert ["4-5", "fc2"] in [line[:2] for line in lines]
    assert "repeats after 9 rounds" in out and "in some round: fc1 6, fc2 6, fc3 6, ffc 6" in out
    schedule = last(fedp3("plan", "my.toml", *small, "--json")[1])["schedule"]
    assert [(s["first"], s["last"]) for s in schedule] == [(1, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert schedule[2]["clients"] == {"fc2": 6}
    result = last(fedp3("run", "my.toml", *small, "--out", "a", "--json")[1])
    planned = 6 * sum(s["mb_up"] * (s["last"] - s["first"] + 1) for s in schedule)
    assert result["mb_up"] == pytest.approx(planned)


def test_the_plans_bytes_are_the_runs_bytes(fedp3):
    fedp3("init", "my.toml")
    everyone = [*TINY, "run.clients_per_round=0", "run.rounds=1"]
    plan = last(fedp3("plan", "my.toml", *everyone, "--json")[1])
    result = last(fedp3("run", "my.toml", *everyone, "--out", "a", "--json")[1])
    assert result["mb_up"] == pytest.approx(sum(c["mb_up"] for c in plan["clients"]))
    assert result["mb_down"] == pytest.approx(sum(c["mb_down"] for c in plan["clients"]))


def test_seeds_have_a_folder_each_and_resume_finishes_what_is_missing(fedp3, tmp_path):
    fedp3("init", "my.toml")
    code, out, _ = fedp3("run", "my.toml", *TINY, "--out", "s", "--seeds", "2", "--json")
    both = last(out)
    assert code == 0 and len(both["runs"]) == 2
    assert both["accuracy_global"] == pytest.approx(
        sum(r["accuracy_global"] for r in both["runs"]) / 2
    )
    assert both["runs"][0]["model_sha256"] != both["runs"][1]["model_sha256"]
    assert fedp3("run", "my.toml", *TINY, "--out", "s", "--seeds", "2")[0] == 2
    (tmp_path / "s/seed-1/result.json").unlink()
    again = last(fedp3("resume", "s", "--json")[1])
    assert [r["model_sha256"] for r in again["runs"]] == [r["model_sha256"] for r in both["runs"]]


def test_a_bad_config_leaves_nothing_behind_in_a_folder_that_was_there(fedp3, tmp_path):
    fedp3("init", "my.toml")
    (tmp_path / "s").mkdir()
    dark = [
        "plan.layers=prune-all",
        "plan.upload=retained",
        "prune.selector=ordered",
        "prune.keep=0.5",
    ]
    code, _, err = fedp3("run", "my.toml", *TINY, *dark, "--out", "s", "--seeds", "2")
    assert code == 2 and "retains the same units" in err and not list((tmp_path / "s").iterdir())
    assert fedp3("run", "my.toml", *TINY, "--out", "s", "--seeds", "2")[0] == 0


def test_sweep_and_compare(fedp3):
    fedp3("init", "my.toml")
    code, out, _ = fedp3(
        "sweep", "my.toml", *TINY, "--methods", "fedavg,fedp3", "--seeds", "2", "--out", "d"
    )
    assert code == 0 and "next: fedp3 compare d/*" in out
    code, out, _ = fedp3("compare", "d/fedavg", "d/fedp3", "--json")
    rows = last(out)["runs"]
    assert code == 0 and [r["method"] for r in rows] == ["fedavg", "fedp3"]
    assert rows[1]["mb_up"] < rows[0]["mb_up"]
    Path("d/notes.txt").write_text("not a run")
    code, out, _ = fedp3("compare", "d/fedavg", "d/fedp3", "d/notes.txt")
    assert code == 0 and "(100 %)" in out and "±" in out and "…" not in out
    Path("d/fedavg/seed-1/result.json").unlink()  # as if it were still running
    code, out, err = fedp3("compare", "d/fedavg", "d/fedp3")
    assert (
        code == 0
        and "fedavg is not finished and counts up to its last round: seed 1 at round" in err
    )
    assert "fedp3 is not" not in err
    assert fedp3("sweep", "my.toml", "--methods", "fedavg,nonsense", "--out", "e")[0] == 2
    for seed in ("seed-0", "seed-1"):  # stopped before its first round
        Path("d/fedavg", seed, "result.json").unlink(missing_ok=True)
        Path("d/fedavg", seed, "events.jsonl").write_text("")
    code, out, _ = fedp3("compare", "d/fedavg", "d/fedp3")
    assert code == 0 and "(-)" in out


def test_a_config_that_differs_from_its_method_gets_a_warning(fedp3):
    Path("my.toml").write_text('[plan]\nlayers = "opu2"\n[prune]\nkeep = 0.9\n')
    out = re.sub(r"\s+", " ", fedp3("plan", "my.toml", "method=fedavg")[1])
    assert (
        'the config differs from the method fedavg: plan.layers="opu2" (fedavg: "full"), '
        "prune.keep=0.9 (fedavg: 1.0)" in out
    )
    assert (
        "differs from the method"
        not in fedp3("plan", "my.toml", "method=heterofl", "plan.layers=prune-all")[1]
    )
    assert not Path("e").exists()


def test_a_sweep_chooses_a_setting_for_each_method(fedp3):
    fedp3("init", "my.toml")
    command = (
        "sweep",
        "my.toml",
        *TINY,
        "--methods",
        "fedavg,fedp3",
        "--out",
        "d",
        "--tune",
        "local.lr=1e-9,0.2",
    )
    code, _, err = fedp3(*command, "--tune-rounds", "2")
    tuned = json.loads(Path("d/tuned.json").read_text())
    assert code == 0 and list(tuned) == ["fedavg", "fedp3"]
    for m, entry in tuned.items():
        value, scores = entry["chosen"], entry["validation"]
        assert (
            entry["rounds"] == 2
            and list(scores) == ["1e-9", "0.2"]
            and scores[value] == max(scores.values())
        )
        assert f"{m}: {value} is best on the validation split (1e-9: " in err
        assert json.loads(Path(f"d/{m}/seed-0/run.json").read_text())["config"]["local"][
            "lr"
        ] == float(value)
    code, _, err = fedp3(
        "sweep", "my.toml", *TINY, "--methods", "fedavg", "--out", "d", "local.lr=0.07"
    )
    assert code == 2 and "begun with other settings" in err and "[local] lr: there" in err
    assert fedp3("resume", "d/fedavg")[0] == 0, "what was refused left no trace"
    code, _, err = fedp3(
        "sweep",
        "my.toml",
        *TINY,
        "--methods",
        "ditto",
        "--out",
        "f",
        "--tune",
        "hooks.mu=0.01,0.02",
    )
    assert code == 0 and "all values have the same G" in err
    for wrong in ("local.lr", "=0.1,0.2", "local.lr=0.1", "local.lr=0.1,-2", "local.rate=1,2"):
        assert (
            fedp3("sweep", "my.toml", "--methods", "fedavg", "--out", "e", "--tune", wrong)[0] == 2
        )
    assert not Path("e").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "no.toml"], "fedp3 init"),
        (["run", "my.toml", "local.lr=-1"], "greater than 0"),
        (["run", "my.toml", "--engine", "ray"], "unknown engine"),
        (["run", "my.toml", "run.device=cuda:7"], "cannot be used here"),
        (["run", "my.toml", "data.name=cifar10"], "cifar-10-batches-bin"),
        (
            [
                "run",
                "my.toml",
                "plan.layers=random-1",
                "partition.clients=1",
                "run.clients_per_round=1",
            ],
            "no client trains",
        ),
        (
            ["run", "my.toml", "prune.selector=ordered", "plan.layers=lowerb"],
            "retains the same units",
        ),
        (["resume", "nowhere"], "not a run folder"),
        (["report", "nowhere"], "not a run folder"),
        (["compare", "nowhere"], "not a run folder"),
        (["data", "get", "imagenet"], "unknown data set"),
        (["sweep", "my.toml", "--methods", "fedavg,resist", "--out", "s"], "residual blocks"),
        (["sweep", "my.toml", "--methods", " ", "--out", "s"], "names none"),
        (["data", "show", "digits", "partition.classes=11"], "[partition] classes"),
        (["data", "show", "digits", "--out", "x.foo"], "a picture's name ends in .png"),
        (
            ["data", "show", "digit"],
            "unknown data set or config file 'digit' (did you mean 'digits'",
        ),
    ],
)
def test_wrong_input_exits_2_before_any_folder_is_made(arguments, text, fedp3, tmp_path):
    fedp3("init", "my.toml")
    code, out, err = fedp3(*arguments)
    assert code == 2, (out, err)
    assert text in err
    assert "Traceback" not in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my.toml"]


def test_the_demo_trains_two_methods_and_ends_at_a_report(fedp3, tmp_path, monkeypatch):
    monkeypatch.setattr(
        cli.demo, "SETTINGS", (*cli.demo.SETTINGS, "run.rounds=2", "model.width=0.03")
    )
    code, out, _ = fedp3("demo")
    assert code == 0
    assert "rounds of training" in out and "s of virtual time" in out and "over 3 seeds" in out
    assert "next: fedp3 compare fedp3-demo/fedavg fedp3-demo/fedp3" in out
    assert out.strip().splitlines()[-1] == "open fedp3-demo/report.html"
    code, out, err = fedp3("compare", "fedp3-demo/fedavg", "fedp3-demo/fedp3", "--json")
    assert code == 0 and last(out)["unequal"] == {}, "both have the same fleet"
    assert fedp3("demo")[0] == 0, "it may be run again"
    (tmp_path / "mine/fedavg").mkdir(parents=True)
    assert fedp3("demo", "--out", "mine")[0] == 2, "it removes nothing but its runs"
    (tmp_path / "mine/fedavg").rmdir()
    fedp3("init", "my.toml")
    fedp3("run", "my.toml", *TINY, "method=fedavg", "--out", "mine/fedavg")
    code, _, err = fedp3("demo", "--out", "mine")
    assert code == 2 and "is not a run of this demo" in err
    assert (tmp_path / "mine/fedavg/result.json").exists(), "a run of the user stays"
    fedp3("run", "my.toml", *TINY, "method=fedavg", "--out", "its/fedavg", "--seeds", "3")
    code, _, err = fedp3("demo", "--out", "its")
    assert code == 2 and "is not a run of this demo" in err


def test_data_ls_and_show(fedp3, tmp_path):
    code, out, _ = fedp3("data", "ls")
    assert code == 0 and "digits" in out and "cifar100" in out
    rows = {r["name"]: r for r in last(fedp3("data", "ls", "--json")[1])["sets"]}
    assert rows["mnist"]["path"] is None and rows["digits"]["samples"] == 1797
    assert (
        fedp3("data", "show", "digits", "--out", "d.png")[0] == 0 and (tmp_path / "d.png").exists()
    )
    fedp3("init", "my.toml")
    code, out, _ = fedp3("data", "show", "my.toml", "partition.kind=dirichlet", "--out", "p.png")
    assert code == 0 and "open p.png" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_doctor_reports_versions_data_extras_and_threads(fedp3):
    state = last(fedp3("doctor", "--json")[1])
    assert state["versions"]["torch"] and state["cores"] >= 1 and state["devices"][0] == "cpu"
    assert set(state["extras"]) == {"flower", "privacy", "tensorboard", "mlflow", "wandb", "onnx"}
    assert state["data"]["digits"]
    assert fedp3("doctor")[0] == 0


def test_tensorboard_events_hold_the_scores(fedp3, tmp_path):
    pytest.importorskip("tensorboard")
    fedp3("init", "my.toml")
    assert fedp3("run", "my.toml", *TINY, "--out", "a", "--tensorboard")[0] == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "a/tensorboard"))
    events.Reload()
    recorded = run_folder.read_events(tmp_path / "a")
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(
        [e["loss"] for e in recorded]
    )
    assert events.Scalars("accuracy/G")[-1].value == pytest.approx(recorded[-1]["G"]["mean"])


def test_methods_lists_a_line_each(fedp3):
    code, out, _ = fedp3("methods")
    assert code == 0 and out.splitlines()[0].startswith("fedp3")
    assert set(last(fedp3("methods", "--json")[1])) >= {"fedp3", "fedavg"}


def test_methods_lists_what_one_of_them_sets(fedp3):
    code, out, _ = fedp3("methods", "heterofl")
    assert code == 0 and '  prune.selector = "ordered"' in out.splitlines()
    assert last(fedp3("methods", "fedavg", "--json")[1])["sets"]["plan"] == {"layers": "full"}
    assert "sets nothing" in fedp3("methods", "fedp3")[1]
    code, _, err = fedp3("methods", "heterofi")
    assert code == 2 and "did you mean 'heterofl'" in err


def test_a_missing_score_is_a_dash():
    assert (share(None), share(0.5)) == ("-", "50.0 %")


# ----------------------------------------------------------------- files of the user

RULES = """
import fedp3

@fedp3.register.aggregator("still")
def still(settings, spec):
    def apply(W, updates, state):
        for _ in updates:
            pass
        return W, state
    return fedp3.Aggregator(init=dict, apply=apply, report=lambda state: {})

def loss(net, x, y, inputs):
    import torch
    return torch.nn.functional.cross_entropy(net(x), y)

def broken_loss(net, x, y, inputs):
    raise ValueError("the loss cannot be computed")

def unreadable_loss(net, x, y, inputs):
    open("/no/such/file")

for name, function in {"mine": loss, "broken": broken_loss, "unreadable": unreadable_loss}.items():
    fedp3.register.method(name)(
        fedp3.Method(name, hooks=lambda settings, loss=function: fedp3.Hooks(loss=loss))
    )
"""


@pytest.fixture
def forget(monkeypatch):
    """Make this process forget the files of the user that it has imported, now and at the end."""
    tables = [(registry, dict(registry)) for registry in (METHODS, AGGREGATORS)]

    def call() -> None:
        for registry, table in tables:
            monkeypatch.setattr(registry, "_table", dict(table))
        for name in [name for name in sys.modules if name.startswith("fedp3_use_")]:
            del sys.modules[name]

    call()
    yield call
    call()


@pytest.fixture
def rules(fedp3, tmp_path, forget) -> str:
    """A user's file that registers an aggregator and three methods, beside a config."""
    (tmp_path / "rules.py").write_text(RULES)
    fedp3("init", "my.toml")
    return "rules.py"


def test_a_file_of_the_user_registers_what_a_config_names(fedp3, tmp_path, rules):
    still = [*TINY, "aggregate.rule=still"]
    code, _, err = fedp3("run", "my.toml", *TINY, "aggregate.rule=strange", "--out", "a")
    assert code == 2 and "unknown aggregation rule 'strange'" in err
    assert "mine" in fedp3("methods", "--use", rules)[1]
    assert fedp3("plan", "my.toml", *still, "--use", rules)[0] == 0
    assert fedp3("data", "show", "my.toml", *still, "--use", rules, "--out", "p.png")[0] == 0
    code, out, err = fedp3("run", "my.toml", *still, "--use", rules, "--out", "a", "--json")
    assert code == 0, err
    first = last(fedp3("run", "my.toml", *still, "run.rounds=1", "--use", rules, "--json")[1])
    assert last(out)["model_sha256"] == first["model_sha256"], "this rule leaves the model alone"
    (recorded,) = files.read_json(tmp_path / "a/run.json")["plugins"]
    assert recorded["path"] == str(tmp_path / rules)
    code, _, err = fedp3("run", "my.toml", *TINY, "--use", "nothing.py", "--out", "b")
    assert code == 2 and "--use" in err and "nothing.py" in err and not Path("b").exists()


def test_a_run_with_a_file_of_the_user_is_resumed_by_its_folder_alone(
    fedp3, tmp_path, rules, forget
):
    command = ["run", "my.toml", *TINY, "method=mine", "--use", rules]
    for arguments in (["--out", "a"], ["--out", "s", "--seeds", "2"]):
        assert fedp3(*command, *arguments)[0] == 0
    results = [tmp_path / "a/result.json", tmp_path / "s/seed-1/result.json"]
    for folder, result in zip(("a", "s"), results, strict=True):
        result.unlink()
        forget()
        code, _, err = fedp3("resume", folder)
        assert code == 0 and result.exists(), err
    (tmp_path / rules).write_text(RULES + "# changed\n")
    for folder, result in zip(("a", "s"), results, strict=True):
        result.unlink()
        forget()
        code, _, err = fedp3("resume", folder)
        assert code == 2 and "was changed" in err


def test_worker_processes_of_a_sweep_import_the_file_of_the_user(fedp3, tmp_path, rules):
    code, _, err = fedp3(
        *("sweep", "my.toml", *TINY, "--use", rules, "--methods", "mine", "--out", "d"),
        *("--tune", "local.lr=1e-9,0.2", "--tune-rounds", "1", "--workers", "2"),
    )
    assert code == 0, err
    assert (tmp_path / "d/mine/seed-0/result.json").exists()


# ----------------------------------------------------------------- engines


def test_the_debug_engine_ends_with_the_traceback_of_a_clients_exception(fedp3, tmp_path, rules):
    def command(method: str, *more: str) -> list[str]:
        settings = [*TINY, "run.max_void=1", f"method={method}"]
        return ["run", "my.toml", *settings, "--use", rules, "--out", f"{method}{len(more)}", *more]

    done = subprocess.run(
        [sys.executable, "-m", "fedp3", *command("broken", "--engine", "debug")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "in broken_loss" in done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: the loss cannot be computed"
    # Without this engine the command line shows an OSError as one line.
    code, _, err = fedp3(*command("unreadable", "--engine", "debug"))
    assert code == 1 and "Traceback" in err and "in unreadable_loss" in err
    code, _, err = fedp3(*command("broken"))
    assert code == 1 and "Traceback" not in err and "1 rounds in a row" in err


def test_the_debug_engine_computes_what_the_others_compute(fedp3):
    fedp3("init", "my.toml")
    results = [
        last(fedp3("run", "my.toml", *TINY, *engine, "--out", str(k), "--json")[1])
        for k, engine in enumerate((["--engine", "debug"], ["--engine", "inprocess"]))
    ]
    for key in ("mb_up", "mb_down", "rounds", "rejected"):
        assert results[0][key] == results[1][key]
    assert results[0]["accuracy_global"] == pytest.approx(results[1]["accuracy_global"], abs=0.01)


# ----------------------------------------------------------------- configs of earlier versions

OLD = """
method = "fedp3"
[data]
name = "digits"
augment = true
[plan]
layers = "opu2"
[prune]
upload = "kept"
hold = true
local = "uniform"
q_of = "whole"
q = 0.5
[privacy]
others = "freeze"
noise_multiplier = 0.0
"""


def test_an_old_config_is_translated(fedp3, tmp_path):
    (tmp_path / "old.toml").write_text(OLD)
    code, _, err = fedp3("plan", "old.toml")
    assert code == 2 and "fedp3 init NEW.toml --from OLD.toml" in err
    code, out, err = fedp3("init", "new.toml", "--from", "old.toml")
    assert code == 0, err
    assert "[prune] upload = 'kept' is now [plan] upload = 'retained'" in out
    settings = config.load(tmp_path / "new.toml")
    assert settings.plan.upload == "retained" and settings.prune.freeze_pruned
    assert settings.prune.local_pruner == "uniform" and settings.prune.q_relative_to == "layer"
    assert settings.plan.others == "train", "[privacy] others had no effect without LDP"
    assert settings.privacy.noise_multiplier == "auto"
    assert fedp3("plan", "new.toml", *TINY)[0] == 0
    code, _, err = fedp3("init", "new.toml", "--from", "old.toml")
    assert code == 2 and "--force" in err
    code, _, err = fedp3("init", "newer.toml", "--from", "absent.toml")
    assert code == 2 and "absent.toml" in err and not Path("newer.toml").exists()


# ----------------------------------------------------------------- commands of other packages

HELLO = "def register(app):\n    app.command('hello')(lambda: print('hello there'))\n"
UNBUILDABLE = "def register(app):\n    def f(x: {1, 2}): pass\n    app.command('hello')(f)\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package with a command on the path, with the metadata that pip would write."""
    site = tmp_path / "site"

    def put(name: str, code: str) -> None:
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fedp3.commands]\nhello = {name}:register\n")
        monkeypatch.syspath_prepend(site)

    return put


@pytest.mark.parametrize("commands", [None])  # those that are installed
def test_an_installed_package_adds_its_commands(fedp3, install):
    install("greeter", HELLO)
    assert fedp3("hello")[:2] == (0, "hello there\n")
    assert " hello " in fedp3("--help")[1]


@pytest.mark.parametrize("commands", [None])
@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("absent", "", "AttributeError"),
        (
            "broken",
            "raise ImportError('needs\\nnothing that exists')",
            "ImportError: needs nothing that exists",
        ),
        ("strange", "def register(): pass", "TypeError"),
        ("unbuildable", UNBUILDABLE, "RuntimeError"),
    ],
)
def test_a_package_whose_commands_fail_costs_one_line_and_nothing_else(
    fedp3, install, name, code, reason
):
    install(name, code)
    status, out, err = fedp3("methods")
    assert status == 0 and out.startswith("fedp3")
    warning = [line for line in err.splitlines() if name in line]
    assert len(warning) == 1 and f"left out the command 'hello' of {name}: {reason}" in warning[0]


@pytest.mark.parametrize("command", cli.IN_A_CHECKOUT)
def test_a_command_of_the_paper_that_is_not_installed_says_where_it_comes_from(fedp3, command):
    for arguments in ([], ["--help"], ["x", "--json"]):
        code, _, err = fedp3(command, *arguments)
        assert (
            code == 2
            and f"`fedp3 {command}` comes with a checkout" in err
            and "pip install -e paper" in err
        )
    assert f" {command} " not in fedp3("--help")[1]
