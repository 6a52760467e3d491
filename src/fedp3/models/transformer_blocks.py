"""The layers of a transformer: one for each block, found by the structure of its modules.

- A block is an element of a list of modules (`ModuleList`, `Sequential`) that contains attention.
  If only one element of a list does, its own lists are searched first: it may be the encoder as a
  whole.
- Attention is a module whose class is named so, as torch's and Hugging Face's are.
- All tensors that are registered before the first block are one layer, the embedding.
- After the last block, every module with tensors of its own is a layer: a final norm, the head.

So attention, MLP and norms of a block belong together.  On request, attention and MLP are layers of
their own, each with its norm, where the class of the block is known (`block_kinds`).
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from fedp3.core.errors import InputError, type_of
from fedp3.core.types import Layer
from fedp3.models.block_kinds import kind_of

ATTENTION, MLP = "attention", "mlp"  # the two layers of a block, where they are apart
EMBEDDING = "embedding"  # the layer before the blocks, if its modules have no common name


def find_blocks(net: nn.Module, path: str = "") -> list[str]:
    """The paths of a transformer's blocks, in order; none if the network is no transformer."""
    children = [(f"{path}.{name}" if path else name, m) for name, m in net.named_children()]
    if isinstance(net, nn.ModuleList | nn.Sequential):
        attending = [(inner, m) for inner, m in children if _contains_attention(m)]
        if len(attending) > 1:
            return [inner for inner, _ in attending]
        children = attending
        return [deeper for inner, m in children for deeper in find_blocks(m, inner) or [inner]]
    return [block for inner, m in children for block in find_blocks(m, inner)]


def _contains_attention(m: nn.Module) -> bool:
    return any("attention" in type(inner).__name__.lower() for inner in list(m.modules())[1:])


def block_layers(
    tensors: Iterable[str], blocks: Mapping[str, nn.Module], *, sublayers: bool = False
) -> dict[Layer, tuple[str, ...]]:
    """Group tensors by block.

    Args:
        tensors: the names of all tensors, in order of registration.
        blocks: the blocks, by path.
        sublayers: attention and MLP of a block are two layers.
    """
    before: list[str] = []
    after: dict[Layer, list[str]] = {}
    parts = {path: _parts(path, block) if sublayers else None for path, block in blocks.items()}
    inside: dict[Layer, list[str]] = {}
    for path in blocks:
        for layer in (f"{path}.{ATTENTION}", f"{path}.{MLP}") if sublayers else (path,):
            inside[layer] = []
    for name in tensors:
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        if block is not None:
            attention = parts[block]
            layer = block
            if attention is not None:
                child = name.removeprefix(f"{block}.").partition(".")[0]
                layer = f"{block}.{ATTENTION if child in attention else MLP}"
            inside[layer].append(name)
        elif not any(inside.values()):
            before.append(name)
        else:
            after.setdefault(name.rpartition(".")[0] or name, []).append(name)
    embedding = {_embedding_name(before, blocks): before} if before else {}
    return {l: tuple(names) for l, names in (embedding | inside | after).items() if names}


def _parts(path: str, block: nn.Module) -> tuple[str, ...]:
    """The children of a block that are its attention."""
    kind = kind_of(block)
    if kind is None:
        raise InputError(
            f"[model] layers: the parts of {path}, {type_of(block)}, are not known; set "
            "'blocks', or pass layers= to fedp3.run"
        )
    return kind.attention


def _embedding_name(names: Sequence[str], blocks: Iterable[str]) -> str:
    """The path of the innermost module that has all of these tensors, and no blocks."""
    paths = [name.split(".")[:-1] for name in names]
    common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    path = ".".join(common)
    return EMBEDDING if not path or any(b.startswith(f"{path}.") for b in blocks) else path
