"""What frozen parameters and adapters save: bytes that a client sends in a round, everything trained and a part of it.

    python benchmarks/frozen_bytes.py

A ResNet-18 on colour images of 8 x 8, whose body is frozen; and a small BERT with LoRA adapters of rank 4 (peft) at
queries and values. Writes a Markdown table of FedSeq's round; random data are enough, since bytes depend on the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import fedkeep
from fedkeep.models.networks import ResNet18

IMAGES = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(1, 500, (40, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 10


def resnet() -> nn.Module:
    """Return a ResNet-18 for ten classes."""
    return ResNet18().build((3, 8, 8), 10)


def frozen_resnet() -> nn.Module:
    """Return it with a body that is not trained."""
    network: Any = resnet()
    network.body.requires_grad_(False)
    return network


def bert() -> nn.Module:
    """Return a BERT of two layers for ten classes."""
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return BertForSequenceClassification(BertConfig(vocab_size=500, num_labels=10, **small))


def adapted_bert() -> nn.Module:
    """Return it with adapters at queries and values."""
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(bert(), config)


def sent(model: Callable[[], nn.Module], data: torch.Tensor) -> float:
    """Return the bytes that a client sends in a round of FedSeq."""
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"rounds": 1, "seeds": 1, "training": fedkeep.SGD(lr=0.1), "out": f"{folder}/run"}
        two = fedkeep.IID(num_clients=2)
        run = fedkeep.run(data=(data, LABELS, data, LABELS), partition=two, model=model, methods=["fedseq"], **given)
        return run.trials[0].up


if __name__ == "__main__":
    print("| network | all of it: bytes | a part: bytes | the part that is trained |\n|:--|--:|--:|:--|")
    for name, whole, part, data, trained in (
        ("ResNet-18", resnet, frozen_resnet, IMAGES, "the classifier"),
        ("BERT of two layers", bert, adapted_bert, TOKENS, "LoRA adapters of rank 4 and the classifier"),
    ):
        print(f"| {name} | {sent(whole, data):,.0f} | {sent(part, data):,.0f} | {trained} |")
