"""FedJAX's federated averaging, in its jitted backend.

pip install git+https://github.com/google/fedjax 'jax[cuda13]' .
python benchmarks/peers/fedjax_simulation.py [--only W] [--passes 5] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the GPU's memory

import fedjax
import jax
import jax.numpy as jnp
from against import LR, MOMENTUM, Work, main
from fedjax.algorithms import fed_avg
from torch import nn


def parameters_of(net: nn.Module) -> dict:
    """Weights and biases by layer: convolutions' (height, width, in, out), linear layers' (in, out)."""
    found = {}
    for name, layer in net.named_children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            order = (2, 3, 1, 0) if isinstance(layer, nn.Conv2d) else (1, 0)
            found[name] = {
                "weight": jnp.array(layer.weight.detach().permute(order).cpu().numpy()),
                "bias": jnp.array(layer.bias.detach().cpu().numpy()),
            }
    return found


def apply(net: nn.Module, parameters: dict, x: jax.Array) -> jax.Array:
    """The output of ``net`` for images ``x`` (channels last) with these parameters."""
    for name, layer in net.named_children():
        match layer:
            case nn.Conv2d():
                weight, bias = parameters[name]["weight"], parameters[name]["bias"]
                padding = [(pad, pad) for pad in layer.padding]
                sizes = ("NHWC", "HWIO", "NHWC")
                x = jax.lax.conv_general_dilated(x, weight, (1, 1), padding, dimension_numbers=sizes) + bias
            case nn.Linear():
                x = x @ parameters[name]["weight"] + parameters[name]["bias"]
            case nn.ReLU():
                x = jax.nn.relu(x)
            case nn.MaxPool2d():
                window = (1, layer.kernel_size, layer.kernel_size, 1)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
            case nn.Flatten():  # torch's features are channels first
                x = jnp.moveaxis(x, -1, 1).reshape(len(x), -1)
            case _:
                raise TypeError(f"{type(layer).__name__} has no translation to JAX")
    return x


def rounds_of(work: Work) -> Callable[[], object]:
    def loss(parameters: dict, batch: dict, rng: jax.Array) -> jax.Array:
        logarithms = jax.nn.log_softmax(apply(work.net, parameters, batch["x"]))
        return -jnp.take_along_axis(logarithms, batch["y"][:, None], 1).mean()

    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        client_optimizer=fedjax.optimizers.sgd(LR, momentum=MOMENTUM),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(work.batch_size, num_epochs=work.epochs),
    )
    clients = [
        fedjax.ClientDataset({"x": x.permute(0, 2, 3, 1).cpu().contiguous().numpy(), "y": y.cpu().numpy()})
        for x, y in work.clients
    ]
    state, rounds = algorithm.init(parameters_of(work.net)), count()

    def one_round() -> None:
        nonlocal state
        keys = jax.random.split(jax.random.PRNGKey(next(rounds)), len(clients))
        participants = [(str(k), client, keys[k]) for k, client in enumerate(clients)]
        state, _ = algorithm.apply(state, participants)
        jax.block_until_ready(state.params)

    return one_round


if __name__ == "__main__":
    main("FedJAX", rounds_of)
