"""Trainers that train one model in several processes, or in one on the same batches; stopped, and resumed.

``torchrun --nproc-per-node 2 tests/record/trainers_together.py FOLDER hf`` (or ``lightning``).
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

import dualform

os.environ.setdefault("HF_HUB_OFFLINE", "1")

BATCH, STEPS, STOPPED_AT, SAVED_AT = 8, 6, 5, 4
EXAMPLES, WORDS = 2 * BATCH * STEPS, 32


def hf(folder: Path, world: int) -> nn.Module:
    """A small Llama, two batches to a step, clipped, with AdamW."""
    import transformers

    from dualform.record.hf import RecordCallback

    class Sequential(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(range(EXAMPLES))

    transformers.utils.logging.set_verbosity_error()
    words = torch.randint(WORDS, (EXAMPLES, 6), generator=torch.Generator().manual_seed(0)).tolist()
    data: Any = [{"input_ids": w, "labels": w, "index": i, "source": f"s{i % 3}"} for i, w in enumerate(words)]
    for last in (STOPPED_AT, STEPS):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).double()
        settings = transformers.TrainingArguments(
            output_dir=str(folder / "checkpoints"), per_device_train_batch_size=BATCH // world, use_cpu=True,
            gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=1e-2, adam_epsilon=1e-4, max_steps=last,
            lr_scheduler_type="constant", save_steps=SAVED_AT, ddp_backend="gloo", report_to=[], disable_tqdm=True,
            optim="adamw_torch",
        )  # fmt: skip
        record = RecordCallback(folder / "memory", columns=("index", "source"), dtype="float64", progress=False)
        Sequential(model, settings, train_dataset=data, callbacks=[record]).train(
            resume_from_checkpoint=None
            if last == STOPPED_AT
            else str(folder / "checkpoints" / f"checkpoint-{SAVED_AT}")
        )
    return model


def lightning(folder: Path, world: int) -> nn.Module:
    """A small perceptron, two batches to a step, clipped, with AdamW."""
    import lightning.pytorch as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from dualform.record.lightning import RecordCallback

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> optim.Optimizer:
            return optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def columns(batch: Any) -> dict[str, Any]:
        return {"index": batch[2], "source": [f"s{int(i) % 3}" for i in batch[2]]}

    random = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, 6, generator=random, dtype=torch.float64)
    y = torch.randint(3, (EXAMPLES,), generator=random)
    saved = folder / "checkpoint.ckpt"
    for last in (STOPPED_AT, STEPS):
        record = RecordCallback(folder / "memory", columns=columns, dtype="float64", progress=False)
        checkpoint = ModelCheckpoint(folder, "checkpoint", every_n_train_steps=SAVED_AT)
        trainer = L.Trainer(
            accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_steps=last, logger=False,
            accumulate_grad_batches=2, gradient_clip_val=0.5, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[record, checkpoint], use_distributed_sampler=False,
        )  # fmt: skip
        data = TensorDataset(x, y, torch.arange(EXAMPLES))
        order = DistributedSampler(data, world, int(os.environ["RANK"]), shuffle=False)
        loader = DataLoader(data, batch_size=BATCH // world, sampler=order)
        model = Net()
        trainer.fit(model, loader, ckpt_path=None if last == STOPPED_AT else str(saved))
    return model


TRAINERS: dict[str, Callable[[Path, int], nn.Module]] = {"hf": hf, "lightning": lightning}

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = TRAINERS[sys.argv[2]](Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        assert dualform.open(Path(sys.argv[1]) / "memory").is_of(model)
