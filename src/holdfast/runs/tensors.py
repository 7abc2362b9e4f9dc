"""Named tensors to safetensors bytes and back: same values, same dtypes, same order."""

import json
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

State = dict[str, Tensor]


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Safetensors bytes of named tensors on any device, contiguous or not, sharing memory or not."""
    # A copy of its own for each: safetensors refuses views, and tensors that share memory.
    own = {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, tensor in tensors.items()
    }
    # Safetensors sorts the names, but sums over a state must run in the same order after a resume.
    return bytes(save(own, metadata={"order": json.dumps(list(own))}))


def from_bytes(data: bytes) -> State:
    """The tensors ``to_bytes`` was given, on the CPU; those of another writer in the order of their names.

    Raises ``ValueError`` where the bytes are not safetensors.
    """
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        order = json.loads(header.get("__metadata__", {}).get("order", "null")) or sorted(tensors)
        return {name: tensors[name] for name in order}
    except Exception as error:  # safetensors raises a class of its own for each kind of damage
        raise ValueError(f"not a safetensors file: {error}") from error


def byte_count(tensors: Mapping[str, Tensor]) -> int:
    """The bytes the values of these tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
