"""What is evaluated: averages of models that were trained anyway, which change nothing that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.errors import ConfigError
from fedkeep.models import Weights
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.trials.callbacks import OnRoundEnd
from fedkeep.trials.trial import run_trial

ALL = ("last", "round", "moving")


@pytest.mark.parametrize("method", [FedSeq(), SFedKD(), FedAvg()], ids=repr)
def test_serving_changes_nothing_that_is_trained(method: Any) -> None:
    plain, averaged = tiny.simulation(method), tiny.simulation(method, evaluation_models=ALL)
    without, records = tiny.run_rounds(plain), tiny.run_rounds(averaged)
    assert tiny.equal(plain.server.model, averaged.server.model)
    for record in records:
        others = {"round", "moving"} if method.sequential else {"moving"}
        assert record.pop("evaluation_models").keys() == others
    assert without == records


def test_the_averages_are_those_of_the_formulas() -> None:
    simulation = tiny.simulation(FedSeq(), evaluation_models=ALL, rounds=3, ema_decay=0.7)
    own: list[Weights] = []
    train = FedSeq.train
    moving: dict[str, torch.Tensor] = {}
    for _ in range(3):
        own.clear()

        def keep(self: FedSeq, client: Any, model: Weights) -> Any:
            fit = train(self, client, model)
            own.append(fit.model)
            return fit

        keep._fedkeep_client_step = True  # type: ignore[attr-defined]
        FedSeq.train = keep  # type: ignore[method-assign]
        try:
            record = simulation.run_round().record
        finally:
            FedSeq.train = train  # type: ignore[method-assign]
        assert len(own) == 3
        mean = {name: torch.stack([m[name].double() for m in own]).mean(0) for name in own[0]}
        moving = {name: 0.7 * moving[name] + 0.3 * mean[name] for name in mean} if moving else mean
        assert tiny.equal(simulation.evaluation_model("last"), own[-1])
        for what, expected in (("round", mean), ("moving", moving)):
            got = simulation.evaluation_model(what)  # type: ignore[arg-type]
            for name in expected:
                torch.testing.assert_close(got[name].double(), expected[name], rtol=1e-5, atol=1e-6)
            assert record["evaluation_models"][what]["correct"] == simulation.evaluate(got).correct
        assert not tiny.equal(simulation.evaluation_model("round"), simulation.evaluation_model("last"))


def test_the_mean_of_a_parallel_round_is_what_the_server_made() -> None:
    """So that it is evaluated once, whichever of the two is named first."""
    alone, both = (tiny.simulation(FedAvg(), evaluation_models=names) for names in (("round",), ("round", "last")))
    assert both.evaluation_models == ("last",)
    simulation = alone
    assert [record["correct"] for record in tiny.run_rounds(alone)] == [
        record["correct"] for record in tiny.run_rounds(both)
    ]
    assert tiny.equal(simulation.evaluation_model("round"), simulation.server.model)


def test_an_rolled_back_round_leaves_the_averages() -> None:
    simulation = tiny.simulation(
        FedSeq(),
        evaluation_models=ALL,
        min_clients=3,
        fault_injector=lambda number, client, step: "gone" if number == 2 else None,
    )
    tiny.run_rounds(simulation, 1)
    before = [simulation.evaluation_model(what) for what in ("round", "moving")]  # type: ignore[arg-type]
    (record,) = tiny.run_rounds(simulation, 1)
    assert record["rolled_back"]
    for what, model in zip(("round", "moving"), before, strict=True):
        assert tiny.equal(simulation.evaluation_model(what), model)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_it_resumes_to_the_same_bytes(at: int, tmp_path: Path) -> None:
    def stop(state: Any, result: Any) -> None:
        if result.record["round"] == at:
            raise KeyboardInterrupt

    several = {"evaluation_models": ("moving", "last", "round")}
    run_trial(tiny.simulation(FedSeq(), **several), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run_trial(tiny.simulation(FedSeq(), **several), tmp_path / "cut", [OnRoundEnd(stop)])
    run_trial(tiny.simulation(FedSeq(), **several), tmp_path / "cut")
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("evaluation_models", [(), ("last", "last")])
def test_an_evaluation_model_is_named_once(evaluation_models: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="each once"):
        RunSettings(evaluation_models=evaluation_models)
