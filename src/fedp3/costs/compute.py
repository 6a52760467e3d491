"""FLOPs and peak memory of a client's training step, counted without training anything."""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedp3.client.objectives import CLASSIFICATION, Objective
from fedp3.client.sgd import prepare
from fedp3.core.errors import InputError
from fedp3.core.randomness import Stream, layers_draw_from, stream
from fedp3.core.types import ClientPlan, Group, Layer, LayerMap
from fedp3.costs.cpu_kernels import FusedAttention, working_bytes
from fedp3.costs.traffic import VALUE, block_share, unit_counts
from fedp3.data.inputs import Batch, call, map_tensors, tensors_of
from fedp3.models import shrinking
from fedp3.models.frozen import copy_network, frozen_tensors
from fedp3.models.skipping import blocks_left_out, left_out
from fedp3.planning.prune_settings import PruneSettings
from fedp3.privacy.clipping import gradient_pieces
from fedp3.privacy.mechanism import NOISE_CHUNK
from fedp3.privacy.settings import Mechanism

# The meta device computes nothing; a network whose control flow depends on values needs the CPU.
DEVICES = ("meta", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile:
    """The FLOPs of one network, and a copy of it to count memory with.

    Args:
        forward: for each weight tensor the FLOPs of one example's forward pass.
        net: a copy of the network on `device`.
        example: one record of zeros.
        objective: the loss whose gradient a step computes.
        device: where the network can run: "meta" if possible, else "cpu".
    """

    forward: Mapping[str, int]
    net: nn.Module
    example: Batch
    objective: Objective = CLASSIFICATION
    device: str = "meta"


# --------------------------------------------------------------------------- FLOPs


def measure(net: nn.Module, shape: tuple[int, ...]) -> ComputeProfile:
    """Count the forward pass of one example of this shape, whose step is one of classification."""
    label = torch.zeros(1, dtype=torch.int64)
    return measure_on(net, Batch(torch.zeros(1, *shape), label), CLASSIFICATION)


def measure_on(net: nn.Module, like: Batch, objective: Objective) -> ComputeProfile:
    """Count the forward pass of one example, module by module.

    Args:
        net: the network.
        like: at least one record; its values are not used.
        objective: the loss of a step.
    """
    reason = ""
    for device in DEVICES:
        scratch = copy_network(net).to(device).eval()
        zeros = _zeros(like, 1, device)
        counter = FlopCounterMode(display=False)
        try:
            with counter, torch.no_grad(), layers_draw_from(stream(0, Stream.LAYER)):
                call(scratch, zeros.x)
        except Exception as error:  # a user's forward pass may raise anything
            reason = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        forward = _flops_by_weight(scratch, counter)
        return ComputeProfile(
            forward=forward, net=scratch, example=zeros, objective=objective, device=device
        )
    shapes = ", ".join(str(tuple(w.shape[1:])) for w in tensors_of(like.x))
    raise InputError(f"the network does not take one example of shape {shapes}: {reason}")


def _zeros(like: Batch, records: int, device: str) -> Batch:
    """A batch of zeros, whose records have the shapes and types of these."""

    def of(w: Tensor) -> Tensor:
        return torch.zeros((records, *w.shape[1:]), dtype=w.dtype, device=device)

    return Batch(map_tensors(of, like.x), of(like.y))


def _flops_by_weight(net: nn.Module, counter: FlopCounterMode) -> dict[str, int]:
    """Forward FLOPs of one example, by weight tensor; only tensors of two or more dimensions count.

    The FLOPs of a module, without those of its submodules, are divided among its weights by size.
    A module without weights of its own, such as a block that multiplies queries by keys, divides
    its FLOPs among the weights of its submodules.
    """
    with_submodules = {
        path.partition(".")[2]: sum(operations.values())
        for path, operations in counter.get_flop_counts().items()
    }

    def counted_module(path: str) -> str:
        """The nearest module that ran: a parent may use its child's weights without calling it."""
        while path and path not in with_submodules:
            path = path.rpartition(".")[0]
        return path

    by_module = dict(with_submodules)
    for path, count in with_submodules.items():
        if path:
            by_module[counted_module(path.rpartition(".")[0])] -= count
    # A tensor that is used in two places (tied weights) has the FLOPs of each under its name there.
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **frozen_tensors(net)}
    weights = {n: w.numel() for n, w in tensors.items() if w.dim() >= 2}
    modules = {n: counted_module(n.rpartition(".")[0]) for n in weights}
    total = dict.fromkeys(weights, 0.0)
    for path, count in by_module.items():
        own = [n for n in weights if modules[n] == path]
        below = [n for n in weights if not path or modules[n].startswith(f"{path}.")]
        bearers = own or below
        size = sum(weights[n] for n in bearers)
        for n in bearers:
            total[n] += count * weights[n] / size
    return {n: round(count) for n, count in total.items()}


def flops(
    profile: ComputeProfile,
    plan: ClientPlan,
    layers: LayerMap,
    pruning: PruneSettings,
    step_units: Mapping[Group, int] | None = None,
) -> int:
    """FLOPs of one example's forward and backward pass at one client.

    Each weight costs its forward pass, as much again for its gradient if it is trained, and as
    much again to pass the gradient on if anything before it is trained: an earlier layer, or an
    earlier tensor of the same layer.  Pruned units cost nothing where the network is physically
    smaller; weights and units that are only masked cost as much as before.

    Args:
        profile: the FLOPs of the dense network.
        plan: the client's plan.
        layers: the model's layers.
        pruning: the run's pruning.
        step_units: the number of units that local pruning leaves in some groups.
    """
    units: Mapping[Group, int] = {}
    if pruning.shrinks:
        units = {**unit_counts(plan, layers, pruning), **(step_units or {})}
    total = _frozen_flops(profile, plan, layers, units)
    trained_before = False
    for l, names in layers.layers.items():
        p = plan.layers[l]
        if p.send == "skip":
            continue
        for n in names:
            if n not in profile.forward:
                continue
            passes = 1
            if p.train:
                passes += 1
            if trained_before or (p.train and l == _source_layer(n, layers)):
                passes += 1
            total += profile.forward[n] * block_share(n, units, layers) * passes
        trained_before = trained_before or p.train
    for alias, n in layers.aliases.items():  # second uses, which come after all blocks
        trains = any(p.train and n in layers.layers[l] for l, p in plan.layers.items())
        total += profile.forward.get(alias, 0) * (1 + trains + trained_before)
    return round(total)


def _frozen_flops(
    profile: ComputeProfile, plan: ClientPlan, layers: LayerMap, units: Mapping[Group, int]
) -> float:
    """The FLOPs of frozen weights: forward, and to pass on the gradient to what trains before."""
    trains = [plan.layers[l].train for l in layers.layers]
    total = 0.0
    for n, w in layers.frozen.items():
        if n in profile.forward and not (w.layer and plan.layers[w.layer].send == "skip"):
            passes = 2 if any(trains[: w.after]) else 1
            total += profile.forward[n] * block_share(n, units, layers) * passes
    return total


def _source_layer(name: str, layers: LayerMap) -> Layer | None:
    """The layer whose units this weight reads; None where that is not known."""
    axes = layers.axes.get(name, ())
    inputs = axes[1] if len(axes) > 1 else None
    if inputs is None or inputs.group not in layers.groups:
        return None
    return layers.groups[inputs.group].layer


# --------------------------------------------------------------------------- time

# Chosen from measured windows of MobileNet; every ratio from 2 to 15 orders them almost as well,
# and other networks hardly depend on it (docs/devices.md).
FLOPS_PER_BYTE = 5.0


def time_flops(flops: float, moved: float) -> float:
    """The FLOPs that take as long as a step with these FLOPs and bytes.

    FLOPs alone tell how long a step takes if it mostly multiplies matrices.  Normalisation,
    activations, pooling and convolutions of one channel mostly move memory, at a speed that is
    assumed to be a fixed ratio of the speed of computing.

    Args:
        flops: the FLOPs of a step, `flops` times the number of examples.
        moved: `StepBytes.moved`.
    """
    return flops + FLOPS_PER_BYTE * moved


# --------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The memory of one training step.

    Args:
        peak: the most bytes that tensors take at once.
        moved: the bytes that operations read and write, summed over the step.
    """

    peak: int
    moved: int


def peak_bytes(
    profile: ComputeProfile,
    plan: ClientPlan,
    layers: LayerMap,
    pruning: PruneSettings,
    batch: int,
    slots: int,
    private: Mechanism | None = None,
) -> int:
    """Peak memory of one training step; see `step_bytes`."""
    return step_bytes(profile, plan, layers, pruning, batch, slots, private).peak


def step_bytes(
    profile: ComputeProfile,
    plan: ClientPlan,
    layers: LayerMap,
    pruning: PruneSettings,
    batch: int,
    slots: int,
    private: Mechanism | None = None,
) -> StepBytes:
    """Memory of one training step on a CPU, in tensors.

    The peak has weights, what the optimizer remembers, activations from the lowest trained layer
    on, gradients, and the copies that convolutions work on.  A process has more in memory than its
    tensors: the program itself, and what its allocator does not return to the system.

    Args:
        profile: the dense network.
        plan: the client's plan; where it computes a batch in parts, their gradients are added up,
            which needs memory for the sum.
        layers: the model's layers.
        pruning: the run's pruning.
        batch: the number of examples in the step.
        slots: how many numbers the optimizer remembers per trained weight: 1 for momentum, 2 for
            Adam.
        private: how gradients are clipped by record; None without LDP.
    """
    units = unit_counts(plan, layers, pruning)
    if units and pruning.shrinks:  # the client trains a smaller network
        profile = replace(profile, net=shrinking.shrink_net(profile.net, layers, units))
        layers = shrinking.shrink_map(layers, units)
    trained = prepare(profile.net, plan, layers)
    at_once = math.ceil(batch / plan.split)
    with left_out(profile.net, blocks_left_out(plan, layers)):
        if private is None:
            memory = _both_passes(profile, trained, at_once)
        else:
            memory = _private_passes(profile, trained, at_once, private)
    # A device does not hold the blocks that it leaves out.
    absent = {l for block in blocks_left_out(plan, layers) for l in layers.residual[block]}
    sizes = {
        n: math.prod(layers.shapes[n])
        for l, names in layers.layers.items()
        if l not in absent
        for n in names
    }
    stored, learned = sum(sizes.values()), sum(sizes[n] for n in trained)
    stored += sum(
        math.prod(w.shape) for w in layers.frozen.values() if not w.tied and w.layer not in absent
    )
    update, touched = learned, 3 * learned  # the step reads W and the gradient, and writes W
    largest = max((sizes[n] for n in trained), default=0)
    if private is not None:  # noise is drawn twice, the second time in pieces
        update += min(NOISE_CHUNK, largest)
    if slots:
        stored += slots * learned
        update = max(update, learned + 2 * largest)  # the new state of one tensor
        touched += (12 * slots - 4) * learned  # counted in the code of the optimizers
    if plan.split > 1 and private is None:  # the gradients of the parts of a batch are added up
        stored += learned
        touched += 3 * learned * plan.split
    return StepBytes(
        peak=VALUE * stored + max(memory.peak, VALUE * update),
        moved=plan.split * memory.moved + VALUE * touched,
    )


def _both_passes(profile: ComputeProfile, trained: Sequence[str], batch: int) -> "_MemoryCounter":
    """Follow the tensors of a forward and a backward pass; those of the network do not count."""
    net = profile.net
    parameters = dict(net.named_parameters())
    memory = _MemoryCounter(net)
    with layers_draw_from(stream(0, Stream.LAYER)), FusedAttention(), memory:
        # A client holds the batch until the step is over, but not the logits.
        records = _zeros(profile.example, batch, profile.device)
        loss = profile.objective.mean(call(net, records.x), records)
        grads: Sequence[Tensor] = ()
        if loss.requires_grad:
            weights = [parameters[n] for n in trained]
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
    net.eval()
    del grads  # not earlier: in a real step they are alive to the end
    return memory


def _private_passes(
    profile: ComputeProfile, trained: Sequence[str], batch: int, private: Mechanism
) -> "_MemoryCounter":
    """Follow the tensors of a step whose gradients are clipped by record and added up."""
    net, device = profile.net, profile.device
    parameters = dict(net.named_parameters())
    W = {n: parameters[n] for n in trained}
    memory = _MemoryCounter(net)
    with layers_draw_from(stream(0, Stream.LAYER)), memory:
        records = _zeros(profile.example, batch, device)
        sums = {n: torch.zeros(w.shape, device=device) for n, w in W.items()}
        loss = profile.objective.loss
        pieces, squares = gradient_pieces(net, records.x, records.y, W, {}, private, loss)
        broken = torch.zeros(0, dtype=torch.int64, device=device)
        for n, (_, add) in pieces.items():
            add(sums[n], squares, broken)
    net.eval()
    del sums, pieces  # not earlier: in a real step they are alive to the end
    return memory


# Views of a tensor that nobody else sees; torch does not call them views.
MORE_VIEWS = (torch.ops.aten._unsafe_view.default,)


class _MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storage of every tensor that an operation makes until it is freed.

    It also sums the bytes that operations read and write; a view does neither.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = [*net.parameters(), *net.buffers()]
        # Bytes of each storage, by its address; the network's tensors do not count.
        self.sizes = {w.untyped_storage()._cdata: 0 for w in tensors}
        self.current = 0
        self.peak = 0
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.current
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, before + working_bytes(func, args, result))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for leaf in results:
            if leaf.untyped_storage()._cdata not in self.sizes:
                self._add(leaf.untyped_storage())
        if not func.is_view and func not in MORE_VIEWS:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.moved += sum(leaf.nbytes for leaf in (*read, *results))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self.sizes[storage._cdata] = storage.nbytes()
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, address: int) -> None:
        self.current -= self.sizes.pop(address)
