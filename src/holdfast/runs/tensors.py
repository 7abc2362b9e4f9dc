"""Conversion of named tensors to safetensors bytes and back, with the same values, dtypes and order."""

import json
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

State = dict[str, Tensor]


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise named tensors on any device; they may be views and share memory."""
    # safetensors accepts neither views nor tensors that share memory.
    copies = {
        name: tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, tensor in tensors.items()
    }
    # safetensors sorts the names, but sums over a state must have the same order after a resume.
    return bytes(save(copies, metadata={"order": json.dumps(list(copies))}))


def from_bytes(data: bytes) -> State:
    """Load the tensors onto the CPU, in the order given to ``to_bytes``; by name if another program wrote them.

    Raises ``ValueError`` if the bytes are not safetensors.
    """
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        order = json.loads(header.get("__metadata__", {}).get("order", "null")) or sorted(tensors)
        return {name: tensors[name] for name in order}
    except Exception as error:  # safetensors has a different class for each kind of damage
        raise ValueError(f"not a safetensors file: {error}") from error


def byte_count(tensors: Mapping[str, Tensor]) -> int:
    """The size of the tensors' values in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
