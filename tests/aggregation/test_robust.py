"""Robust aggregation gives what Flower's implementations give on the same inputs, and reaches every method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from fedkeep.aggregation import clip_norm, coordinate_median, select_krum, trimmed_mean, weighted_mean
from fedkeep.aggregation.mean import normalised_mean
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcurv import Curvature, FedCurv, FitWithCurvature
from fedkeep.errors import ConfigError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Fit, get_algorithm
from fedkeep.rounds.run_settings import Defense
from fedkeep.trust import robust_aggregation
from fedkeep.trust.robust_aggregation import reason_less_robust, robust_replies

flower = pytest.importorskip("flwr.server.strategy.aggregate")
privacy = pytest.importorskip("flwr.supercore.differential_privacy")


def fits(count: int) -> dict[str, Fit]:
    rng = torch.Generator().manual_seed(count)
    models = [
        {name: torch.randn(shape, generator=rng) for name, shape in (("w", (4, 3)), ("b", (4,)))} for _ in range(count)
    ]
    models[1] = {name: tensor * 50 for name, tensor in models[1].items()}
    return {str(i): Fit(model, 3 + i, 1, 0.5) for i, model in enumerate(models)}


def results(replies: dict[str, Fit]) -> Any:
    return [([t.numpy() for t in fit.model.values()], fit.num_examples) for fit in replies.values()]


@pytest.mark.parametrize("count", [5, 8])
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_the_result_is_flowers(rule: Any, count: int) -> None:
    replies = fits(count)
    malicious = int(0.25 * count)
    expected = {
        "median": lambda: flower.aggregate_median(results(replies)),
        "trimmed_mean": lambda: flower.aggregate_trimmed_avg(results(replies), 0.25),
        "krum": lambda: flower.aggregate_krum(results(replies), malicious, 0),
        "multi_krum": lambda: flower.aggregate_krum(results(replies), malicious, count - malicious),
    }[rule]()
    found = weighted_mean(robust_replies(replies, {}, Defense(robust_aggregation=rule, byzantine=0.25)))
    for tensor, array in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-5, atol=1e-6)


def test_clipping_is_flowers_and_to_the_median() -> None:
    replies = fits(5)
    start = {name: torch.ones_like(tensor) for name, tensor in replies["1"].model.items()}
    arrays = [tensor.numpy().copy() for tensor in replies["1"].model.values()]
    privacy.compute_clip_model_update(arrays, [t.numpy() for t in start.values()], 2.5)
    found = clip_norm(list(replies["1"].model.values()), list(start.values()), 2.5)
    for tensor, array in zip(found, arrays, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-5)
    clipped = robust_replies(replies, dict.fromkeys(replies, start), Defense(robust_aggregation="norm_clipping"))

    def norm(fit: Fit) -> float:
        return float(torch.cat([(fit.model[name] - start[name]).flatten() for name in start]).norm())

    median = sorted(map(norm, replies.values()))[2]
    assert [norm(fit) for fit in clipped.values()] == pytest.approx(
        [min(norm(fit), median) for fit in replies.values()]
    )


def with_statistics() -> dict[str, Fit]:
    """Nine fits: parameters move by 0.3, those of "8" by 4.5, and batch norm's statistics by up to 12."""
    rng = torch.Generator().manual_seed(0)
    replies = {}
    for i, place in enumerate((0, 1, 2, 3, 5, 6, 7, 8, 4)):
        weights = torch.randn(100, generator=rng)
        length = 4.5 if i == 8 else 0.3
        statistics = torch.full((25,), 1 + 0.3 * place)
        replies[str(i)] = Fit({"w": length * weights / weights.norm(), "bn.running_var": statistics}, 100, 5, 0.5)
    return replies


def test_the_statistics_of_batch_norm_hide_no_update() -> None:
    replies, start = with_statistics(), {"w": torch.zeros(100), "bn.running_var": torch.ones(25)}
    defense = Defense(robust_aggregation="norm_clipping")
    clipped = robust_replies(replies, dict.fromkeys(replies, start), defense, lambda fit: fit, ["w"])
    assert [float(fit.model["w"].norm()) for fit in clipped.values()] == pytest.approx([0.3] * 9)
    lengths = [float((fit.model["bn.running_var"] - 1).norm()) for fit in clipped.values()]
    assert lengths == pytest.approx([min(1.5 * place, 6.0) for place in (0, 1, 2, 3, 5, 6, 7, 8, 4)], abs=1e-5)
    models = [fit.model for fit in replies.values()]
    assert select_krum(models, 1, 9, ["w"])[-1] == 8
    assert select_krum(models, 1, 9)[-1] != 8, "its statistics are the usual ones"
    left = robust_replies(replies, {}, Defense(robust_aggregation="multi_krum"), lambda fit: fit, ["w"])
    assert list(left) == list("01234567")


def test_what_else_a_reply_holds_is_clipped_too() -> None:
    """SCAFFOLD's control variates; a field's tensors keep their proportions, as FedCurv's must."""
    start = {"w": torch.zeros(3)}

    def fit(length: float, steps: int) -> FitWithCurvature:
        fisher, product = {"w": torch.full((3,), length)}, {"w": torch.full((3,), -length / 2)}
        return FitWithCurvature({"w": torch.ones(3)}, 100, steps, 0.5, Curvature(fisher, product))

    replies = {str(i): fit(0.1, 5) for i in range(9)} | {"9": fit(1e6, 7)}
    defense = Defense(robust_aggregation="norm_clipping")
    found = robust_replies(replies, dict.fromkeys(replies, start), defense)
    for client, reply in found.items():
        assert reply.num_steps == replies[client].num_steps
        torch.testing.assert_close(reply.change.fisher["w"], torch.full((3,), 0.1))
        torch.testing.assert_close(reply.change.product["w"], torch.full((3,), -0.05))
        torch.testing.assert_close(reply.model["w"], torch.ones(3))


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_fednova_goes_no_further_than_the_robust_model(rule: Any) -> None:
    """One client that tells a single step had moved the server by ten times the clients' updates."""
    start, moved = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    replies = {str(i): Fit(moved, 100, 1 if i == 4 else 50, 0.5) for i in range(5)}
    found = robust_replies(replies, dict.fromkeys(replies, start), Defense(robust_aggregation=rule))
    torch.testing.assert_close(normalised_mean(start, found, 0.9)["w"], moved["w"])


def test_the_assumed_number_of_malicious_clients_is_the_share_and_one_at_least() -> None:
    assert [Defense().num_byzantine(count) for count in (3, 4, 5, 8, 9, 10, 15)] == [1, 1, 1, 1, 1, 2, 3]
    assert Defense(byzantine=0.29).num_byzantine(100) == 29, "0.29 * 100 is below 29 in float64"
    assert Defense(byzantine=0.0).num_byzantine(100) == 0


@pytest.mark.parametrize("count", [3, 4])
def test_a_trimmed_mean_of_few_is_trimmed(count: int) -> None:
    models = [1.0] * (count - 1) + [1000.0]
    replies = {str(i): Fit({"w": torch.full((3,), value)}, 100, 5, 0.5) for i, value in enumerate(models)}
    found = robust_replies(replies, {}, Defense(robust_aggregation="trimmed_mean"))
    torch.testing.assert_close(weighted_mean(found)["w"], torch.ones(3))


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_krum_assumes_no_more_malicious_clients_than_it_is_defined_for(rule: Any) -> None:
    """Two equal models of five would be each other's nearest neighbour, and be chosen."""
    values = {"0": 1.0, "1": 1.1, "2": 1.2, "bad": -9.0, "worse": -9.0}
    replies = {client: Fit({"w": torch.full((50,), value)}, 9, 1, 0.5) for client, value in values.items()}
    defense = Defense(robust_aggregation=rule, byzantine=0.4)
    found = robust_replies(replies, {}, defense)
    assert reason_less_robust(replies, {}, defense) == (
        f"{rule} assumed 1 malicious clients, not 2: more are not possible among 5 models."
    )
    assert len(found) == (1 if rule == "krum" else 4)
    assert rule == "multi_krum" or set(found) == {"1"}


@pytest.mark.parametrize(
    ("rule", "byzantine", "steps", "expected"),
    [
        ("mean", 0.2, [5], None),
        ("median", 0.2, [5] * 3, None),
        ("median", 0.2, [5, 5, 0, 0], "median was not applied: it needs 3 trained models, and there were 2."),
        ("trimmed_mean", 0.2, [5] * 3, None),
        ("trimmed_mean", 0.0, [5] * 9, "trimmed_mean assumed no malicious client, since defense.byzantine=0."),
        ("krum", 0.2, [5] * 5, None),
        (
            "norm_clipping",
            0.2,
            [5] * 3,
            "norm_clipping was not applied to 3 of 3 models, since their clients were sent no model.",
        ),
    ],
)
def test_it_is_said_where_a_rule_was_not_applied(
    rule: Any, byzantine: float, steps: list[int], expected: str | None
) -> None:
    replies = {str(i): Fit({"w": torch.ones(3)}, 100, number, 0.5) for i, number in enumerate(steps)}
    assert reason_less_robust(replies, {}, Defense(robust_aggregation=rule, byzantine=byzantine)) == expected


def test_a_round_that_is_less_robust_says_so_and_the_run_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    simulation = tiny.simulation(
        FedAvg(),
        cohort_size=5,
        rounds=3,
        training=tiny.SHORT,
        defense=Defense(robust_aggregation="median"),
        fault_injector=lambda round, client, step: "is offline" if round > 1 and client in offline else None,
    )
    offline = [*simulation.sample_cohort(2)[:3], *simulation.sample_cohort(3)[:3]]
    first, *others = tiny.run_rounds(simulation)
    assert "less_robust" not in first
    assert all("median was not applied" in record["less_robust"][0] for record in others)
    assert [record.message for record in caplog.records if "less robust" in record.message] == [
        f"Round 2 is less robust than asked: {others[0]['less_robust'][0]} Further such rounds have it in their record."
    ]


def test_a_cohort_too_small_for_a_rule_is_refused() -> None:
    def load(rule: str, size: int, byzantine: float = 0.2, method: str = "fedavg") -> None:
        settings = [f"defense.robust_aggregation={rule}", f"run.cohort_size={size}", f"defense.byzantine={byzantine}"]
        Experiment(load_recipe("fedkeep/attacks", methods=[method], settings=settings))

    with pytest.raises(ConfigError, match=r"needs 3 models or more .* cohort of 2"):
        load("median", 2)
    with pytest.raises(ConfigError, match=r"2 f \+ 2 < n .* f = 2 of n = 5"):
        load("krum", 5, 0.4)
    with pytest.raises(ConfigError, match="f = 1 of n = 4"):
        load("multi_krum", 4)
    load("krum", 5)
    load("trimmed_mean", 3)
    load("krum", 2, method="fedseq")
    load_recipe("fedkeep/attacks", settings=["defense.robust_aggregation=krum", "run.cohort_size=1"])  # as a site does


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "norm_clipping", "krum", "multi_krum"])
def test_clients_that_took_no_step_decide_nothing(rule: Any) -> None:
    start = {"w": torch.zeros(3)}
    idle = {f"idle {i}": Fit(start, 0, 0, 0.0) for i in range(6)}
    liar = {"liar": Fit({"w": torch.full((3,), 9.0)}, 100, 0, 0.0)}
    replies = idle | liar | {str(i): Fit({"w": torch.ones(3)}, 100, 5, 0.5) for i in range(4)}
    found = robust_replies(replies, dict.fromkeys(replies, start), Defense(robust_aggregation=rule))
    torch.testing.assert_close(weighted_mean(found)["w"], torch.ones(3))
    assert {"0", "1", "2", "3"} & found.keys()
    assert not any(fit.model["w"].max() > 1 for fit in found.values()), "who says that it took no step is not exempt"


def test_a_run_tells_the_rules_what_a_models_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        robust_aggregation, "robust_replies", lambda replies, *args: (told.append(args[-1]), replies)[1]
    )
    defense = Defense(robust_aggregation="median")
    simulation = tiny.simulation(FedAvg(), cohort_size=5, rounds=1, training=tiny.SHORT, defense=defense)
    tiny.run_rounds(simulation)
    assert told == [simulation.context.runner.parameters]


@pytest.mark.parametrize(
    ("returned", "sent", "limit", "expected"),
    [
        (3e38, -3e38, 2.0, -3e38),  # the difference is beyond float32
        (3e38, -3e38, 3e38, -1.5e38),
        (1e20, 0.0, 2.0, 1.0),  # and so is the square
        (1e20, 0.0, 1e22, 1e20),
        (float("nan"), 1.0, 2.0, 1.0),
        (float("inf"), 1.0, 2.0, 1.0),
    ],
)
def test_an_update_beyond_float32_is_clipped_too(returned: float, sent: float, limit: float, expected: float) -> None:
    (found,) = clip_norm([torch.full((4,), returned)], [torch.full((4,), sent)], limit)
    torch.testing.assert_close(found, torch.full((4,), expected))


def test_the_middle_of_an_even_number_is_the_mean_of_two() -> None:
    assert coordinate_median([torch.tensor([float(i)]) for i in (1, 9, 2, 4)]) == torch.tensor([3.0])
    assert trimmed_mean([torch.tensor([float(i)]) for i in (1, 9, 2, 4)], 0) == torch.tensor([4.0])
    with pytest.raises(ValueError, match="leaves none"):
        trimmed_mean([torch.zeros(1)] * 4, 2)
    models = [{"w": torch.tensor([float(i)])} for i in (0, 1, 50, 1.5, 3)]
    assert select_krum(models, 1, 1) == [1]
    with pytest.raises(ValueError, match="7 models for 2 malicious clients, not 5"):
        select_krum(models, 2, 1)


def averaging() -> Iterator[Any]:
    """Yield every method that averages with every rule; FedAvg with all, others with most of them as slow tests."""
    for name in ("fedavg", "scaffold", "fednova", "fedadkd", "fedcurv", "fedavgm"):
        for rule in ("median", "trimmed_mean", "norm_clipping", "krum", "multi_krum"):
            if name == "fedcurv" and "krum" not in rule:
                continue  # refused
            marks = () if name == "fedavg" or rule == "median" else pytest.mark.slow
            yield pytest.param(name, rule, id=f"{name}-{rule}", marks=marks)


@pytest.mark.parametrize(("name", "rule"), list(averaging()))
def test_every_method_that_averages_takes_every_rule(name: str, rule: Any) -> None:
    method = tiny.configured(get_algorithm(name))
    plain = tiny.simulation(method, cohort_size=5, rounds=2, training=tiny.SHORT)
    robust = tiny.simulation(
        method, cohort_size=5, rounds=2, training=tiny.SHORT, defense=Defense(robust_aggregation=rule)
    )
    tiny.run_rounds(plain)
    records = tiny.run_rounds(robust)
    assert not any(record["lost"] for record in records)
    assert ("left_out" in records[0]) == (rule in ("krum", "multi_krum"))
    assert tiny.finite(robust.server.model)
    assert not tiny.equal(plain.server.model, robust.server.model)


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_clients_that_krum_leaves_out_keep_the_state_that_they_had(rule: Any) -> None:
    """Else the server's sum of curvatures would not be that of the clients' shares any more."""
    simulation = tiny.simulation(
        FedCurv(), cohort_size=5, rounds=3, training=tiny.SHORT, defense=Defense(robust_aggregation=rule)
    )
    records = tiny.run_rounds(simulation)
    assert all(record["left_out"] for record in records)
    shares = [state for state in simulation.client_states.values() if state.fisher]
    for part in ("fisher", "product"):
        total = getattr(simulation.server.state.total, part)
        for name, tensor in total.items():
            torch.testing.assert_close(
                tensor, sum(getattr(share, part)[name] for share in shares), rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "norm_clipping"])
def test_a_method_that_cannot_bear_merged_replies_says_so(rule: Any) -> None:
    with pytest.raises(ConfigError, match=r"fedcurv cannot bear that: a client takes its own share .* Choose krum"):
        tiny.simulation(FedCurv(), cohort_size=5, defense=Defense(robust_aggregation=rule))
