"""Networks that others wrote, as their users have them: whether they are learnt, with which blocks, and at what cost.

``python -m tests.benchmarks.networks`` tries each network of `NETWORKS` whose package is installed (``.[zoo]``), in a
process of its own, and prints a table; names as arguments choose among them. With ``--out`` it goes on where it was
ended. All are small, with random weights: what matters is how they are written. A step and a Fisher are timed against
plain training in the same process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nclbayes as ncl
from nclbayes.blocks import DiagonalBlock
from nclbayes.engines import PAPER
from nclbayes.errors import NCLError
from tests.benchmarks.operators import declare_operators

EXAMPLES, BATCH, STEPS = 64, 16, 8
WORDS, LENGTH, SIDE = 200, 16, 32

Made = tuple[nn.Module, Any]


@dataclass
class Verdict:
    """What became of a network.

    Attributes:
        said: "learnt", or the first words of the refusal.
        kronecker: How many blocks have Kronecker factors.
        diagonal: How many are diagonal.
        weights: How many weights there are.
        laplace: A Laplace-NCL step over a plain one.
        variational: A variational one over a plain one.
        fisher: The Fisher of all examples over a plain epoch.
        memory: The peak of the process, in MiB.
        notices: Warnings of the library's.
    """

    said: str
    kronecker: int = 0
    diagonal: int = 0
    weights: int = 0
    laplace: float = float("nan")
    variational: float = float("nan")
    fisher: float = float("nan")
    memory: float = float("nan")
    notices: list[str] = field(default_factory=list)


def text() -> dict[str, Tensor]:
    ids = torch.randint(5, WORDS, (EXAMPLES, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(6, LENGTH + 1, (EXAMPLES, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def images() -> Tensor:
    return torch.randn(EXAMPLES, 3, SIDE, SIDE)


def hugging_face(kind: str, **settings: Any) -> Callable[[], Made]:
    """A classifier of sequences, with a mask and padding."""

    def make() -> Made:
        import transformers

        common = {"vocab_size": WORDS, "num_labels": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, f"{kind}Config")(**{**common, **settings})
        return getattr(transformers, f"{kind}ForSequenceClassification")(config), text()

    return make


def vision(kind: str, **settings: Any) -> Callable[[], Made]:
    """A classifier of images of transformers."""

    def make() -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(num_labels=2, **settings)
        return getattr(transformers, f"{kind}ForImageClassification")(config), {"pixel_values": images()}

    return make


def timm_model(name: str, **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        import timm

        return timm.create_model(name, num_classes=2, **settings), images()

    return make


def torchvision_model(name: str, **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        import torchvision

        return torchvision.models.get_model(name, num_classes=2, **settings), images()

    return make


def adapted(**settings: Any) -> Callable[[], Made]:
    """A small text model with adapters of peft; its own weights are frozen."""

    def make() -> Made:
        import peft

        net, inputs = NETWORKS["transformers: BERT"]()
        kind = settings.pop("kind", "LoraConfig")
        return peft.get_peft_model(net, getattr(peft, kind)(task_type="SEQ_CLS", **settings)), inputs

    return make


class _Pooled(nn.Module):
    """A network whose outputs are averaged over all places, and taken for logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(*inputs).flatten(2).mean(-1)


def segmentation(name: str) -> Callable[[], Made]:
    def make() -> Made:
        import segmentation_models_pytorch as smp

        settings = {"encoder_depth": 3, "decoder_channels": (32, 16, 8)}
        net = getattr(smp, name)("resnet18", encoder_weights=None, classes=2, **settings)
        return _Pooled(net), images()

    return make


def vit_package(module: str, name: str, **settings: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(__import__(module, fromlist=[name]), name)(image_size=SIDE, num_classes=2, **settings)
        return made, images()

    return make


def x_transformer() -> Made:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=2)
    net = TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers, logits_dim=2)
    return _First(net), torch.randint(5, WORDS, (EXAMPLES, LENGTH))


class _First(nn.Module):
    """A network whose output at the first place is taken."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, 0]


class _Table(nn.Module):
    """A network for tables of classes and numbers, called with both."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, classes: Tensor, numbers: Tensor) -> Tensor:
        return self.net(classes, numbers)


def tab_transformer(name: str) -> Callable[[], Made]:
    def make() -> Made:
        import tab_transformer_pytorch

        own = {"mlp_act": nn.ReLU()} if name == "TabTransformer" else {}
        net = getattr(tab_transformer_pytorch, name)(
            categories=(4, 5, 6), num_continuous=3, dim=16, dim_out=2, depth=2, heads=2, **own
        )
        return _Table(net), {"classes": torch.randint(4, (EXAMPLES, 3)), "numbers": torch.randn(EXAMPLES, 3)}

    return make


def tabular(name: str) -> Callable[[], Made]:
    def make() -> Made:
        import rtdl_revisiting_models as rtdl

        if name == "FTTransformer":
            settings = {**rtdl.FTTransformer.get_default_kwargs(n_blocks=1), "linformer_kv_compression_ratio": None}
            settings = {k: v for k, v in settings.items() if k not in ("linformer_kv_compression_ratio", "_is_default")}
            net = rtdl.FTTransformer(n_cont_features=5, cat_cardinalities=[], d_out=2, **settings)
            return _Numbers(net), torch.randn(EXAMPLES, 5)
        if name == "ResNet":
            sizes = {"n_blocks": 2, "d_block": 16, "d_hidden": None, "d_hidden_multiplier": 2.0}
            net = rtdl.ResNet(d_in=5, d_out=2, dropout1=0.0, dropout2=0.0, **sizes)
        else:
            net = rtdl.MLP(d_in=5, d_out=2, n_blocks=2, d_block=16, dropout=0.0)
        return net, torch.randn(EXAMPLES, 5)

    return make


class _Numbers(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, None)


def efficientnet() -> Made:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=2, image_size=SIDE), images()


def plain_torch(name: str, shown: bool = False) -> Callable[[], Made]:
    """A module of torch's, perhaps made visible."""

    def make() -> Made:
        if name in ("LSTM", "GRU"):
            core = getattr(nn, name)(4, 16, batch_first=True)
            return _Last(ncl.nn.visible(core) if shown else core), torch.randn(EXAMPLES, 10, 4)
        if name == "TransformerEncoder":
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            encoder = nn.TransformerEncoder(layer, 2)
            return _Averaged(ncl.nn.visible(encoder) if shown else encoder), torch.randn(EXAMPLES, 10, 16)
        norm = nn.utils.parametrizations.weight_norm
        return nn.Sequential(norm(nn.Linear(4, 16)), nn.Tanh(), norm(nn.Linear(16, 2))), torch.randn(EXAMPLES, 4)

    return make


class _Last(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.out = net, nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)[0][:, -1])


class _Averaged(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.out = net, nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x).mean(1))


_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = {**_TINY, "max_position_embeddings": 40}
_VISION = {**_TINY, "image_size": SIDE, "patch_size": 8}

NETWORKS: dict[str, Callable[[], Made]] = {
    "transformers: BERT": hugging_face("Bert", **_TEXT),
    "transformers: RoBERTa": hugging_face("Roberta", **_TEXT),
    "transformers: DistilBERT": hugging_face("DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "transformers: ALBERT": hugging_face("Albert", embedding_size=16, **_TEXT),
    "transformers: ELECTRA": hugging_face("Electra", embedding_size=16, **_TEXT),
    "transformers: DeBERTa v2": hugging_face(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], **_TEXT
    ),
    "transformers: GPT-2": hugging_face("GPT2", n_embd=32, n_layer=2, n_head=2, n_positions=40),
    "transformers: Llama": hugging_face("Llama", **_TEXT),
    "transformers: Qwen2": hugging_face("Qwen2", num_key_value_heads=2, **_TEXT),
    "transformers: Mixtral": hugging_face(
        "Mixtral", num_key_value_heads=2, num_local_experts=4, **{**_TEXT, "num_hidden_layers": 1}
    ),
    "transformers: ViT": vision("ViT", **_VISION),
    "transformers: DeiT": vision("DeiT", **_VISION),
    "transformers: BEiT": vision("Beit", **_VISION),
    "transformers: Swin": vision(
        "Swin", image_size=SIDE, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
    ),
    "transformers: ConvNeXt": vision("ConvNext", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "timm: ResNet-10t": timm_model("resnet10t"),
    "timm: ViT": timm_model("vit_tiny_patch16_224", img_size=SIDE, patch_size=8, embed_dim=32, depth=2, num_heads=2),
    "timm: ConvNeXt": timm_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)),
    "timm: EfficientNet": timm_model("efficientnet_lite0"),
    "timm: MobileNetV3": timm_model("mobilenetv3_small_050"),
    "timm: RegNet": timm_model("regnetx_002"),
    "torchvision: ResNet-18": torchvision_model("resnet18"),
    "torchvision: MobileNetV2": torchvision_model("mobilenet_v2"),
    "torchvision: SqueezeNet": torchvision_model("squeezenet1_1"),
    "torchvision: ShuffleNet": torchvision_model("shufflenet_v2_x0_5"),
    "peft: LoRA": adapted(r=4, target_modules=["query", "value"]),
    "peft: IA3": adapted(
        kind="IA3Config", target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
    ),
    "segmentation_models_pytorch: Unet": segmentation("Unet"),
    "vit_pytorch: ViT": vit_package("vit_pytorch", "ViT", patch_size=8, dim=32, depth=2, heads=2, mlp_dim=64),
    "vit_pytorch: SimpleViT": vit_package(
        "vit_pytorch", "SimpleViT", patch_size=8, dim=32, depth=2, heads=2, mlp_dim=64
    ),
    "x_transformers: Encoder": x_transformer,
    "tab_transformer_pytorch: TabTransformer": tab_transformer("TabTransformer"),
    "tab_transformer_pytorch: FTTransformer": tab_transformer("FTTransformer"),
    "rtdl_revisiting_models: FTTransformer": tabular("FTTransformer"),
    "rtdl_revisiting_models: ResNet": tabular("ResNet"),
    "efficientnet_pytorch: EfficientNet-b0": efficientnet,
    "torch: LSTM": plain_torch("LSTM"),
    "torch: LSTM, visible": plain_torch("LSTM", shown=True),
    "torch: GRU, visible": plain_torch("GRU", shown=True),
    "torch: TransformerEncoder, visible": plain_torch("TransformerEncoder", shown=True),
    "torch: weight_norm": plain_torch("weight_norm"),
}


def tried(name: str) -> Verdict:
    """Learn a network for a few steps with each engine, in this process."""
    declare_operators()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net, inputs = NETWORKS[name]()
    net.eval()
    target = torch.randint(2, (EXAMPLES,))
    weights = sum(p.numel() for p in net.parameters() if p.requires_grad)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            plain = _plain(net, inputs, target)
            data = {**inputs, "target": target} if isinstance(inputs, dict) else {"x": inputs, "target": target}
            task = (
                ncl.Task(data, name=name, target="target")
                if isinstance(inputs, dict)
                else ncl.Task((inputs, target), name=name)
            )
            posterior, laplace, fisher = _learnt(ncl.LaplaceNCL, net, task)
            _, variational, _ = _learnt(ncl.VariationalNCL, net, task)
        except NCLError as error:
            return Verdict(f"{type(error).__name__}: {error}", weights=weights, memory=_peak())
    kinds = [isinstance(state.block, DiagonalBlock) for state in posterior.blocks.values()]
    own = [str(w.message) for w in noted if "vectorise" in str(w.message)]
    epoch = plain * EXAMPLES / BATCH
    return Verdict(
        "learnt",
        kronecker=kinds.count(False),
        diagonal=kinds.count(True),
        weights=weights,
        laplace=laplace / plain,
        variational=variational / plain,
        fisher=fisher / epoch,
        memory=_peak(),
        notices=sorted(set(own)),
    )


def _plain(net: nn.Module, inputs: Any, target: Tensor) -> float:
    """Seconds of a step of plain training."""
    learnt = [p for p in net.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(learnt, lr=0.0, momentum=0.9)
    seconds = []
    for k in range(STEPS):
        index = slice(k * BATCH % EXAMPLES, k * BATCH % EXAMPLES + BATCH)
        started = time.process_time()
        optimiser.zero_grad()
        some = {key: value[index] for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[index]
        out = net(**some) if isinstance(some, dict) else net(some)
        nn.functional.cross_entropy(getattr(out, "logits", out), target[index]).backward()
        optimiser.step()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def _learnt(engine: Any, net: nn.Module, task: ncl.Task) -> tuple[ncl.OnlinePosterior, float, float]:
    """The posterior, seconds of a step, and of all that comes after the last."""
    times: list[float] = []
    settings = {**PAPER, "steps": STEPS, "batch_size": BATCH, "lr": 1e-3}
    if engine is ncl.VariationalNCL:
        settings["refresh_every"] = 10 * STEPS
    posterior = ncl.OnlinePosterior(ncl.BayesianNetwork(net, ncl.Categorical()), engine(**settings))
    posterior.update(task, progress=False, callbacks=[lambda _: times.append(time.process_time())])
    after = time.process_time() - times[-1]
    # Those after which samples are drawn from a new Gaussian are left out by the median.
    return posterior, statistics.median(b - a for a, b in pairwise(times)), after


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def verdicts(names: list[str], seconds: float) -> Iterator[tuple[str, Verdict]]:
    """Each network's, from a process of its own that is ended in time."""
    for name in names:
        command = [sys.executable, "-m", "tests.benchmarks.networks", "--one", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
            lines = done.stdout.splitlines()
            found = Verdict(**json.loads(lines[-1])) if lines and not done.returncode else None
            yield name, found or Verdict(f"failed: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
        except subprocess.TimeoutExpired:
            yield name, Verdict(f"not done in {seconds:.0f} s")


def row(name: str, found: Verdict) -> str:
    """A line of the table."""
    said = found.said if len(found.said) < 90 else found.said[:87] + "..."
    numbers = [f"{value:.1f}" if value == value else "" for value in (found.laplace, found.variational, found.fisher)]
    blocks = f"{found.kronecker} + {found.diagonal}" if found.said == "learnt" else ""
    said += ", one example at a time" if found.notices else ""
    return f"| {name} | {said} | {found.weights:,} | {blocks} | {' | '.join(numbers)} | {found.memory:.0f} |"


def kept(path: Path | None) -> dict[str, str]:
    """The rows that a file has, by network."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the networks' names")
    parser.add_argument("--one", help="try this one here, and print its verdict as JSON")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long one may take")
    parser.add_argument("--out", type=Path, help="a file to keep the rows in: those that it has are not measured again")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(asdict(tried(given.one))))
        return
    installed = [name for name in NETWORKS if find_spec(name.partition(":")[0])]
    chosen = [name for name in installed if not given.names or any(part in name for part in given.names)]
    rows = kept(given.out)
    lines = [
        "| Network | verdict | weights | blocks | Laplace step | variational step | Fisher | MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in verdicts([name for name in chosen if name not in rows], given.seconds):
        rows[name] = row(name, found)
        print(rows[name], file=sys.stderr, flush=True)
        if given.out is not None:
            given.out.write_text("\n".join([*lines, *rows.values()]) + "\n")
    print("\n".join([*lines, *(rows[name] for name in NETWORKS if name in rows)]))


if __name__ == "__main__":
    main()
