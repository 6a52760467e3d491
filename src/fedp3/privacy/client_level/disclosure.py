"""The statement of client-level DP: what a reader of a run must know about its guarantee."""

from collections.abc import Mapping

from fedp3.core.types import Layer
from fedp3.privacy import accountant
from fedp3.privacy.client_level.mechanism import divisors
from fedp3.privacy.disclosure import MAX_STEPS, WEAK_EPSILON
from fedp3.privacy.settings import Budget

PROTECTS = (
    "all training data of a client, its labels and its taking part in any round, against everybody "
    "who sees the released models, including other clients; not against the server"
)
ADJACENCY = "add/remove one client, whose uploads are replaced by zero while all plans stay"
INSIDE = (
    "the model after every round, buffers included, as the server sends it to clients and at the "
    "end: every layer that some plan uploads",
    "everything that is computed from these models alone, such as the pruning masks",
)
OUTSIDE = (
    "the uploads themselves, which the server sees without noise",
    "the run folder, which is the server's private record: participants, rejections, training "
    "loss, scores G, D and P over clients and of each client, labels, the ledger",
    "checkpoints, which also contain the clients' own layers and states in a simulation",
    "the report and the output of commands, which show these numbers",
    "how long a round takes, and which clients exchange messages with the server",
    "the number of clients, their plans and capacities, which are public",
    "the mean and deviation that normalise inputs, where a data set provides them",
    "settings that were tuned on these data, and other runs over the same clients, such as "
    "several seeds: their epsilons add up",
)
ASSUMES = (
    "the server follows the protocol, and keeps uploads, its record and its random draws secret",
    "who takes part in a round stays secret: against whoever can see it, sampling reduces nothing",
    "whether a client answers, and what, does not depend on which other clients take part",
    "nobody is more than one client",
)


def described(budget: Budget, uploaders: Mapping[Layer, int]) -> dict[str, object]:
    """Everything that gives a client-level epsilon its meaning.

    Args:
        budget: what the run may cost, and its mechanism.
        uploaders: n_l of the first round.
    """
    mechanism = budget.mechanism
    of_sum = mechanism.noise_multiplier * mechanism.clip
    return {
        "level": "client",
        "protects": PROTECTS,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "noise_multiplier": mechanism.noise_multiplier,
        "sample_rate": mechanism.sample_rate,
        "clip": mechanism.clip,
        "accountant": accountant.describe(),
        "adjacency": ADJACENCY,
        "sampling": accountant.SAMPLING,
        "randomness": mechanism.randomness,
        "allowed_rounds": min(budget.allowed_steps, MAX_STEPS),
        "uploaders": dict(uploaders),
        # standard deviation of the noise on each weight of a layer in one round
        "noise": {l: of_sum / d for l, d in divisors(uploaders, mechanism).items()},
        "inside": list(INSIDE),
        "outside": list(OUTSIDE),
        "assumes": list(ASSUMES),
    }


def warnings(budget: Budget) -> dict[str, str]:
    """What limits the client-level guarantee of a run, by its id."""
    texts = {
        "C1": "client-level DP protects clients from those who see the model, not from the server, "
        "which sees every upload without noise"
    }
    if budget.mechanism.randomness == "seeded":
        texts["C2"] = (
            "simulation only: participants and noise are drawn from run.seed, so whoever knows the "
            "seed can remove the noise"
        )
    if budget.epsilon > WEAK_EPSILON:
        texts["C3"] = (
            f"a client-level epsilon of {budget.epsilon:g} is a weak guarantee: above "
            f"{WEAK_EPSILON:g} little is promised"
        )
    texts["C4"] = "not in the client-level epsilon: " + "; ".join(OUTSIDE)
    return texts
