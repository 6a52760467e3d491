"""The formats of an exported network: safetensors, torch.export (pt2), ONNX, and transformers' own.

Each writes a network to a file and reads it again, so that an export can be compared with the
network.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedp3.core.errors import InputError
from fedp3.core.registry import Registry
from fedp3.models.hf import again_from, inner_model
from fedp3.runs.networks import outputs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of a network on disk.

    Args:
        suffix: of the file.
        write: writes a network, traced with these inputs, to a file.
        read: returns a function that computes the network in that file, for the check.
        lines: the Python code of the README.
        needs: modules that it needs, by the names of what installs them.
        any_net: it also holds networks that a method has added something to.
        several_inputs: it also holds networks that read more than one tensor.
    """

    suffix: str
    write: Callable[[nn.Module, Tensor, Path], None]
    read: Callable[[Path, nn.Module], Callable[[Tensor], Tensor]]
    lines: str
    needs: Mapping[str, str]
    any_net: bool = True
    several_inputs: bool = False


FORMATS: Registry[Format] = Registry("format")


def _write_safetensors(net: nn.Module, x: Tensor, path: Path) -> None:
    save_file({n: w.detach().clone().contiguous() for n, w in net.state_dict().items()}, path)


def _read_safetensors(path: Path, net: nn.Module) -> Callable[[Tensor], Tensor]:
    again = deepcopy(net)
    for w in again.state_dict().values():
        w.zero_()
    again.load_state_dict(load_file(path))
    return lambda x: outputs_of(again, x)


FORMATS.add(
    "safetensors",
    Format(
        suffix="safetensors",
        write=_write_safetensors,
        read=_read_safetensors,
        lines="""\
from safetensors.torch import load_file

net.load_state_dict(load_file("model.safetensors"))  # net: your network, of the sizes below
outputs = net.eval()(x)
""",
        needs={},
        any_net=False,
    ),
)


def _write_pt2(net: nn.Module, x: Tensor, path: Path) -> None:
    program = torch.export.export(_traceable(net), (x,), dynamic_shapes=(_any_batch(),))
    program.example_inputs = None  # otherwise the file would contain them
    torch.export.save(program, path)


def _any_batch() -> dict[int, Any]:
    return {0: torch.export.Dim("batch", min=1)}


def _traceable(net: nn.Module) -> nn.Module:
    """The network, one level deeper if a module of it has a name that a traced graph needs."""
    clash = any(hasattr(torch.fx.GraphModule, name) for name, _ in net.named_children())
    return nn.Sequential(net).eval() if clash else net


def _read_pt2(path: Path, net: nn.Module) -> Callable[[Tensor], Tensor]:
    again = torch.export.load(path).module()
    return lambda x: outputs_of(again, x)


FORMATS.add(
    "pt2",
    Format(
        suffix="pt2",
        write=_write_pt2,
        read=_read_pt2,
        lines="""\
import torch

net = torch.export.load("model.pt2").module()
outputs = net(x)
""",
        needs={},
    ),
)


def _write_onnx(net: nn.Module, x: Tensor, path: Path) -> None:
    torch.onnx.export(
        _traceable(net),
        (x,),
        path,
        dynamo=True,
        dynamic_shapes=(_any_batch(),),
        input_names=["x"],
        output_names=["outputs"],
        external_data=False,
        verbose=False,
    )


def _read_onnx(path: Path, net: nn.Module) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


FORMATS.add(
    "onnx",
    Format(
        suffix="onnx",
        write=_write_onnx,
        read=_read_onnx,
        lines="""\
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(outputs,) = session.run(None, {"x": x})  # x is a NumPy array
""",
        needs=dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "'fedp3[onnx]'"),
    ),
)


def _write_hf(net: nn.Module, x: Any, path: Path) -> None:
    model: Any = inner_model(net)
    if model is None:
        raise InputError("only networks of model.name = 'hf' are models of transformers")
    model.save_pretrained(path.parent, safe_serialization=True)


def _read_hf(path: Path, net: nn.Module) -> Callable[[Any], Tensor]:
    again = again_from(net, path.parent)
    return lambda x: outputs_of(again, x)


FORMATS.add(
    "hf",
    Format(
        suffix="safetensors",
        write=_write_hf,
        read=_read_hf,
        lines="""\
from transformers import AutoConfig
import transformers

architecture = AutoConfig.from_pretrained(".").architectures[0]
net = getattr(transformers, architecture).from_pretrained(".")
outputs = net(**x).logits
""",
        needs={"transformers": "'fedp3[hf]'"},
        any_net=False,
        several_inputs=True,
    ),
)
