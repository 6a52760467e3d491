"""What is known about the blocks of transformers, by the class of a block.

The graph of a transformer can often not be traced, and tracing does not know that the outputs of a
linear layer are heads of attention.  So this is written down for the classes that networks are
mostly made of:

- the units of a block, which structured pruning removes: heads of attention, with their parts of
  queries, keys, values and the projection after them, and units of the MLP.  Heads that share keys
  and values (grouped queries) are one unit;
- that a block is residual: it adds to what it reads, so that a network works without it;
- which of its parts are its attention, for finer layers than blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fedp3.core.types import Axis, Group, UnitGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """The parts of a block, as paths from it.

    Args:
        attention: its children that are attention and the norm of it; the others are its MLP.
        query: the projection to queries, or to queries, keys and values at once.
        key: the projection to keys; empty if queries, keys and values are projected at once.
        value: the projection to values, likewise.
        out: the projection of what the heads return; empty if heads cannot be pruned.
        head_width: where the width of a head is.
        mlp_in: the layers that write the units of the MLP; more than one are multiplied.  Empty if
            tracing finds them.
        mlp_out: the layer that reads them.
        activation: the function between them.
        transposed: whether weights are stored as (inputs, outputs).
    """

    attention: tuple[str, ...]
    query: str = ""
    key: str = ""
    value: str = ""
    out: str = ""
    head_width: str = ""
    mlp_in: tuple[str, ...] = ()
    mlp_out: str = ""
    activation: str = ""
    transposed: bool = False


_BERT = BlockKind(
    attention=("attention",),
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
    head_width="attention.self.attention_head_size",
    mlp_in=("intermediate.dense",),
    mlp_out="output.dense",
    activation="intermediate.intermediate_act_fn",
)
_HF = "transformers.models"
# The full name of a class -> what is known about it.
BLOCK_KINDS: Mapping[str, BlockKind] = {
    "fedp3.models.transformers.Block": BlockKind(
        attention=("norm1", "attention"),
        query="attention.qkv",
        out="attention.out",
        head_width="attention.head_width",
    ),
    "torch.nn.modules.transformer.TransformerEncoderLayer": BlockKind(
        attention=("self_attn", "norm1")
    ),
    f"{_HF}.bert.modeling_bert.BertLayer": _BERT,
    f"{_HF}.roberta.modeling_roberta.RobertaLayer": _BERT,
    f"{_HF}.distilbert.modeling_distilbert.TransformerBlock": BlockKind(
        attention=("attention", "sa_layer_norm"),
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        out="attention.out_lin",
        head_width="attention.attention_head_size",
        mlp_in=("ffn.lin1",),
        mlp_out="ffn.lin2",
        activation="ffn.activation",
    ),
    f"{_HF}.gpt2.modeling_gpt2.GPT2Block": BlockKind(
        attention=("ln_1", "attn"),
        query="attn.c_attn",
        out="attn.c_proj",
        head_width="attn.head_dim",
        mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj",
        activation="mlp.act",
        transposed=True,
    ),
    f"{_HF}.llama.modeling_llama.LlamaDecoderLayer": BlockKind(
        attention=("input_layernorm", "self_attn"),
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        out="self_attn.o_proj",
        head_width="self_attn.head_dim",
        mlp_in=("mlp.gate_proj", "mlp.up_proj"),
        mlp_out="mlp.down_proj",
        activation="mlp.act_fn",
    ),
    f"{_HF}.vit.modeling_vit.ViTLayer": BlockKind(
        attention=("layernorm_before", "attention"),
        query="attention.q_proj",
        key="attention.k_proj",
        value="attention.v_proj",
        out="attention.o_proj",
        head_width="attention.head_dim",
        mlp_in=("mlp.fc1",),
        mlp_out="mlp.fc2",
        activation="mlp.activation_fn",
    ),
}


def full_name(m: nn.Module) -> str:
    """The name of a module's class, with the file that it is defined in."""
    return f"{type(m).__module__}.{type(m).__qualname__}"


def kind_of(block: nn.Module) -> BlockKind | None:
    """What is known about a block; None if its class is not."""
    return BLOCK_KINDS.get(full_name(block))


# --------------------------------------------------------------------------- units


@dataclass(frozen=True, slots=True)
class KnownUnits:
    """The units of a block: groups of them, and the dimensions of tensors that they are along."""

    groups: Mapping[Group, UnitGroup]
    axes: Mapping[str, tuple[Axis | None, ...]]


def known_units(path: str, block: nn.Module, *, heads: bool) -> KnownUnits:
    """The units of a block of a known kind; none if its class is not known.

    Args:
        path: of the block.
        block: the block.
        heads: whether its attention heads are units; else they are fixed.
    """
    groups: dict[Group, UnitGroup] = {}
    axes: dict[str, tuple[Axis | None, ...]] = {}
    kind = kind_of(block)
    if kind is None or not _has_weights(block, kind):
        return KnownUnits(groups, axes)

    def connect(name: str, writes: Axis | None, reads: Axis | None) -> None:
        """Record the units that a layer writes and reads."""
        sides = (reads, writes) if kind.transposed else (writes, reads)
        axes[f"{path}.{name}.weight"] = sides
        if getattr(block.get_submodule(name), "bias", None) is not None:
            axes[f"{path}.{name}.bias"] = (writes,)

    if kind.out and (heads or kind.mlp_in):
        width = int(attrgetter(kind.head_width)(block))
        fixed = "" if heads else "[prune] heads is false"
        fused = not kind.key
        group = f"{path}.{kind.query if fused else kind.key}"
        key_width = _outputs(block, kind.key or kind.query, kind) // (3 if fused else 1)
        groups[group] = UnitGroup(key_width // width, "", fixed=fixed, heads=True)
        # Several heads of queries may share one of keys and values; then they are one unit.
        shared = _inputs(block, kind.out, kind) // key_width
        if fused:
            connect(kind.query, Axis(group, width, parts=3), None)
        else:
            connect(kind.query, Axis(group, shared * width), None)
            connect(kind.key, Axis(group, width), None)
            connect(kind.value, Axis(group, width), None)
        connect(kind.out, None, Axis(group, shared * width))
    if kind.mlp_in:
        group = f"{path}.{kind.mlp_in[0]}"
        activation = attrgetter(kind.activation)(block)
        fixed = "" if _maps_zero_to_zero(activation) else "the activation does not map 0 to 0"
        groups[group] = UnitGroup(_outputs(block, kind.mlp_in[0], kind), "", fixed=fixed)
        for name in kind.mlp_in:
            connect(name, Axis(group), None)
        connect(kind.mlp_out, None, Axis(group))
    return KnownUnits(groups, axes)


def _has_weights(block: nn.Module, kind: BlockKind) -> bool:
    """Whether all layers of a block have weights of their own, which adapters may have replaced."""
    paths = (kind.query, kind.key, kind.value, kind.out, *kind.mlp_in, kind.mlp_out)
    layers = [block.get_submodule(path) for path in paths if path]
    return all(isinstance(m._parameters.get("weight"), nn.Parameter) for m in layers)


def _outputs(block: nn.Module, name: str, kind: BlockKind) -> int:
    weight: Any = block.get_submodule(name).weight
    return int(weight.shape[1 if kind.transposed else 0])


def _inputs(block: nn.Module, name: str, kind: BlockKind) -> int:
    weight: Any = block.get_submodule(name).weight
    return int(weight.shape[0 if kind.transposed else 1])


def _maps_zero_to_zero(activation: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    return float(activation(torch.zeros(1))) == 0.0


# --------------------------------------------------------------------------- smaller blocks


def _resize_gpt2_attention(m: Any) -> None:
    m.split_size = m.c_proj.weight.shape[0]  # the width of queries, keys and values each


def _resize_transposed_linear(m: Any) -> None:
    m.nx, m.nf = m.weight.shape


# How to set attributes that repeat the shapes of tensors, where the class is known by name alone.
RESIZE_BY_NAME: Mapping[str, Callable[[Any], None]] = {
    "transformers.pytorch_utils.Conv1D": _resize_transposed_linear,
    f"{_HF}.gpt2.modeling_gpt2.GPT2Attention": _resize_gpt2_attention,
}
