"""Fine-tune a language model on two texts, all of it and with LoRA, and ask which rows an answer is made of.

Run as: python examples/finetuning.py [steps]. It needs the extras hf, lora and plot, takes two or three minutes, and
leaves 1.5 GB in runs/finetuning.
"""

import copy
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import get_linear_schedule_with_warmup

import dualform
from dualform.data import aesop, stories, wikitext2
from dualform.errors import DataNotFound

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 150
LENGTH, BATCH, TRAIN, TEST = 48, 4, 200, 50  # tokens a row, rows a batch, and rows of each source
PROMPT, NEW = "The Wolf said to the", 16  # NEW tokens are the answer
torch.set_num_threads(1)  # on layers this small a second thread costs more than it brings
torch.manual_seed(0)

try:
    pretrained, tokenizer = stories()  # a Llama of 260,000 weights that tells children's stories: our W₀
    texts = {"fables": aesop().split("\n\n"), "wikipedia": wikitext2("train").split("\n")[:4000]}
except DataNotFound as error:
    sys.exit(str(error))


def rows_of(paragraphs: list[str]) -> torch.Tensor:
    """The beginnings of all paragraphs that are long enough, in letters that the model knows."""
    known = str.maketrans("“”‘’—Ææ", "\"\"''-Ee")
    plain = [" ".join(text.translate(known).replace(" @", "").replace("@ ", "").split()) for text in paragraphs]
    tokens = tokenizer([text for text in plain if text and "<unk>" not in text]).input_ids
    return torch.tensor([row[:LENGTH] for row in tokens if len(row) >= LENGTH])[: TRAIN + TEST]


def text_of(tokens: torch.Tensor) -> str:
    """Tokens as one reads them."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


rows = {source: rows_of(paragraphs) for source, paragraphs in texts.items()}
train = torch.cat([each[:TRAIN] for each in rows.values()])
source_of = [source for source in rows for _ in range(TRAIN)]
order = torch.cat([torch.randperm(len(train)) for _ in range(BATCH * STEPS // len(train) + 1)])
prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
start = prompt.shape[1]  # where the answer begins


def answer_of(model) -> torch.Tensor:
    """The prompt, and how the model goes on."""
    ones = torch.ones_like(prompt)
    return model.generate(input_ids=prompt, attention_mask=ones, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def show(name: str, model) -> None:
    """How likely rows are that nobody was trained on (log-likelihood of a token), and how the model goes on."""
    with torch.no_grad():
        likely = {source: -model(input_ids=each[TRAIN:], labels=each[TRAIN:]).loss for source, each in rows.items()}
    print(f"{name:<25}", *(f"{source} {value:.2f}  " for source, value in likely.items()), text_of(answer_of(model)[0]))


def fine_tune(model, lr: float, path: str) -> dualform.Memory:
    """Train as one always does; the recording is the ``with`` and the note."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    schedule = get_linear_schedule_with_warmup(optimizer, STEPS // 3, STEPS)
    with dualform.record(model.train(), optimizer, path, dtype="float32", overwrite=True) as tape:
        for index in order.split(BATCH)[:STEPS]:
            tape.note(index=index, source=[source_of[i] for i in index])
            model(input_ids=train[index], labels=train[index]).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    return dualform.open(path)


def explain(memory: dualform.Memory, model, layer: str) -> None:
    """Which rows the answer is made of, in one layer, and how much of it comes from each source."""
    answer = answer_of(model)

    def lead(output):  # how far the logits of the answer's tokens stand above the mean logit, summed over the answer
        logits = output.logits[:, start - 1 : -1]
        return (logits.gather(2, answer[:, start:, None])[..., 0] - logits.mean(2)).sum(1)

    spot = memory.attend(model, {"input_ids": answer}, target=lead)
    print(f"in {layer} these add most:")
    for hit in spot.top(3, layer=layer, progress=False, per="slot"):
        row, at = train[hit.index], hit.position + 1  # a token's error is about the token after it
        before, upto, whole = text_of(row[:at]), text_of(row[: at + 1]), text_of(row)
        marked = f"{before}[{upto[len(before) :]}]{whole[len(upto) :]}"
        print(f"  {hit.contribution:+.3f}  {hit.source} {hit.index}, step {hit.step}, token {at}: {marked}")
    parts = spot.by("source", layer=layer, progress=False)
    sources = ", ".join(f"{source} {value:+.2f}" for source, value in zip(parts.names, parts.values[0], strict=True))
    print(f"  of {parts.total[0]:+.2f} in all: {sources}, pretrained {parts.initial[0]:+.2f}", end=", ")
    print(f"residual {parts.residual[0]:.0e}")
    dualform.plot.by(parts).savefig(memory.path / "by.png")
    dualform.plot.timeline(spot.timeline("source", layer=layer, progress=False)).savefig(memory.path / "timeline.png")


last = f"layers.{pretrained.config.num_hidden_layers - 1}.mlp.down_proj"
lora = get_peft_model(copy.deepcopy(pretrained), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
show("pretrained", pretrained)
for name, model, lr, layer in (
    ("all weights", copy.deepcopy(pretrained), 4e-4, "lm_head"),
    ("LoRA", lora, 2e-3, f"base_model.model.model.{last}.lora_B.default"),
):
    memory = fine_tune(model, lr, f"runs/finetuning/{name.split()[0]}")
    print(f"\n{name}: {len(memory.layers)} layers, the certificate is {max(memory.certificate.values()):.0e}")
    show("fine-tuned", model)
    for source in rows:
        masked = memory.without(f"source = '{source}'").load_into(copy.deepcopy(model), progress=False)
        show(f"... without {source}", masked)
    explain(memory, model, layer)
