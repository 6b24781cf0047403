# %% [markdown]
# # Your own data
#
# Give a data frame or a file, and name its columns. Here is the breast-cancer table of scikit-learn, 30 numbers for each patient, as if three
# clinics had it, with what real tables have: an id, a date, a column of text and empty cells.
# %%
import numpy as np
from sklearn.datasets import load_breast_cancer

import fedkeep

draw = np.random.default_rng(0)
frame = load_breast_cancer(as_frame=True).frame
frame["target"] = frame["target"].map({0: "malignant", 1: "benign"})
frame["clinic"] = np.where(frame["mean radius"] < 12, "north", np.where(frame["mean radius"] < 15, "south", "west"))
frame["device"] = draw.choice(["A", "B", "C"], len(frame))
frame["patient_id"] = [f"P{number:04}" for number in range(len(frame))]
frame.loc[::50, "mean texture"] = None
# %% [markdown]
# A column of ids would let a network learn single rows. FedKeep refuses it by name, with all other problems at once, and says what to write.
# %%
try:
    fedkeep.run(data=frame, label="target", partition="clinic", model="mlp")
except fedkeep.FedKeepError as error:
    print(error)
# %% [markdown]
# `fedkeep.run` checks everything first, then trains. Clients take turns in FedSeq, and train at the same time in FedAvg. The note says what was
# filled in and left out.
# %%
run = fedkeep.run(
    data=frame,
    label="target",
    partition="clinic",
    exclude=["patient_id"],
    model="mlp",
    methods=["fedavg", "fedseq"],
    rounds=5,
    seeds=1,
    title="breast cancer at three clinics",
)
print(run.trials[0].info["dataset_note"])
print(run.table()[["seeds", "last", "window_forgetting"]])
# %% [markdown]
# An exported model reads tables by their columns. Cells may be empty, and hold values that no training row had.
# %%
new = frame.drop(columns=["target", "clinic"])[:5].assign(device="D")
new.to_csv("new.csv", index=False)
folder = fedkeep.export_model(run, method="FedAvg", onnx=False)
for prediction in fedkeep.predict(folder, ["new.csv"]):
    print(prediction.row, prediction.label, f"{prediction.probability:.2f}")
# %% [markdown]
# Arrays need no names. The partition then says which training rows each client holds.
# %%
x = frame.drop(columns=["target", "clinic", "device", "patient_id"]).to_numpy("float32")
x, y = np.nan_to_num((x - np.nanmean(x, 0)) / np.nanstd(x, 0)), frame["target"].to_numpy()
rows = {"north": range(200), "south": range(200, 380), "practice": range(380, 450)}
run = fedkeep.run(
    data=(x[:450], y[:450], x[450:], y[450:]), partition=rows, model="mlp", methods=["fedavg"], rounds=2, seeds=1
)
print(run.table()[["seeds", "last"]])
