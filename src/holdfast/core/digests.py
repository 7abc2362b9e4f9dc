"""SHA-256 of tensors, for the audit log."""

from __future__ import annotations

from hashlib import sha256

import torch

from holdfast.core.trees import Tree, leaves


def digest(tree: Tree) -> str:
    """The SHA-256 of a tree: for each tensor, in the order of paths, its path, dtype and shape, then its bytes."""
    found = sha256()
    for path, value in sorted(leaves(tree), key=lambda leaf: leaf[0]):
        dtype, shape = str(value.dtype).removeprefix("torch."), ",".join(map(str, value.shape))
        found.update(f"{path} {dtype} {shape}\n".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


class PendingDigest:
    """The digest of tensors on a device, which are copied at once; only ``wait`` waits for the device."""

    def __init__(self, tree: Tree) -> None:
        self._copies = {path: value.detach().to("cpu", non_blocking=True) for path, value in leaves(tree)}
        self._copied = None
        if any(value.is_cuda for _, value in leaves(tree)):
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> str:
        """The digest, once the tensors are copied."""
        if self._copied is not None:
            self._copied.synchronize()
        return digest(dict(self._copies))
