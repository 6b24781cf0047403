"""Central differential privacy: noise on the mean of the clients' clipped updates."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from fedkeep._utils.noise_stream import NoiseStream
from fedkeep.aggregation.robust import clip_model, merge
from fedkeep.errors import ConfigError
from fedkeep.interface import Fit
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Weights
from fedkeep.models.weights import form_of, tied_parameters
from fedkeep.privacy.privacy_account import PrivacyAccount
from fedkeep.privacy.privacy_checks import reason_against_central_noise
from fedkeep.rounds.reply_step import Reply, ReplyStep, Round
from fedkeep.rounds.reply_store import ReplyStore
from fedkeep.rounds.state import SimulationState


class CentralNoise(ReplyStep):
    """Puts the noised mean of the clients' clipped updates in the place of models that were asked for together."""

    def __init__(self, account: PrivacyAccount) -> None:
        self.account = account

    def applies(self, state: SimulationState) -> bool:
        return state.settings.privacy.client_noise_multiplier > 0

    def reason_against(self, state: SimulationState) -> str:
        if tied := tied_parameters(state.context.runner.train_network):
            return (
                f"privacy.client_noise_multiplier: {tied[0]} of the network stands at several places, and noise would "
                "make several tensors of it. Choose a network without tied weights, or privacy.noise_multiplier."
            )
        return reason_against_central_noise(state.algorithm, state.settings.defense)

    def combine(self, round: Round, replies: dict[str, Reply]) -> dict[str, Reply]:
        state, store = round.state, ReplyStore(round.state.weights_file)
        fits = {client: reply for client, reply in replies.items() if isinstance(reply.value, Fit)}
        if not fits:
            return replies
        sent = {client: reply.sent for client, reply in fits.items() if reply.sent is not None}
        if missing := next((client for client in fits if client not in sent), ""):
            raise ConfigError(
                f"privacy.client_noise_multiplier: {state.algorithm.name()} sends client {missing} no model that its "
                "update could be measured from. Give the model to the client step as an argument of its own."
            )
        number = self.account.add_mean(fits)
        noise = partial(state.context.repeated_noise, "noised mean", round.number, number)
        values = {client: reply.value for client, reply in fits.items()}
        noised = noised_mean(values, sent, state.settings.privacy, noise, store.keep)
        self.account.note("", next(iter(noised.values())).model)
        return {client: reply.with_value(noised[client]) for client, reply in fits.items()}


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
        mean[name] = stream.gaussian(mean[name], deviation)
        if name.endswith("running_var"):  # of batch norm, which takes its square root
            mean[name] = mean[name].where(mean[name] > 0, sent[next(iter(fits))][name])
    mean |= {name: tensor for name, tensor in sent[next(iter(fits))].items() if name not in names}
    return {client: replace(fit, model=mean, num_examples=1, num_steps=1, loss=0.0) for client, fit in fits.items()}
