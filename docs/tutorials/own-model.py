# %% [markdown]
# # Your own model
#
# Any `torch.nn.Module` that maps a batch to a score for each class can be trained. Each client builds its own, so give the
# class or a function, with the shape of an input and the number of classes.
# %%
import torch
from torch import nn

import fedkeep


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        channels = shape[0]
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 32), nn.ReLU()
        )
        self.classifier = nn.Linear(32, classes)

    def forward(self, images):
        return self.classifier(self.body(images))


# %% [markdown]
# The digits of scikit-learn are 8 x 8 pixels. Everything else is the demo's: 20 clients with two classes each.
# %%
run = fedkeep.run("demo", model=Net, methods=["fedseq", "sfedkd"], rounds=2, seeds=1)
for trial in run.trials:
    print(f"{trial.label}: accuracy {trial.last:.2f}")
# %% [markdown]
# A trained trial gives the network back, with its normalisation: it takes pixels as they are stored.
# %%
network = run["SFedKD", 0].model()
print(network(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)).shape)
