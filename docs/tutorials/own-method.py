# %% [markdown]
# # Your own method
#
# A method is one class: `round` is what the server does, and the steps marked `@on_client` are what clients do. What a step
# returns is all that leaves a client. This one is FedProx: local training is pulled towards the global model.
# %%
from dataclasses import dataclass

import fedkeep
from fedkeep.aggregation import weighted_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy, QuadraticPenalty
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class Near(Algorithm):
    """FedAvg whose clients stay near the global model."""

    strength: float = option(0.1, "weight of the squared distance to the global model", low=0.0)

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = weighted_mean(cohort.ask(self.train, server.model))

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, CrossEntropy() + QuadraticPenalty(model, self.strength))


# %% [markdown]
# It runs beside the built-in methods, on the same partition, initial weights, cohorts and batch orders.
# %%
run = fedkeep.run("demo", methods=[fedkeep.FedAvg(), Near(), Near(strength=10.0)], rounds=2, seeds=1)
for trial in run.trials:
    print(f"{trial.label}: accuracy {trial.last:.2f}, {trial.up:.0f} bytes from each client in a round")
# %% [markdown]
# In a file it is named on the command line: `fedkeep run --use near.py --methods fedavg,near`. The page on contributing shows
# the tests that every method must pass.
