"""Which methods can be private: those of which nothing is seen but what noise covers."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from fedkeep._utils.type_hints import annotations_of
from fedkeep.interface import Algorithm, Fit
from fedkeep.interface.algorithm import client_steps, send_label_counts, unwrap_step
from fedkeep.interface.privacy import EXACT_COUNTS, FROM_LABEL_COUNTS, Privacy
from fedkeep.metrics import require_accountant
from fedkeep.rounds.run_settings import Defense, RunSettings


def reason_against_privacy(algorithm: Algorithm[Any, Any], privacy: Privacy, defense: Defense) -> str:
    """Say why epsilon would not cover all that leaves a client; empty if it does, or with exact models."""
    for name, reply in _replies_beyond_models(algorithm) if privacy.counts_epsilon else ():
        hints = get_type_hints(reply, include_extras=True) if is_dataclass(reply) else {}
        if any(EXACT_COUNTS in get_args(hint) for hint in hints.values()):
            return (
                f"privacy.counts_epsilon: {algorithm.name()}'s client step {name} sends label counts without noise. "
                "Set privacy.counts_epsilon=0, or take another method."
            )
    if not privacy.noise_multiplier:
        return ""
    require_accountant()
    if defense.loss_check == "server" and not privacy.counts_epsilon:
        return (
            "privacy.noise_multiplier: defense.loss_check=server asks clients for label counts, which would leave them "
            "without noise. Set loss_check=off, or privacy.counts_epsilon."
        )
    if algorithm.reason_against_dp_sgd:
        return f"privacy.noise_multiplier: {algorithm.reason_against_dp_sgd}"
    for name, step in client_steps(type(algorithm)).items():
        reply = annotations_of(unwrap_step(step)).get("return")
        counted = unwrap_step(step) is send_label_counts
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
            return (
                f"privacy.noise_multiplier: {', '.join(others)} of {algorithm.name()}'s client step {name} would leave "
                "the client without noise. Only methods that send models and label counts can be private."
            )
        if counted and not privacy.counts_epsilon:
            return (
                f"privacy.noise_multiplier: {algorithm.name()}'s client step {name} also tells about the client's "
                "label counts. Set privacy.counts_epsilon too."
            )
    return ""


def reason_against_sums(
    algorithm: Algorithm[Any, Any], defense: Defense, privacy: Privacy, run_settings: RunSettings
) -> str:
    """Say why the server must see more than the mean of the clients' models; empty if it need not."""
    refused = "privacy.secure_aggregation: "
    if algorithm.sequential:
        return (
            f"{refused}{algorithm.name()} passes each client's model on to the next, so that the server must see "
            "`model` of every reply. A sum hides one model among several; a sequence has none."
        )
    for name, reply in _replies_beyond_models(algorithm):
        own = {field.name for field in fields(Fit)}
        more = [field.name for field in fields(reply) if field.name not in own] if is_dataclass(reply) else []
        what = " and ".join(f"`{field}`" for field in more) or "each reply"
        return f"{refused}the server must see {what} of {algorithm.name()}'s client step {name}."
    if not algorithm.only_averages:
        return (
            f"{refused}{algorithm.name()}'s server needs more of each client than its share of a mean: its model, its "
            "number of steps or its loss. Only methods that average models can be summed."
        )
    if not _says_what_it_reads(type(algorithm)):
        return (
            f"{refused}a sum shows clients' models only in their mean, and {algorithm.name()} does not say whether its "
            "`round` reads single ones. Write only_averages = True in its class if it does not, or else False; "
            "fedkeep.testing.check_algorithm then compares."
        )
    needing = {
        f"defense.loss_check={defense.loss_check} measures": defense.loss_check != "off",
        f"defense.robust_aggregation={defense.robust_aggregation} compares": defense.robust_aggregation != "mean",
        "privacy.client_noise_multiplier clips": privacy.client_noise_multiplier > 0,
        "run.evaluate_local_models evaluates": run_settings.evaluate_local_models,
    }
    for what in (what for what, is_asked in needing.items() if is_asked):
        return f"{refused}{what} the model of each client, and the server sees their sum. Turn one off."
    return ""


def _says_what_it_reads(method: type[Algorithm[Any, Any]]) -> bool:
    """Tell whether `only_averages` is of the class that defines `round`, or of one derived from it, or of FedKeep."""
    for cls in method.__mro__:
        if "only_averages" in vars(cls):
            return True
        if "round" in vars(cls):
            return cls.__module__.startswith("fedkeep.")
    return False


def reason_against_central_noise(algorithm: Algorithm[Any, Any], defense: Defense) -> str:
    """Say why noise on means does not cover what the server sees; empty if it does."""
    require_accountant()
    if defense.robust_aggregation != "mean" or defense.loss_check != "off":
        option = "robust_aggregation" if defense.robust_aggregation != "mean" else "loss_check"
        return (
            f"privacy.client_noise_multiplier: with defense.{option}={getattr(defense, option)} one client may move "
            "the result further than its share of a mean, for which the noise is computed. Set "
            "defense.robust_aggregation=mean and defense.loss_check=off: each update is clipped anyway."
        )
    if algorithm.sequential:
        return (
            f"privacy.client_noise_multiplier: {algorithm.name()} passes on the model of each client, and noise is "
            "put on means. Use privacy.noise_multiplier, whose noise is put on before a model leaves its client."
        )
    for name, _ in _replies_beyond_models(algorithm):
        return (
            f"privacy.client_noise_multiplier: {algorithm.name()}'s client step {name} sends more than a model, "
            "which the noise would not cover."
        )
    if not algorithm.only_averages or not _says_what_it_reads(type(algorithm)):
        return (
            f"privacy.client_noise_multiplier: the noised mean stands for each reply, and {algorithm.name()} "
            "reads single ones, or does not say. Only methods that average models can have it: write only_averages = "
            "True in the class if yours does no more; fedkeep.testing.check_algorithm then compares."
        )
    return ""


def _replies_beyond_models(algorithm: Algorithm[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the reply's type of every client step that sends something else than a fit."""
    for name, step in client_steps(type(algorithm)).items():
        reply = annotations_of(unwrap_step(step)).get("return")
        if reply not in (Fit, type(None), None):
            yield name, reply
