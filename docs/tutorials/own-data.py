# %% [markdown]
# # Your own data
#
# Give tensors or arrays, and say who holds which rows. Here two hospitals and a small practice hold the breast-cancer
# table of scikit-learn: 30 numbers for each patient, two classes.
# %%
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import fedkeep

features, labels = load_breast_cancer(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(features, labels, random_state=0, stratify=labels)
scaler = StandardScaler().fit(train_x)
train_x, test_x = scaler.transform(train_x).astype("float32"), scaler.transform(test_x).astype("float32")
# %% [markdown]
# The partition names the training rows of each client. The hospitals have most of one class each, the practice a few of both.
# %%
benign, malignant = (train_y == 1).nonzero()[0], (train_y == 0).nonzero()[0]
sites = {
    "north": [*benign[:200], *malignant[:20]],
    "south": [*benign[200:210], *malignant[20:140]],
    "practice": [*benign[210:240], *malignant[140:150]],
}
# %% [markdown]
# `fedkeep.run` checks everything first, then trains. Clients take turns in FedSeq, and train at the same time in FedAvg.
# %%
run = fedkeep.run(
    data=(train_x, train_y, test_x, test_y),
    partition=sites,
    model="mlp",
    methods=["fedavg", "fedseq"],
    rounds=5,
    cohort_size=3,
    seeds=1,
    title="breast cancer at three sites",
)
print(run.table()[["seeds", "last", "window_forgetting"]])
# %% [markdown]
# The model of a trial is a `torch.nn.Module`. `fedkeep export RUN --method fedavg` writes it into files.
# %%
import torch

model = run["FedAvg", 0].model()
scores = model(torch.from_numpy(test_x))
print(f"accuracy {(scores.argmax(-1).numpy() == test_y).mean():.2f}")
