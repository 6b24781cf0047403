"""Central differential privacy: noise on the mean of the clients' clipped updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from fedkeep._utils.noise_stream import NoiseStream
from fedkeep.aggregation.robust import clip_model, merge
from fedkeep.interface import Fit
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Weights
from fedkeep.models.weights_file import form_of


@torch.no_grad()
def noised_mean(
    fits: Mapping[str, Fit],
    sent: Mapping[str, Weights],
    privacy: Privacy,
    noise: Callable[..., NoiseStream],
    keep: Callable[[Fit], Fit] = lambda fit: fit,
) -> dict[str, Fit]:
    """Put the noised mean of the clients' clipped updates in the place of each client's model.

    Whatever a method makes of the replies, it makes of that mean. All clients count alike, as one example and one step
    each, losses are 0, and tensors of integers, such as batch norm's number of batches, are as they were sent: noise
    covers none of these.

    ``fits``: Replies by client; at least one.
    ``noise``: Returns the noise for a mean, given all that determines it.
    ``keep``: Puts a new reply away, so that not all must be in memory.
    """
    first = form_of(next(iter(fits.values())).model)
    names = [name for name, form in first.items() if form.is_floating_point()]
    clipped = [
        keep(replace(fit, model={**fit.model, **clip_model(fit.model, sent[client], names, privacy.max_update_norm)}))
        for client, fit in fits.items()
    ]
    mean = merge([fit.model for fit in clipped], lambda tensors: torch.stack(list(tensors)).mean(0))
    deviation = privacy.client_noise_multiplier * privacy.max_update_norm / len(fits)
    stream = noise(deviation, *(mean[name] for name in names))
    for name in names:
        mean[name] = mean[name] + deviation * stream.normal(mean[name].shape).to(mean[name])
    mean |= {name: tensor for name, tensor in sent[next(iter(fits))].items() if name not in names}
    return {client: replace(fit, model=mean, num_examples=1, num_steps=1, loss=0.0) for client, fit in fits.items()}
