"""Film reviews, passage by passage: which passages of other reviews is each prediction made of?"""

import re
from collections import Counter
from textwrap import shorten

import torch
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.data import reviews

LENGTH = 25  # words in a passage; shorter rests are left out
NAMES = "bad", "good"


def passages_of(texts):
    """The passages of some texts as lists of words, and of which text each of them is."""
    passages, rows = [], []
    for row, text in enumerate(texts):
        words = re.findall(r"[a-z']+", text.lower().replace("<br />", " "))
        for start in range(0, len(words) - LENGTH + 1, LENGTH):
            passages.append(words[start : start + LENGTH])
            rows.append(row)
    return passages, torch.tensor(rows)


class Reader(nn.Module):
    """The mean of the embeddings of the words that it knows, and two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5001, 32, padding_idx=0)
        self.fc1, self.fc2 = nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, tokens):
        known = (tokens > 0).sum(1, keepdim=True).clamp(min=1)
        return self.fc2(F.relu(self.fc1(self.embed(tokens).sum(1) / known)))


torch.manual_seed(0)
texts, labels = reviews("train")
passages, review = passages_of(texts[:2000])
y = labels[:2000][review]
common = Counter(word for passage in passages for word in passage).most_common(5000)
number = {word: i for i, (word, _) in enumerate(common, 1)}


def tokens(passages):
    """Each passage as the numbers of its words; 0 stands for unknown words."""
    return torch.tensor([[number.get(word, 0) for word in passage] for passage in passages])


x, model = tokens(passages), Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=50)
with dualform.record(model, optimizer, "runs/reviews", overwrite=True) as tape:
    for _ in range(3):
        for index in torch.randperm(len(x)).split(100):
            tape.note(index=index, label=y[index], review=review[index])
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()

held_out, held_out_labels = reviews("test")
asked, _ = passages_of(held_out[53:54])
spot = dualform.open("runs/reviews").attend(model, tokens(asked))
hits = spot.top(3)
print(f"a {NAMES[held_out_labels[53]]} review")
for row, passage in enumerate(asked):
    print(f"\n{' '.join(passage)}\n  {NAMES[spot.prediction[row].argmax()]}, made of:")
    for hit in hits[row]:
        words = shorten(" ".join(passages[hit.index]), 90, placeholder=" …")
        print(f"  {hit.contribution:+.2f}  {NAMES[hit.label]}, review {hit.review}: {words}")
