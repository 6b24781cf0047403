"""FedJAX: ``with_fedjax.py WORK``. XLA decides itself how many threads it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms.fed_avg import federated_averaging
from turns import Shown, Turns
from work import Work

Layers = list[tuple[jax.Array, jax.Array]]
"""Weight and bias of each layer, in PyTorch's shapes."""


def main() -> None:
    """Play rounds when asked."""
    work = Work(sys.argv[1])
    forward = {"mlp": mlp, "lenet5": lenet5}[work.network]
    algorithm = federated_averaging(
        fedjax.model_grad(model_of(forward)),
        client_optimizer=fedjax.optimizers.sgd(work.lr),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            work.batch_size, num_epochs=work.epochs, skip_shuffle=True
        ),
    )
    given = [jnp.asarray(weight) for weight in work.initial.values()]
    state = algorithm.init(list(zip(given[::2], given[1::2], strict=True)))
    key, number = jax.random.PRNGKey(0), 0

    def show() -> Shown:
        weights = [np.asarray(weight) for layer in state.params for weight in layer]
        return dict(zip(work.initial, weights, strict=True)), number

    turns = Turns(show)
    going = turns.begin("fedjax", "jax")
    while going:
        number += 1
        clients = []
        for place, client in enumerate(work.clients_of(number)):
            images, labels = work.one_epoch(number, place)
            clients.append((str(client), fedjax.ClientDataset({"x": images, "y": labels}), key))
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        going = turns.done()


def model_of(forward: Callable[[Layers, jax.Array], jax.Array]) -> fedjax.Model:
    """Return a model of FedJAX from its forward pass."""
    return fedjax.Model(
        init=lambda key: None,
        apply_for_train=lambda layers, batch, key: forward(layers, batch["x"]),
        apply_for_eval=lambda layers, batch: forward(layers, batch["x"]),
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
        eval_metrics={},
    )


def dense(layer: tuple[jax.Array, jax.Array], inputs: jax.Array) -> jax.Array:
    """Return a fully connected layer's output."""
    weight, bias = layer
    return inputs @ weight.T + bias


def convolution(layer: tuple[jax.Array, jax.Array], images: jax.Array) -> jax.Array:
    """Return an unpadded convolution with ReLU and 2x2 max-pooling."""
    weight, bias = layer
    maps = jax.lax.conv_general_dilated(images, weight, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    maps = jax.nn.relu(maps + bias[:, None, None])
    return jax.lax.reduce_window(maps, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def mlp(layers: Layers, images: jax.Array) -> jax.Array:
    """Return the perceptron's logits."""
    first, last = layers
    return dense(last, jax.nn.relu(dense(first, images.reshape(len(images), -1))))


def lenet5(layers: Layers, images: jax.Array) -> jax.Array:
    """Return LeNet-5's logits."""
    first, second, *hidden, last = layers
    values = convolution(second, convolution(first, images))
    values = values.reshape(len(values), -1)
    for layer in hidden:
        values = jax.nn.relu(dense(layer, values))
    return dense(last, values)


if __name__ == "__main__":
    main()
