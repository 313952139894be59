"""A body with several heads, and what reaches the body."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nclbayes as ncl


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.words(input_ids) * attention_mask.unsqueeze(-1)).sum(1)


def test_a_mapping_reaches_the_body_by_name() -> None:
    torch.manual_seed(0)
    net = ncl.MultiHead(_Words(), [nn.Linear(4, 2), nn.Linear(4, 3)])
    batch = {"input_ids": torch.randint(9, (20, 5)), "attention_mask": torch.ones(20, 5)}
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), ncl.LaplaceNCL(steps=3))
    for head in (0, 1):
        data = {**batch, "labels": torch.arange(20) % (head + 2)}
        posterior.update(ncl.Task(data, name=str(head), target="labels", context={"head": head}), progress=False)
    weights = posterior.mean()
    with torch.no_grad():
        by_hand = torch.func.functional_call(net, weights, (), {**batch, "head": 1}).softmax(-1)
    torch.testing.assert_close(posterior.predict(batch, head=1).probs, by_hand)
