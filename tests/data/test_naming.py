"""Batches as collate functions of text models give them: mappings, of which one part is the target."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import nclbayes as ncl
from nclbayes.data.task import to_device
from nclbayes.errors import FileError, ModelError, NCLError, SettingError
from nclbayes.methods import EWC, ReplayLearner
from nclbayes.watch.nesting import joined, mapped, tensors_of

WORDS, LENGTH, EXAMPLES = 11, 6, 60


def text(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (EXAMPLES, LENGTH), generator=draw)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (EXAMPLES, 1), generator=draw)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": (ids[:, 0] > 5).long()}


class Texts(Dataset[Any]):
    def __init__(self, seed: int = 0) -> None:
        self.data = text(seed)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.data.items()}


class Encoding(UserDict[str, Tensor]):
    """As of tokenizers: a mapping that is no dict."""


def collate(examples: list[dict[str, Tensor]]) -> Encoding:
    return Encoding({name: torch.stack([example[name] for example in examples]) for name in examples[0]})


def sampler(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    index = torch.randint(EXAMPLES, (size,), generator=generator)
    return {name: tensor[index] for name, tensor in text().items()}


class Reader(nn.Module):
    """A network that takes its inputs by name, and returns an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(WORDS, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, *, attention_mask: Tensor, input_ids: Tensor, shift: float = 0.0) -> SimpleNamespace:
        states = self.norm(self.words(input_ids)) * attention_mask.unsqueeze(-1)
        return SimpleNamespace(logits=self.out(states[:, 0]) + shift, hidden=states)


class LookingReader(Reader):
    """As text models do, it looks into its mask, and cannot be vectorised."""

    def forward(self, **inputs: Any) -> SimpleNamespace:
        assert inputs["attention_mask"].max().item() <= 1
        return super().forward(**inputs)


def reader(kind: type[Reader] = Reader) -> ncl.BayesianNetwork:
    torch.manual_seed(0)
    return ncl.BayesianNetwork(kind(), ncl.Categorical())


SOURCES: dict[str, Any] = {
    "tensors": lambda: text(),
    "another mapping": lambda: Encoding(text()),
    "data set": lambda: Texts(),
    "loader": lambda: DataLoader(Texts(), batch_size=20, collate_fn=collate, shuffle=True),
    "loader of dicts": lambda: DataLoader(Texts(), batch_size=20),
    "loader with workers": lambda: DataLoader(Texts(), batch_size=20, collate_fn=collate, num_workers=1),
    "sampler": lambda: sampler,
}


@pytest.mark.parametrize("source", SOURCES)
def test_it_is_learnt_whatever_gives_the_mappings(source: str) -> None:
    train = SOURCES[source]()
    task = ncl.Task(train, text(1), name="text", target="labels", size=EXAMPLES)
    steps = 10 if "workers" in source else 60
    posterior = ncl.OnlinePosterior(reader(LookingReader), ncl.LaplaceNCL(steps=steps, batch_size=20, lr=0.3))
    posterior.update(task, progress=False)
    (score,) = ncl.evaluate(posterior, task)
    assert score.accuracy > 0.9
    assert set(posterior.blocks) == {"words.weight", "norm.weight", "norm.bias", "out"}
    if isinstance(train, DataLoader):
        assert isinstance(next(iter(train)), (dict, Encoding))  # the user's own is as it was


@pytest.mark.parametrize("how", [{}, {"num_samples": 4}, {"method": "linearized"}])
def test_predictions_take_the_mapping_without_the_target(how: dict[str, Any]) -> None:
    posterior = ncl.OnlinePosterior(reader(), ncl.VariationalNCL(steps=5, batch_size=20))
    posterior.update(ncl.Task(text(), name="text", target="labels"), progress=False)
    data = text(1)
    data.pop("labels")
    assert posterior.predict(data, **how).probs.shape == (EXAMPLES, 2)
    shifted = posterior.predict(data, shift=100.0, **how)
    torch.testing.assert_close(shifted.probs, posterior.predict(data, **how).probs, rtol=0.2, atol=0.2)


def test_a_snapshot_knows_what_is_in_the_mapping(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(progress: Any) -> None:
        if progress.step == 15:
            raise Killed

    def task(seed: int) -> ncl.Task:
        return ncl.Task(text(seed), name="text", target="labels")

    engine, path = ncl.LaplaceNCL(steps=30, batch_size=20), tmp_path / "snapshot.ncl"
    whole = ncl.OnlinePosterior(reader(), engine)
    losses = whole.update(task(0), progress=False).losses
    with pytest.raises(Killed):
        ncl.OnlinePosterior(reader(), engine).update(
            task(0), progress=False, checkpoint=path, checkpoint_every=10, callbacks=[kill]
        )
    with pytest.raises(FileError, match="another update"):
        ncl.OnlinePosterior(reader(), engine).update(task(1), progress=False, checkpoint=path)
    again = ncl.OnlinePosterior(reader(), engine)
    assert again.update(task(0), progress=False, checkpoint=path).losses == losses


def test_kept_examples_are_mappings_again_after_they_were_read(tmp_path: Path) -> None:
    learner = ReplayLearner(reader(), ncl.LaplaceNCL(steps=5, batch_size=20), keep=7)
    learner.update(ncl.Task(Texts(), name="text", target="labels"), progress=False)
    learner.save(tmp_path / "learner.ncl")
    again = ReplayLearner.load(tmp_path / "learner.ncl", reader())
    again.update(ncl.Task(Texts(1), name="more text", target="labels"), progress=False)
    learner.update(ncl.Task(Texts(1), name="more text", target="labels"), progress=False)
    for site, value in learner.mean().items():
        assert torch.equal(value, again.mean()[site])


def test_independent_weights_of_a_model_that_looks_into_its_mask() -> None:
    looking = ncl.OnlinePosterior(reader(LookingReader), EWC(steps=5, batch_size=20))
    with pytest.warns(UserWarning, match="cannot vectorise"):
        looking.update(ncl.Task(text(), name="text", target="labels"), progress=False)
    plain = ncl.OnlinePosterior(reader(), EWC(steps=5, batch_size=20))
    plain.update(ncl.Task(text(), name="text", target="labels"), progress=False)
    for name, state in plain.blocks.items():
        torch.testing.assert_close(looking.blocks[name].distribution.variance, state.distribution.variance)


def test_what_a_network_returns_is_picked() -> None:
    torch.manual_seed(0)
    model = ncl.BayesianNetwork(Reader(), ncl.Categorical(), output=lambda returned: returned.logits * 2)
    plain = reader()
    inputs = {name: tensor for name, tensor in text().items() if name != "labels"}
    values = plain.initial_values()
    doubled, single = (
        ncl.watch.watch(made, (inputs, text()["labels"]), values).observed["y"].fn.logits for made in (model, plain)
    )
    torch.testing.assert_close(doubled.diff(dim=-1), 2 * single.diff(dim=-1))
    assert model.with_prior(ncl.priors.scaled(2.0)).output is model.output

    class Other(Reader):
        def forward(self, **inputs: Any) -> Any:
            return (super().forward(**inputs).logits,)

    with pytest.raises(ModelError, match=r"returned a tuple.*`output`"):
        ncl.BayesianNetwork(Other(), ncl.Categorical())(inputs)
    with pytest.raises(SettingError, match="output must be a function"):
        ncl.BayesianNetwork(Reader(), ncl.Categorical(), output="logits")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        (text(), None, r"'input_ids', 'attention_mask', 'labels': say which.*target="),
        (text(), "label", r"no 'label'.*'labels'"),
        ({"labels": torch.zeros(3)}, "labels", "nothing but its target"),
        ({**text(), "input_ids": torch.zeros(3, 2)}, "labels", "different lengths"),
        (DataLoader(Texts(), batch_size=5), None, "say which of these is the target"),
        (DataLoader(Texts(), batch_size=5), "label", "no 'label'"),
        (lambda size, generator: torch.zeros(size), "labels", "must be a mapping"),
    ],
)
def test_what_does_not_fit_is_said(source: Any, target: str | None, said: str) -> None:
    posterior = ncl.OnlinePosterior(reader(), ncl.LaplaceNCL(steps=2))
    with pytest.raises(NCLError, match=said):
        posterior.update(ncl.Task(source, name="text", target=target, size=EXAMPLES), progress=False)


def test_the_name_of_a_target_is_a_string() -> None:
    with pytest.raises(SettingError, match="target must be the name"):
        ncl.Task(text(), name="text", target=2)  # type: ignore[arg-type]


def test_nested_things_keep_their_form() -> None:
    item = {"a": torch.zeros(2), "b": [torch.ones(3), "word"], "c": (torch.zeros(1), None)}
    assert mapped(len, item) == {"a": 2, "b": [3, "word"], "c": (1, None)}
    assert [name for name, _ in tensors_of((item, torch.zeros(1)))] == ["0/a", "0/b/0", "0/c/0", "1"]
    twice = joined([{"a": torch.zeros(2)}, {"a": torch.ones(1)}], torch.cat)
    assert twice["a"].tolist() == [0, 0, 1]
    with pytest.raises(TypeError, match="no tensor"):
        joined(["word", "word"], torch.cat)


def test_an_object_that_moves_itself_is_moved() -> None:
    moved = []

    class Graph:
        def to(self, device: torch.device) -> Graph:
            moved.append(device)
            return self

    to_device((Graph(), torch.zeros(1)), torch.device("cpu"))
    assert moved == [torch.device("cpu")]
