"""The scenes and the rows of the comparison, and the order in which they are trained."""

from collections.abc import Iterator, Mapping, Sequence

from fedp3 import config

BASE_ROUNDS = 40  # of FedAvg in 32 bits; what it sends in them is 100 % of the bytes
BUDGET = 0.05  # rows with codes stop once they have used this share of those bytes
TUNING_BUDGET = 0.025  # and their learning rates are chosen at this share
MOST_ROUNDS = 400

COMMON = (
    "partition.clients=20",
    "partition.sizes=700",
    "prune.keep={'0.125' = 0.2, '0.5' = 0.5, '1.0' = 0.3}",
    "local.steps=10",
    "local.batch=48",
    "local.clip_norm=1.0",
    "run.clients_per_round=0",
    "run.eval_every=0",  # the benchmark evaluates itself, and only what it reads
)
CNN = ("model.name=cnn", "model.width=0.25")
FASHION, CIFAR10 = "data.name=fashion-mnist", "data.name=cifar10"
CLASSES = ("partition.kind=classes", "partition.classes=5")
DIRICHLET = ("partition.kind=dirichlet", "partition.alpha=0.5")
SCENES: Mapping[str, Sequence[str]] = {
    "fashion-classes": (*CNN, FASHION, *CLASSES),
    "fashion-dirichlet": (*CNN, FASHION, *DIRICHLET),
    "cifar10-classes": (*CNN, CIFAR10, *CLASSES),
    "cifar10-dirichlet": (*CNN, CIFAR10, *DIRICHLET),
    "fashion-half": (*CNN, FASHION, *CLASSES, "run.clients_per_round=10"),
    "fashion-mlp": ("model.name=mlp", FASHION, *CLASSES),
    "cifar10-resnet": ("model.name=resnet18", "model.width=0.25", CIFAR10, *CLASSES),
}
# Scenes that take their learning rates from another one.
RATES_OF_SCENE = {
    "fashion-dirichlet": "fashion-classes",
    "cifar10-dirichlet": "cifar10-classes",
    "fashion-half": "fashion-classes",
}

TERNARY = (
    *("upload.compress=ternary", "upload.entropy=true"),
    *("download.compress=ternary", "download.entropy=true"),
)
INT4 = (
    *("upload.compress=int4", "upload.entropy=true"),
    *("download.compress=int4", "download.entropy=true"),
)
FLOAT = ("upload.compress=none", "download.compress=none")
PACED = ("method=fedp3-paced", "plan.others=hold")
FEW_STEPS = ("plan.weak_below=0.2", "plan.weak_steps=4")  # of 10, on the weakest fifth
FEWER_STEPS = ("plan.weak_below=0.2", "plan.weak_steps=2")
FULL_LENGTH = (f"run.rounds={BASE_ROUNDS}",)  # a row that stops by its rounds, whatever it sends

ROWS: Mapping[str, Sequence[str]] = {
    "fedavg": ("method=fedavg", *FULL_LENGTH),
    "fedavg-ternary": ("method=fedavg", *TERNARY),
    "paced": (*PACED, *TERNARY),
    "fiarse-ternary": ("method=fiarse-threshold", *TERNARY),
    "heterofl-ternary": ("method=heterofl", *TERNARY),
    "fedluar-ternary": ("method=fedluar", *TERNARY),
    "fedlp-ternary": ("method=fedlp", *TERNARY),
    "cocofl-ternary": ("method=cocofl", "plan.others=hold", *TERNARY),
    "fedpart-ternary": ("method=fedpart", "plan.others=hold", *TERNARY),
    # fewer steps on weak devices
    "fedavg-ternary-few": ("method=fedavg", *TERNARY, *FEW_STEPS),
    "fedavg-ternary-fewer": ("method=fedavg", *TERNARY, *FEWER_STEPS),
    "fiarse-ternary-few": ("method=fiarse-threshold", *TERNARY, *FEW_STEPS),
    "paced-few": (*PACED, *TERNARY, *FEW_STEPS),
    "paced-fewer": (*PACED, *TERNARY, *FEWER_STEPS),
    "paced-few-2": (*PACED, *TERNARY, *FEW_STEPS, "plan.period=2"),
    "paced-fewer-2": (*PACED, *TERNARY, *FEWER_STEPS, "plan.period=2"),
    # devices that hold only their share
    "paced-fits": ("method=fedp3-paced", *TERNARY),
    "fedp3-opu2-ternary": ("method=fedp3-opu2", *TERNARY),
    # one part at a time
    "paced-float": (*PACED, *FLOAT, *FULL_LENGTH),
    "paced-dealt": (*PACED, *TERNARY, "plan.dealt=true"),
    "paced-depth": (*PACED, *TERNARY, "plan.weak_below=0.2", "plan.weak_depth=0.6"),
    "fedavg-int4": ("method=fedavg", *INT4, *FULL_LENGTH),
    "fedavg-ternary-up": (
        *("method=fedavg", "upload.compress=ternary", "upload.entropy=true", *FULL_LENGTH),
    ),
}
# Variants take the learning rate of the row that they vary.
RATES_OF_ROW = {
    "fedavg-ternary-few": "fedavg-ternary",
    "fedavg-ternary-fewer": "fedavg-ternary",
    "fiarse-ternary-few": "fiarse-ternary",
    "fedavg-int4": "fedavg",
    "fedavg-ternary-up": "fedavg",
    **{name: "paced" for name in ROWS if name.startswith("paced-")},
}
# Rows of the claim "ahead of every rival with the same codes"; FedPart is of the same family.
RIVALS = (
    *("fedavg-ternary", "fiarse-ternary", "heterofl-ternary"),
    *("fedluar-ternary", "fedlp-ternary", "cocofl-ternary"),
)
REPORTED_ONLY = ("fedpart-ternary",)

MAIN = ("fedavg", "paced", "fedavg-ternary", "fiarse-ternary")
SECONDS = ("paced-few", "fedavg-ternary-few", "paced-few-2")
MORE_RIVALS = ("heterofl-ternary", "fedluar-ternary", "fedpart-ternary")
REST = ("cocofl-ternary", "fedlp-ternary")
PARTS = ("paced-float", "paced-dealt", "paced-depth", "fedavg-int4", "fedavg-ternary-up")
# (scene, rows, seeds): everything that the claim needs, the most telling first
PROOF: Sequence[tuple[str, Sequence[str], Sequence[int]]] = (
    ("fashion-classes", (*MAIN, *SECONDS, *MORE_RIVALS), (0,)),
    ("cifar10-classes", MAIN, (0,)),
    ("fashion-classes", MAIN, (1, 2)),
    ("cifar10-classes", (*MORE_RIVALS, *SECONDS), (0,)),
    ("cifar10-classes", MAIN, (1, 2)),
    ("fashion-dirichlet", MAIN, (0, 1, 2)),
    ("fashion-classes", (*REST, "paced-fits", "fedp3-opu2-ternary", *PARTS), (0,)),
    ("fashion-classes", (*MAIN, *RIVALS, *SECONDS), (1, 2, 3, 4)),
    ("cifar10-classes", (*MAIN, *RIVALS), (0, 1, 2, 3, 4)),
    ("fashion-dirichlet", (*MAIN, *RIVALS), (0, 1, 2, 3, 4)),
    ("cifar10-dirichlet", MAIN, (0,)),
    ("fashion-half", MAIN, (0, 1, 2)),
    ("fashion-mlp", MAIN, (0, 1, 2)),
    ("cifar10-resnet", MAIN, (0,)),
)


def settings_of(scene: str, row: str, seed: int, lr: float) -> config.Config:
    """The config of one run."""
    most = f"run.rounds={MOST_ROUNDS}"
    overrides = [*COMMON, most, *SCENES[scene], *ROWS[row], f"run.seed={seed}", f"local.lr={lr}"]
    return config.parse({}, overrides)


def byte_share(row: str, share: float) -> float | None:
    """The share of the bytes at which a row stops; None if it stops by its number of rounds."""
    return None if set(FULL_LENGTH) <= set(ROWS[row]) else share


def proof() -> Iterator[tuple[str, str, int]]:
    """Scene, row and seed of every run of the proof, each once."""
    seen = set()
    for scene, rows, seeds in PROOF:
        for seed in seeds:
            for row in rows:
                if (scene, row, seed) not in seen:
                    seen.add((scene, row, seed))
                    yield scene, row, seed
