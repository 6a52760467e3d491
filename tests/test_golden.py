"""The model hash, scores and bytes of many small runs, pinned in golden.json.

A refactoring must leave every value as it is.  A change of results replaces them on purpose: mark
it **Results** in the changelog, then run `python tests/test_golden.py`.

The bits belong to one torch build and to kinds of CPU, which golden.json names.  On another machine
they are skipped; worker processes, resumed runs and Flower's messages are then held to the bits of
one process there.  On every machine the same runs agree, to rounding, with the plain path: one
client at a time, by autograd.
"""

import atexit
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_folders as H
from fedp3 import config
from fedp3.config import Config
from fedp3.engines.catalogue import make_engine
from fedp3.experiment.assemble import assemble
from fedp3.models.frozen import frozen_sha256
from fedp3.runs import session

GOLDEN = Path(__file__).with_name("golden.json")
SMALL = (
    "partition.clients=6", "model.width=0.015625", "local.steps=3", "local.batch=8", "local.lr=0.1",
    "run.rounds=3", "run.clients_per_round=4", "run.eval_every=0", "run.seed=3",
)  # fmt: skip
CNN = ("model.name=cnn", "model.width=0.0625")
RESNET = (
    "model.name=resnet18",
    "model.stem=7",
    "model.width=0.0625",
    "run.rounds=2",
    "run.clients_per_round=2",
)
LDP = (
    "privacy.enabled=true", "privacy.randomness=seeded", "privacy.noise_multiplier=1.1",
    "privacy.sample_rate=0.2", "privacy.delta=1e-4",
)  # fmt: skip
CLIENT_LEVEL = (
    "client_privacy.enabled=true", "client_privacy.randomness=seeded", "run.clients_per_round=0",
    "client_privacy.noise_multiplier=1.1", "client_privacy.sample_rate=0.6",
    "client_privacy.clip=0.3",
)  # fmt: skip
PHONES = ("devices.fleet={'Nexus S' = 0.5, 'Pixel 3' = 0.5}", "devices.round_seconds=0.03")
ONE_CODE = ("upload.compress=int8", "download.compress=none")
PLAY = Path(__file__).with_name("play.txt")
TEXT = (
    "data.name=text", f"data.path={PLAY}", "data.length=16", "partition.kind=roles",
    "model.name=gpt", "model.width=0.125", "model.blocks=2", "local.lr=0.01",
)  # fmt: skip
# Small transformers and texts, which `settings` writes; {folders} stands for their folder.
SEQUENCES = (
    "data.name=tsv", "data.path={folders}/sentences.tsv", "data.length=8", "partition.classes=2",
    "model.name=hf", "model.path={folders}/bert",
)  # fmt: skip
WORDS = (
    "data.name=text", "data.path={folders}/words.txt", "data.length=8", "partition.kind=iid",
    "model.name=hf",
)  # fmt: skip
SKIP = ("plan.layers=blocks-1-2", "plan.others=skip", "plan.redraw=true")
LORA = (*TEXT, "adapter.rank=4", "local.lr=0.1")
MIXED = "prune.keep=[0.9, 0.7, 0.5]"
TERNARY = ("upload.compress=ternary", "download.compress=ternary")
FOUR_WIDTHS = "prune.keep=[1.0, 0.5, 0.25, 0.125]"

CASES: dict[str, Sequence[str]] = {
    # methods
    "fedp3": (),
    "fedp3-lowerb": ("method=fedp3-lowerb",),
    "fedp3-opu2": ("method=fedp3-opu2", MIXED),
    "fedp3-opu3": ("method=fedp3-opu3",),
    "fedavg": ("method=fedavg",),
    "fedavg-ft": ("method=fedavg-ft",),
    "local": ("method=local",),
    "fedprox": ("method=fedprox",),
    "fedper": ("method=fedper",),
    "fedrep": ("method=fedrep",),
    "fedbabu": ("method=fedbabu",),
    "ditto": ("method=ditto",),
    "fedrop": ("method=fedrop",),
    "heterofl": ("method=heterofl",),
    "fjord": ("method=fjord",),
    "fedrolex": ("method=fedrolex",),
    "fiarse": ("method=fiarse",),
    "ist": ("method=ist",),
    "resist": ("method=resist", *RESNET),
    "fedcr": ("method=fedcr",),
    "fedcr-opu2": ("method=fedcr-opu2",),
    "fedcr-opu3": ("method=fedcr-opu3", *CNN),
    "fedavg-fp16": ("method=fedavg-fp16",),
    "fedavg-int8": ("method=fedavg-int8",),
    "fedavg-topk": ("method=fedavg-topk",),
    "fedavg-layer": ("method=fedavg-layer",),
    "fedavgm": ("method=fedavgm",),
    "fedadam": ("method=fedadam",),
    "scaffold": ("method=scaffold",),
    "fedp3-paced": ("method=fedp3-paced", *CNN, "plan.period=2"),
    "fedpart": ("method=fedpart", "plan.warm=1", "plan.stretch=1", "run.rounds=6"),
    "fedlp": ("method=fedlp",),
    "fedluar": ("method=fedluar", "run.rounds=5"),
    "selective": ("method=selective", *TERNARY, "run.rounds=4"),
    "fedlama": ("method=fedlama", "aggregate.interval=2", "run.rounds=6"),
    "cocofl": ("method=cocofl",),
    "fiarse-threshold": ("method=fiarse-threshold",),
    "fedit": ("method=fedit", *LORA),
    "ffa-lora": ("method=ffa-lora", *LORA),
    "hetlora": ("method=hetlora", *LORA),
    "flexlora": ("method=flexlora", *LORA),
    "flora": ("method=flora", *LORA),
    "fedra": ("method=fedra", *LORA, "plan.layers=blocks-1"),
    # selectors
    "selector-random": (MIXED, "prune.selector=random"),
    "selector-neuron": (MIXED, "prune.selector=neuron"),
    "selector-neuron-norm": (MIXED, "prune.selector=neuron_norm", *CNN),
    "selector-ordered": (
        FOUR_WIDTHS,
        "prune.selector=ordered",
        "plan.layers=prune-all",
        "plan.upload=retained",
    ),
    "selector-rolling": (MIXED, "prune.selector=rolling", "prune.physical=false"),
    "selector-magnitude-all": (MIXED, "prune.selector=magnitude_all", "plan.upload=retained"),
    "magnitude-regrows": (MIXED, "prune.freeze_pruned=false", "plan.upload=zeros"),
    "stale-columns-vote": (MIXED, "prune.selector=neuron", "prune.unfed_columns=vote"),
    "keep-by-share-of-fleet": ("prune.keep={'0.5' = 0.5, '1.0' = 0.5}",),
    # local pruning
    "local-uniform": (MIXED, "prune.local_pruner=uniform"),
    "local-ordered-dropout": (MIXED, "prune.local_pruner=ordered_dropout", *CNN),
    "local-ordered-masked": (
        MIXED,
        "prune.local_pruner=ordered_dropout",
        "prune.physical=false",
        "prune.q=0.7",
    ),
    "local-ordered-matched": (
        MIXED,
        "prune.local_pruner=ordered_matched",
        "prune.q=[0.5, 0.75, 1.0]",
    ),
    "local-distilled": ("method=fjord", "hooks.distil=true"),
    # plans
    "layers-mixed-redrawn": ("plan.layers=opu1-2-3", "plan.redraw=true"),
    "layers-random": ("plan.layers=random-2",),
    "layers-resnet-blocks": ("plan.layers=resnet-no-b2-b3", *RESNET),
    "layers-resnet-part": ("plan.layers=resnet-b2-part", "model.norm=group", *RESNET),
    "others-frozen": ("plan.others=freeze", MIXED),
    "schedule-dealt": (
        *("plan.layers=full", "plan.schedule=paced", "plan.dealt=true", "plan.period=2"),
        *("plan.share=0.3", MIXED),
    ),
    "schedule-resnet": (
        *("plan.schedule=cycle", "plan.layers=full", "plan.warm=1", "plan.stretch=1", *RESNET),
    ),
    "weak-clients": (
        *(MIXED, "plan.weak_below=0.8", "plan.weak_steps=1", "plan.weak_depth=0.5"),
        *("plan.others=freeze", "plan.layers=full"),
    ),
    "head-personal-uploaded": ("plan.head=personal_uploaded",),
    # aggregation
    "rule-examples": ("aggregate.rule=examples", "partition.sizes=lognormal"),
    "rule-weighted": ("aggregate.rule=weighted", "plan.layers=opu1-2-3"),
    "rule-distance": ("aggregate.rule=distance",),
    "rule-attention": ("aggregate.rule=attention", "run.rounds=5"),
    "rule-attention-unsketched": (
        "aggregate.rule=attention",
        "aggregate.start=weighted",
        "aggregate.sketch=0",
    ),
    "momentum-on-layers": ("aggregate.server=momentum", "aggregate.server_lr=0.5"),
    "adam-on-layers": ("aggregate.server=adam", "aggregate.server_lr=0.01"),
    "averaged": (
        *("method=fedp3-paced", "plan.period=2", "plan.share=0.3", "aggregate.average=3"),
        "run.rounds=5",
    ),
    "recycled-at-random": ("aggregate.recycle=0.25", "aggregate.recycle_by=random"),
    "recycled-in-turn": (
        *("aggregate.recycle=0.5", "aggregate.recycle_by=cyclic", "aggregate.server=momentum"),
    ),
    "damped-retained": (
        *("aggregate.damp=0.5", MIXED, "plan.upload=retained", "prune.selector=neuron"),
    ),
    # uploads
    "upload-int8-layers": ("upload.compress=int8", MIXED),
    "upload-topk-layers": ("upload.compress=topk", "upload.share=0.1", "plan.redraw=true"),
    "upload-fp16-kept": ("upload.compress=fp16", "plan.upload=retained", "prune.selector=neuron"),
    # codes in both directions
    "codes-ternary": ("method=fedavg", *TERNARY, "run.rounds=5"),
    "codes-random": (
        MIXED,
        "upload.compress=ternary-random",
        "download.compress=int4-random",
        "download.copy=fp32",
    ),
    "codes-entropy": (
        *(MIXED, "prune.selector=neuron", "upload.compress=int4", "download.compress=int4"),
        *("upload.entropy=true", "download.entropy=true", "run.rounds=5"),
    ),
    "codes-windows": ("method=fedrolex", *TERNARY, "run.rounds=5"),
    "codes-largest-weights": ("method=fiarse", *TERNARY, "run.rounds=5"),
    "codes-topk": ("method=fedavg", "download.compress=topk", "download.share=0.2"),
    "codes-devices": (
        *("method=fedavg", "devices.planner=manual", "devices.round_end=deadline", *PHONES),
        *(*TERNARY, "upload.entropy=true", "run.rounds=5"),
    ),
    "codes-ldp": (*LDP, *TERNARY),
    "codes-paced": (
        *("method=fedp3-paced", *CNN, "plan.period=2", *TERNARY, "upload.entropy=true"),
        *("run.rounds=6", "plan.weak_below=0.6", "plan.weak_steps=2", MIXED),
    ),
    "codes-batch-norm": ("plan.layers=opu3", *TERNARY, *RESNET),
    # local training
    "sgd-momentum-decay-cosine": (
        "local.momentum=0.9",
        "local.weight_decay=0.01",
        "local.schedule=cosine",
    ),
    "epochs-clipped": ("local.epochs=1", "local.clip_norm=0.5", "local.schedule=linear"),
    "adam-kept": (
        *("local.optimizer=adam", "local.optimizer_state=client", "local.lr=0.01"),
        "local.weight_decay=0.01",
    ),
    "cnn": CNN,
    "resnet18": ("plan.layers=opu3", *RESNET),
    # data
    "partition-dirichlet": ("partition.kind=dirichlet", "partition.alpha=0.3"),
    "partition-iid": ("partition.kind=iid", "run.clients_per_round=0"),
    # objectives and transformers
    "language-modelling": (
        *(*TEXT, "local.optimizer=adamw", "local.optimizer_state=client", "local.warmup=2"),
        *("local.step_schedule=cosine", "local.weight_decay=0.01"),
    ),
    # a test set of no client, scored as C
    "central": (*TEXT, f"data.test_path={PLAY}", "model.blocks=1"),
    "language-modelling-units": (*TEXT, MIXED, "prune.selector=ordered", "method=fedp3-opu2"),
    "gpt-heads": (*TEXT, MIXED, "prune.selector=rolling", "prune.heads=true"),
    "gpt-skipped": (*TEXT, *SKIP),
    "hf-bert-heads": (
        *(*SEQUENCES, MIXED, "prune.selector=rolling", "prune.heads=true"),
        *("local.optimizer=adamw", "local.lr=0.01"),
    ),
    "hf-bert-sublayers": (*SEQUENCES, MIXED, "model.layers=sublayers"),
    "hf-gpt2-units": (
        *(*WORDS, "model.path={folders}/gpt2", MIXED, "prune.selector=neuron"),
        "prune.heads=true",
    ),
    "hf-llama-skipped": (*WORDS, "model.path={folders}/llama", *SKIP),
    "hf-vit": ("model.name=hf", "model.path={folders}/vit", "plan.layers=opu2"),
    "frozen-embedding": (*TEXT, "model.frozen=['embedding']"),
    "lora-windows-of-ranks": (
        *("method=hetlora", *LORA, "adapter.rule=freeze_a", "adapter.weights=rule"),
        *("prune.selector=rolling", "plan.upload=retained", *TERNARY),
    ),
    "lora-hf-bert": (*SEQUENCES, "method=flexlora", "adapter.rank=4"),
    "vit": ("model.name=vit", "model.width=0.125", "model.blocks=2", "plan.layers=opu2"),
    # local differential privacy
    "ldp": LDP,
    "ldp-others-noised": (*LDP, "plan.others=noise", MIXED),
    "ldp-cnn": (*LDP, *CNN, "privacy.epsilon=20"),
    "ldp-momentum-int8": (*LDP, "local.momentum=0.5", "upload.compress=int8"),
    "ldp-schedule": (
        *LDP,
        "plan.schedule=cycle",
        "plan.layers=full",
        "plan.warm=1",
        "run.rounds=9",
    ),
    "ldp-language-modelling": (
        *(*LDP, *TEXT, "plan.layers=full", "local.optimizer=adam", "privacy.delta=1e-3"),
        "privacy.epsilon=30",
    ),
    "ldp-hf-gpt2": (
        *(*LDP, *WORDS, "model.path={folders}/gpt2", "plan.layers=full", "privacy.delta=1e-3"),
        "privacy.epsilon=30",
    ),
    "ldp-lora": (*LDP, "method=ffa-lora", *LORA, "privacy.delta=1e-3", "privacy.epsilon=30"),
    "ldp-without-noise": (*LDP[:2], "privacy.epsilon=inf"),
    # client-level differential privacy
    "client-level": (*CLIENT_LEVEL, MIXED, "upload.compress=int8"),
    "client-level-adam": (*CLIENT_LEVEL, "aggregate.server=adam", "aggregate.server_lr=0.01"),
    # devices and virtual time
    "devices": (*PHONES, *ONE_CODE),
    "devices-codes": (*PHONES, "devices.round_seconds=0.015"),
    "devices-daily-deadline": (
        *("method=fedavg", "devices.planner=manual", "devices.round_end=deadline", *PHONES),
        "devices.availability=daily",
    ),
    "devices-over-selection": (
        *PHONES,
        *ONE_CODE,
        "devices.round_end=first",
        "run.clients_per_round=2",
    ),
    "devices-buffered": (*PHONES, *ONE_CODE, "devices.round_end=buffered", "run.rounds=6"),
    "devices-sub-models": (*PHONES, "method=fedrolex"),
    "devices-paced": (*PHONES, "method=fedp3-paced", "plan.period=2", "plan.share=0.3"),
}
SEVERAL_WORKERS = (
    *("fedp3", "rule-attention", "fedavg-topk", "cnn", "ldp", "client-level", "devices-buffered"),
    *("codes-entropy", "fedp3-paced", "language-modelling", "hf-bert-heads", "central"),
    *("hetlora", "flexlora", "flora", "lora-hf-bert"),
)
RESUMED = (
    *("fedp3-opu2", "rule-attention", "fedadam", "scaffold", "fedavg-topk", "fedper", "ldp"),
    *(
        "client-level-adam",
        "devices-buffered",
        "devices-codes",
        "devices-daily-deadline",
        "fedpart",
        "fedluar",
    ),
    *("recycled-in-turn", "ldp-schedule", "devices-paced", "fedlama", "codes-paced"),
    *("codes-ternary", "codes-entropy", "codes-largest-weights", "codes-windows"),
    *("language-modelling", "adam-kept", "averaged", "hf-bert-heads", "hf-llama-skipped"),
    *("central", "ffa-lora", "flexlora", "flora", "fedra", "lora-windows-of-ranks", "selective"),
)
ON_FLOWER = (
    *("fedp3-opu2", "selector-neuron", "fedavg-int8", "fiarse", "fedper", "scaffold"),
    *("client-level", "devices", "devices-buffered", "devices-codes", "fedp3-paced", "fedluar"),
    *("codes-ternary", "codes-random", "codes-entropy", "codes-windows", "codes-largest-weights"),
    *("codes-topk", "codes-batch-norm", "codes-paced", "weak-clients", "fedlama"),
    *("language-modelling", "hf-bert-heads", "hf-llama-skipped", "hf-gpt2-units", "central"),
    *("fedit", "ffa-lora", "hetlora", "flexlora", "flora", "fedra", "lora-windows-of-ranks"),
    *("fiarse-threshold", "selective"),
)


@cache
def folders() -> Path:
    """A folder with small transformers and texts for them, for as long as the tests run."""
    pytest.importorskip("transformers")
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root)
    for kind in ("bert", "gpt2", "llama", "vit"):
        H.folder(root / kind, kind, **({"classes": 10} if kind == "vit" else {}))
    H.write_tsv(root / "sentences.tsv", H.sentences(120))
    H.write_text(root / "words.txt")
    return root


def settings(case: str) -> Config:
    given = [*SMALL, *CASES[case]]
    if any("{folders}" in setting for setting in given):
        given = [setting.replace("{folders}", str(folders())) for setting in given]
    return config.parse({}, given)


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """What is pinned of a run."""
    kinds = (("G", "global"), ("D", "dispatched"), ("P", "personal"))
    scores = {kind: result[f"score_{name}"] for kind, name in kinds}
    megabytes = {"mb_up": result["mb_up"], "mb_down": result["mb_down"]}
    more = ("client_epsilon", "virtual_seconds")
    of_some = {k: result[k] for k in more if result[k] is not None}
    if result["score_central"] is not None:
        of_some["C"] = result["score_central"]
    return {
        "model_sha256": result["model_sha256"],
        **scores,
        **megabytes,
        "epsilon": result["epsilon_max"],
        **of_some,
    }


def engine_with(workers: int, name: str = "inprocess") -> session.StartEngine:
    return lambda experiment, states: make_engine(experiment, workers, states, name)


def finished(case: str, workers: int = 1) -> dict[str, Any]:
    return outcome(dict(session.train(assemble(settings(case)), None, engine_with(workers)).result))


# --------------------------------------------------------------------------- pinned values


def cpu() -> str:
    """The kind of CPU, of which bits may depend."""
    path = Path("/proc/cpuinfo")
    info = path.read_text() if path.exists() else platform.processor()
    lines = dict.fromkeys(
        line
        for line in info.splitlines()
        if line.startswith(("vendor_id", "cpu family", "model\t"))
    )
    facts = " ".join(" ".join(line.replace(":", " ").split()) for line in lines)
    return f"{platform.machine()} {facts} {torch.backends.cpu.get_cpu_capability()}"


@cache
def golden() -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text()))


def is_pinned_here() -> bool:
    return golden()["torch"] == torch.__version__ and cpu() in golden()["cpus"]


@cache
def expected(case: str) -> dict[str, Any]:
    """The pinned values; on a machine that has none, those of one process."""
    return dict(golden()["cases"][case]) if is_pinned_here() else finished(case)


@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_at_its_pinned_bits(case: str) -> None:
    if not is_pinned_here():
        known = f"{golden()['torch']} on {', '.join(golden()['cpus'])}"
        pytest.skip(f"golden.json holds the bits of torch {known}; this is {cpu()}")
    assert finished(case) == golden()["cases"][case]


@pytest.mark.parametrize("case", SEVERAL_WORKERS)
def test_two_workers_end_at_the_bits_of_one_process(case: str) -> None:
    assert finished(case, workers=2) == expected(case)


class Crash(Exception):
    """Stops a run between two rounds."""


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_ends_at_the_bits_of_one_process(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def crash(record: Any) -> None:
        if record.t == 0:
            raise Crash

    with pytest.raises(Crash):
        session.train(
            assemble(settings(case)), folder, engine_with(1), watch=session.watch_with(crash)
        )
    told: list[str] = []
    again = session.train(
        assemble(settings(case)), folder, engine_with(1), resume=True, tell=told.append
    )
    assert told == [f"resuming after round 1 of {settings(case).run.rounds}"]
    assert outcome(dict(again.result)) == expected(case)


@pytest.mark.parametrize("case", ON_FLOWER)
def test_flower_messages_in_place_end_at_the_bits_of_one_process(case: str) -> None:
    pytest.importorskip("flwr")
    from fedp3.engines.base import States
    from fedp3.engines.flower.client_app import client_app, configured
    from fedp3.engines.flower.grid import Roster, Wire, over
    from fedp3.messages.codec import room_for
    from flower.fakes import FakeGrid, in_a_run

    experiment = assemble(settings(case))
    wire = Wire(
        spec=experiment.server.spec,
        digest=experiment.config.digest(),
        run="0" * 32,
        rest=lambda: None,
        room=room_for(experiment.start.extra),
        frozen=frozen_sha256(experiment.client.net),
    )
    app = client_app(configured(experiment.config), state_in_message=True)
    with in_a_run():
        grid = FakeGrid(app, [{"partition-id": i} for i in range(len(experiment.server.keep))])
        result = session.run_rounds(experiment, over(grid, wire, Roster(), States())).result
    assert outcome(dict(result)) == expected(case)


# --------------------------------------------------------------------------- any machine

PLAIN = (
    "fedp3",
    "fedavg",
    "rule-weighted",
    "selector-neuron",
    "sgd-momentum-decay-cosine",
    "epochs-clipped",
)


@pytest.mark.parametrize("case", PLAIN)
def test_a_run_agrees_with_the_plain_path(case: str) -> None:
    stacked, plain = (
        session.train(assemble(settings(case)), None, engine_with(1, engine)).state.W
        for engine in ("inprocess", "debug")
    )
    for name, w in stacked.items():
        torch.testing.assert_close(w, plain[name], rtol=1e-4, atol=1e-6)


def test_every_method_selector_rule_compression_model_and_optimizer_is_pinned() -> None:
    from fedp3.client.optimizers import OPTIMIZERS
    from fedp3.messages.compressors import COMPRESSORS
    from fedp3.methods import METHODS
    from fedp3.models.zoo import MODELS
    from fedp3.planning.prune_settings import LOCAL_PRUNERS, SELECTORS
    from fedp3.planning.schedules import SCHEDULES
    from fedp3.server.aggregators import AGGREGATORS, RECYCLED_BY

    chosen = [settings(case) for case in CASES]
    assert {c.method for c in chosen} == set(METHODS)
    assert {c.prune.selector for c in chosen} == set(SELECTORS)
    assert {c.prune.local_pruner for c in chosen} == set(LOCAL_PRUNERS)
    assert {c.aggregate.rule for c in chosen} == set(AGGREGATORS)
    codes = {c.upload.compress for c in chosen} | {c.download.compress for c in chosen}
    assert codes == set(COMPRESSORS)
    assert {c.plan.schedule for c in chosen} == set(SCHEDULES)
    assert {c.aggregate.recycle_by for c in chosen} == set(RECYCLED_BY)
    assert {c.local.optimizer for c in chosen} == set(OPTIMIZERS)
    assert {c.model.name for c in chosen} == set(MODELS)


def _written() -> Iterator[tuple[str, dict[str, Any]]]:
    for case in CASES:
        print(case, flush=True)
        yield case, finished(case)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    cases = dict(_written())
    same = golden()["torch"] == torch.__version__ and golden()["cases"] == cases
    cpus = {*golden()["cpus"], cpu()} if same else {cpu()}
    value = {"torch": torch.__version__, "cpus": sorted(cpus), "cases": cases}
    GOLDEN.write_text(json.dumps(value, indent=1) + "\n")
    sys.stdout.write(f"wrote {GOLDEN}\n")
