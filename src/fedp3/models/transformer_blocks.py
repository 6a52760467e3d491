"""The layers of a transformer: one for each block, found by the structure of its modules.

- A block is an element of a list of modules (`ModuleList`, `Sequential`) that contains attention.
  If only one element of a list does, its own lists are searched first: it may be the encoder as a
  whole.
- Attention is a module whose class is named so, as torch's and Hugging Face's are.
- All tensors that are registered before the first block are one layer, the embedding.
- After the last block, every module with tensors of its own is a layer: a final norm, the head.

So attention, MLP and norms of a block belong together.  For finer layers, name them yourself.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from fedp3.core.types import Layer

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


def block_layers(tensors: Iterable[str], blocks: Sequence[str]) -> dict[Layer, tuple[str, ...]]:
    """Group tensors by block.

    Args:
        tensors: the names of all tensors, in order of registration.
        blocks: the paths of the blocks.
    """
    before: list[str] = []
    after: dict[Layer, list[str]] = {}
    inside: dict[Layer, list[str]] = {block: [] for block in blocks}
    for name in tensors:
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        if block is not None:
            inside[block].append(name)
        elif not any(inside.values()):
            before.append(name)
        else:
            after.setdefault(name.rpartition(".")[0] or name, []).append(name)
    embedding = {_common_module(before): before} if before else {}
    return {l: tuple(names) for l, names in (embedding | inside | after).items() if names}


def _common_module(names: Sequence[str]) -> str:
    """The path of the innermost module that has all of these tensors."""
    paths = [name.split(".")[:-1] for name in names]
    common = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ".".join(common) or EMBEDDING
