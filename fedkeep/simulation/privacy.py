"""Which methods can be private: those of which nothing is seen but what noise covers; and the noise on means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import torch

from fedkeep._utils.type_hints import annotations_of
from fedkeep.aggregation.robust import clip_model, merge
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Fit
from fedkeep.interface.algorithm import client_steps, unwrap_step
from fedkeep.interface.privacy import FROM_LABEL_COUNTS, Privacy
from fedkeep.interface.steps import label_counts
from fedkeep.metrics.privacy import require_accountant
from fedkeep.models import Weights
from fedkeep.models.weights_file import form_of
from fedkeep.simulation.defense import Defense


def check_private(algorithm: Algorithm[Any, Any], privacy: Privacy, defense: Defense) -> None:
    """Refuse a method whose clients send something else than private models and label counts.

    Parameters
    ----------
    algorithm : Algorithm
        The method.
    privacy : Privacy
        What is asked for. With exact models nothing is refused.
    defense : Defense
        Who measures losses, which tells about the clients that do.

    Raises
    ------
    ConfigError
        If epsilon would not cover all that leaves a client.
    """
    if not privacy.noise_multiplier:
        return
    require_accountant()
    if defense.loss_check == "clients" or (defense.loss_check == "server" and not privacy.counts_epsilon):
        raise ConfigError(
            f"privacy.noise_multiplier: defense.loss_check={defense.loss_check} asks clients for losses or label "
            "counts, which would leave them without noise. Set loss_check=off, or "
            "loss_check=server and privacy.counts_epsilon."
        )
    for name, step in client_steps(type(algorithm)).items():
        reply = annotations_of(unwrap_step(step)).get("return")
        counted = unwrap_step(step) is label_counts
        if reply is type(None) or reply is None or counted or reply is Fit:
            others: list[str] = []
        elif isinstance(reply, type) and issubclass(reply, Fit) and is_dataclass(reply):
            known, hints = {field.name for field in fields(Fit)}, get_type_hints(reply, include_extras=True)
            more = {field.name: hints[field.name] for field in fields(reply) if field.name not in known}
            others = [field for field, hint in more.items() if FROM_LABEL_COUNTS not in get_args(hint)]
            counted = bool(more)
        else:
            others = ["its reply"]
        if others:
            raise ConfigError(
                f"privacy.noise_multiplier: {', '.join(others)} of {algorithm.name()}'s client step {name} would leave "
                "the client without noise. Only methods that send models and label counts can be private."
            )
        if counted and not privacy.counts_epsilon:
            raise ConfigError(
                f"privacy.noise_multiplier: {algorithm.name()}'s client step {name} also tells about the client's "
                "label counts. Set privacy.counts_epsilon too."
            )


def check_central(algorithm: Algorithm[Any, Any], privacy: Privacy) -> None:
    """Refuse central differential privacy for a method whose server sees something else than means of models.

    Parameters
    ----------
    algorithm : Algorithm
        The method.
    privacy : Privacy
        What is asked for.

    Raises
    ------
    ConfigError
        If the method passes models on without averaging them, or its clients send something else too.
    """
    if not privacy.client_noise_multiplier:
        return
    require_accountant()
    if algorithm.schedule != "parallel":
        raise ConfigError(
            f"privacy.client_noise_multiplier: {algorithm.name()} passes on the model of each client, and noise is "
            "put on means. Use privacy.noise_multiplier, whose noise is put on before a model leaves its client."
        )
    for name, step in client_steps(type(algorithm)).items():
        reply = annotations_of(unwrap_step(step)).get("return")
        if reply is not Fit and reply is not type(None) and reply is not None:
            raise ConfigError(
                f"privacy.client_noise_multiplier: {algorithm.name()}'s client step {name} sends more than a model, "
                "which the noise would not cover."
            )


@torch.no_grad()
def noised_mean(
    fits: Mapping[str, Fit],
    sent: Mapping[str, Weights],
    privacy: Privacy,
    generator: torch.Generator,
    keep: Callable[[Fit], Fit] = lambda fit: fit,
) -> dict[str, Fit]:
    """Put the noised mean of the clients' clipped updates in the place of each client's model.

    Whatever a method makes of the replies, it makes of that mean. All clients count alike, and losses are 0.

    Parameters
    ----------
    fits : Mapping[str, Fit]
        Replies by client; at least one.
    sent : Mapping[str, Weights]
        The models that the clients were sent.
    privacy : Privacy
        Noise and clipping.
    generator : torch.Generator
        Draws the noise.
    keep : Callable[[Fit], Fit]
        Puts a new reply away, so that not all must be in memory.

    Returns
    -------
    dict[str, Fit]
        The replies as the method sees them.
    """
    first = form_of(next(iter(fits.values())).model)
    names = [name for name, form in first.items() if form.is_floating_point()]
    clipped = [
        keep(replace(fit, model={**fit.model, **clip_model(fit.model, sent[client], names, privacy.max_update_norm)}))
        for client, fit in fits.items()
    ]
    mean = merge([fit.model for fit in clipped], lambda tensors: torch.stack(list(tensors)).mean(0))
    deviation = privacy.client_noise_multiplier * privacy.max_update_norm / len(fits)
    for name in names:
        noise = torch.randn(mean[name].shape, generator=generator)
        mean[name] = mean[name] + deviation * noise.to(mean[name])
    return {client: replace(fit, model=mean, num_examples=1, loss=0.0) for client, fit in fits.items()}
