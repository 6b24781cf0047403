# %% [markdown]
# # New classes over time
#
# In class-incremental learning, classes arrive in tasks, and examples of old classes are gone. The ten digits arrive in two
# tasks of five here. Finetune forgets the first task; FedLwF distils the old model into the new one.
# %%
import fedkeep

run = fedkeep.run(
    "demo",
    settings=["tasks.num_tasks=2"],
    methods=["finetune", "fedlwf"],
    rounds=6,
    seeds=1,
    title="digits in two tasks",
)
# %% [markdown]
# The rows of a task matrix are the accuracies on each task after each task, in the order in which they arrived.
# %%
for trial in run.trials:
    first, last = trial.task_matrix[0, 0], trial.task_matrix[1, 0]
    print(f"{trial.label}: first task {first:.2f} when it was learned, {last:.2f} after the second")
# %% [markdown]
# FediCaRL keeps examples of old classes. Methods that replay generated images need a generator, or invert the old model:
# see the page on class-incremental learning.
