"""A model of characters writes a sentence in the manner of Aesop: which fables does the sentence come from?"""

import torch
from torch.nn import functional as F

import dualform
from dualform.data import aesop
from dualform.models import LSTMLanguageModel

LENGTH = 96  # characters in a passage
torch.manual_seed(0)
text = aesop("train")
alphabet = sorted(set(text))
passages, fables = [], []
for fable in text.split("\n" * 5)[1:]:
    title, _, body = fable.partition("\n" * 3)
    body = " ".join(body.split())
    for start in range(0, len(body) - LENGTH, LENGTH):
        passages.append([alphabet.index(character) for character in body[start : start + LENGTH + 1]])
        fables.append(title)
x = torch.tensor(passages)

model = LSTMLanguageModel(len(alphabet), 128)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50)
options = {"layers": ["output"], "snapshot_every": 100}  # one layer is what we shall ask, which keeps the memory small
with dualform.record(model, optimizer, "runs/characters", overwrite=True, **options) as tape:
    for _ in range(16):
        for index in torch.randperm(len(x)).split(32):
            tape.note(index=index, fable=[fables[i] for i in index])
            logits, _ = model(x[index, :-1])
            F.cross_entropy(logits.flatten(0, 1), x[index, 1:].flatten()).backward()
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()

prompt = "The Wolf said to the "
written = [alphabet.index(character) for character in prompt]
while len(written) < LENGTH and alphabet[written[-1]] != ".":
    logits, _ = model(torch.tensor([written]))
    written.append(int(torch.multinomial((logits[0, -1] / 0.4).softmax(0), 1)))
print("".join(alphabet[i] for i in written))
sentence = torch.tensor([written])


def lead(output):
    """How far the logits of what was written lie above the mean logit, summed over the sentence."""
    logits = output[0][:, len(prompt) - 1 : -1]
    return (logits.gather(2, sentence[:, len(prompt) :, None])[..., 0] - logits.mean(2)).sum(1)


spot = dualform.open("runs/characters").attend(model, sentence, target=lead)
parts = spot.by("fable", layer="output")
for title, value in parts.largest(5)[0]:
    print(f"{value:+6.1f}  {title}")
print(f"{parts.total[0]:+6.1f}  in all, the residual is {parts.residual[0]:.0e}")
for hit in spot.top(3):
    print(f"{hit.contribution:+.2f}  {hit.fable}: {''.join(alphabet[i] for i in passages[hit.index][1:])}")
