"""How well memory.suspects finds 5 % wrong labels: on images, tables and text, beside trivial scores. AUCs.

python benchmarks/suspects.py [--results FILE]

Needs DUALFORM_DATA (Japanese Vowels, NATOPS, Fashion-MNIST, IMDB), mlxtend and scikit-learn (in the extra demo).
"""

import argparse
import json
import re
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from paper_run import machine, save
from scipy.sparse import csr_matrix
from sklearn.datasets import load_breast_cancer
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from torch import nn
from torch.nn import functional as F

import dualform
from dualform.data import digits, fashion_mnist, reviews, series, small_digits
from dualform.evaluate import mislabelled
from dualform.models import MLP

WRONG, BATCH, SEEDS, FAR = 0.05, 50, (1, 2), 0.01
BARS = {"digits": 0.95, "table": 0.95, "text": 0.90}
REVIEWS, WORDS, LENGTH = 8000, 20_000, 400


class Bag(nn.Module):
    """The sum of the embeddings of a text's words, scaled, and two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, 64)
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 2)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, words):
        present = (words > 0).float().unsqueeze(-1)
        texts = (self.embed(words) * present).sum(1) / present.sum(1).clamp(min=1).sqrt()
        return self.fc2(self.fc1(texts).relu())


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(self.conv1(x.unflatten(1, (1, 8, 8))).relu(), 2)
        return self.head(F.max_pool2d(self.conv2(x).relu(), 2).flatten(1))


@cache
def table():
    """Japanese Vowels as a table: the mean and deviation of 12 coefficients of a spoken vowel; 640 rows, 9 speakers."""
    rows, labels = [], []
    for part in (series("JapaneseVowels", "train"), series("JapaneseVowels", "test")):
        for values, padding in zip(part.values, part.padding, strict=True):
            rows.append(torch.cat([values[~padding].mean(0), values[~padding].std(0)]))
        labels.append(part.labels)
    return scaled(torch.stack(rows)), torch.cat(labels)


@cache
def breast_cancer():
    bunch = load_breast_cancer()
    return scaled(torch.tensor(bunch.data).float()), torch.tensor(bunch.target)


def scaled(x):
    return (x - x.mean(0)) / x.std(0)


@cache
def small_images():
    x, y = small_digits()
    return x.flatten(1).float() / 16, y


@cache
def large_images():
    x, y = digits()
    return x.flatten(1).float() / 255, y


@cache
def clothes():
    x, y = fashion_mnist("train")
    return x[:3000].flatten(1).float() / 255, y[:3000]


@cache
def gestures():
    """NATOPS as a table: the mean and deviation of 24 coordinates of a gesture; 360 rows, 6 classes."""
    parts = series("NATOPS", "train"), series("NATOPS", "test")
    values = torch.cat([part.values for part in parts])
    return scaled(torch.cat([values.mean(1), values.std(1)], 1)), torch.cat([part.labels for part in parts])


@cache
def texts():
    """The first words of IMDB reviews, as numbers of the commonest ones."""
    part = reviews("train")
    words = [re.findall(r"[a-z']+|[!?]", text.lower().replace("<br />", " ")) for text in part.texts[:REVIEWS]]
    common = Counter(word for text in words for word in set(text)).most_common(WORDS)
    numbers = {word: i for i, (word, _) in enumerate(common, 1)}
    x = torch.zeros(REVIEWS, LENGTH, dtype=torch.long)
    for row, text in zip(x, words, strict=True):
        known_words = [numbers[word] for word in text if word in numbers][:LENGTH]
        row[: len(known_words)] = torch.tensor(known_words)
    return x, part.labels[:REVIEWS]


class Setting(NamedTuple):
    name: str
    bar: str
    data: object
    network: object
    optimizer: object
    epochs: int
    keep: object = "slots"
    chosen: bool = True
    """Whether the way to score was chosen on trainings like this one."""


def sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(lr):
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr)


SLOW = (large_images, clothes, texts)
"""Data that take minutes: one seed."""
TOKENS = {"embed": "keys"}
SETTINGS = [
    Setting("digits 8 × 8, MLP, SGD", "digits", small_images, lambda: MLP(64, 64, 64, 10), sgd(0.1), 3),
    Setting("digits 8 × 8, MLP, SGD", "digits", small_images, lambda: MLP(64, 64, 64, 10), sgd(0.1), 60),
    Setting("digits 8 × 8, MLP, Adam", "digits", small_images, lambda: MLP(64, 64, 64, 10), adam(1e-3), 60),
    Setting("digits 8 × 8, CNN, Adam", "digits", small_images, CNN, adam(3e-3), 20, chosen=False),
    Setting("digits 28 × 28, MLP, SGD", "digits", large_images, lambda: MLP(784, 128, 10), sgd(0.1), 3),
    Setting("digits 28 × 28, MLP, Adam", "digits", large_images, lambda: MLP(784, 128, 10), adam(1e-3), 30),
    Setting("clothes 28 × 28, MLP, Adam", "images", clothes, lambda: MLP(784, 128, 10), adam(1e-3), 20, chosen=False),
    Setting("spoken vowels (table), MLP, SGD", "table", table, lambda: MLP(24, 64, 9), sgd(0.05), 5),
    Setting("spoken vowels (table), MLP, SGD", "table", table, lambda: MLP(24, 64, 9), sgd(0.05), 100),
    Setting("spoken vowels (table), MLP, Adam", "table", table, lambda: MLP(24, 64, 9), adam(1e-3), 100),
    Setting("breast cancer (table), MLP, SGD", "table", breast_cancer, lambda: MLP(30, 64, 2), sgd(0.02), 5),
    Setting("breast cancer (table), MLP, Adam", "table", breast_cancer, lambda: MLP(30, 64, 2), adam(1e-3), 100),
    Setting("gestures (table), MLP, SGD", "table", gestures, lambda: MLP(48, 64, 6), sgd(0.05), 50, chosen=False),
    Setting("reviews (text), embeddings, SGD", "text", texts, Bag, sgd(0.3), 4, TOKENS),
    Setting("reviews (text), embeddings, Adam", "text", texts, Bag, adam(2e-3), 2, TOKENS),
    Setting("reviews (text), embeddings, Adam", "text", texts, Bag, adam(2e-3), 6, TOKENS),
]


def with_wrong_labels(y, seed):
    """5 % of the labels moved to another class, and which ones."""
    random, classes = torch.Generator().manual_seed(seed), int(y.max()) + 1
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.randperm(len(y), generator=random)[: round(WRONG * len(y))]] = True
    moved = (y + torch.randint(1, classes, y.shape, generator=random)) % classes
    return torch.where(wrong, moved, y), wrong


@cache
def by_regression(data, seed):
    """Doubt by logistic regression in five folds: of inputs, for text of their words by TF-IDF."""
    x, y = data()
    labels, _ = with_wrong_labels(y, seed)
    if data is texts:
        rows = torch.arange(len(x)).unsqueeze(1).expand_as(x)[x > 0]
        ones = np.ones(len(rows))
        x = TfidfTransformer(sublinear_tf=True).fit_transform(
            csr_matrix((ones, (rows.numpy(), x[x > 0].numpy())), shape=(len(x), WORDS + 1))
        )
    probabilities = cross_val_predict(LogisticRegression(max_iter=100), x, labels, cv=5, method="predict_proba")
    return 1 - torch.from_numpy(probabilities).gather(1, labels.unsqueeze(1))[:, 0]


def measured(setting, seed, folder):
    x, y = setting.data()
    labels, wrong = with_wrong_labels(y, seed)
    torch.manual_seed(seed)
    model = setting.network()
    optimizer = setting.optimizer(model)
    with dualform.record(model, optimizer, folder, overwrite=True, progress=False, keep=setting.keep) as tape:
        for _ in range(setting.epochs):
            for index in torch.randperm(len(x)).split(BATCH):
                tape.note(index=index, label=labels[index])
                F.cross_entropy(model(x[index]), labels[index]).backward()
                optimizer.step()
                optimizer.zero_grad()
    suspects = dualform.open(folder).suspects(model, x, labels, progress=False)
    scores = {
        "suspects": suspects.scores,
        "loss": suspects.column("loss"),
        "confidence": 1 - suspects.column("confidence"),
        "regression": by_regression(setting.data, seed),
        "own": suspects.column("own"),
    }
    return {name: mislabelled(score, wrong, samples=1).auc for name, score in scores.items()}


COLUMNS = "data, network, optimiser|epochs|seed|**suspects**|loss|confidence|regression|own"


def page(lines, failures):
    rows = [f"| {COLUMNS.replace('|', ' | ')} |", "|---|---|---|---|---|---|---|---|"]
    for setting, seed, aucs in lines:
        numbers = " | ".join(f"{aucs[name]:.4f}" for name in ("loss", "confidence", "regression", "own"))
        rows.append(
            f"| {setting.name}{'' if setting.chosen else ' *'} | {setting.epochs} | {seed} | "
            f"**{aucs['suspects']:.4f}** | {numbers} |"
        )
    gaps = [aucs["suspects"] - best_of(aucs) for _, _, aucs in lines]
    least = {kind: min(a["suspects"] for s, _, a in lines if s.bar == kind) for kind in BARS}
    bars = ", ".join(f"{kind} at least {bar:.2f} (lowest {least[kind]:.4f})" for kind, bar in BARS.items())
    verdict = "All bars are met." if not failures else "Missed: " + "; ".join(failures) + "."
    return "\n".join([
        "# Finding wrong labels",
        "",
        "5 % of the labels are moved to another class at random, the network is trained on them, and all training",
        "examples are ranked. The numbers are AUCs: how often a wrong label is more suspicious than a right one.",
        "Printed by `benchmarks/suspects.py`.",
        "",
        *rows,
        "",
        "- **suspects**: `memory.suspects(model, x, y)`, the column `score`.",
        "- **loss**, **confidence**: of the trained network; one minus its probability of the given label.",
        "- **regression**: one minus the probability of the given label by a logistic regression on the inputs (for",
        "  text on TF-IDF of all 20,000 words), trained on the other four folds of five, 100 steps of L-BFGS at most.",
        "- **own**: what the example put into its own margin through the last layer.",
        f"- Reviews: the first {REVIEWS:,} of our training part of IMDB, {LENGTH} words each. Of the embedding only",
        "  keys are kept.",
        "- How the voices are weighed and when they are heard was chosen by these AUCs on trainings with seed 0, of",
        "  the networks and data without a star. Nothing was chosen by the lines with a star.",
        "",
        f"Bars: {bars};",
        f"nowhere more than {FAR} below the best of loss, confidence and regression (lowest: {min(gaps):+.4f}).",
        verdict,
        "",
        f"Measured on {machine()}.",
    ])  # fmt: skip


def best_of(aucs):
    return max(aucs[name] for name in ("loss", "confidence", "regression"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, help="file that keeps each line, so that a stopped run goes on there")
    file = parser.parse_args().results
    done = {} if file is None or not file.exists() else dict(map(json.loads, file.read_text().splitlines()))
    lines, failures = [], []
    for setting in SETTINGS:
        for seed in SEEDS[: 1 if setting.data in SLOW else None]:
            name = f"{setting.name}, {setting.epochs} epochs, seed {seed}"
            if name not in done:
                with tempfile.TemporaryDirectory() as folder:
                    done[name] = measured(setting, seed, folder)
                if file is not None:
                    with file.open("a") as results:
                        results.write(json.dumps([name, done[name]]) + "\n")
            aucs = done[name]
            print(f"{name}: {' '.join(f'{score} {auc:.4f}' for score, auc in aucs.items())}", flush=True)
            lines.append((setting, seed, aucs))
            if aucs["suspects"] < BARS.get(setting.bar, 0) or aucs["suspects"] < best_of(aucs) - FAR:
                failures.append(f"{name}: {aucs['suspects']:.4f}, {aucs['suspects'] - best_of(aucs):+.4f}")
    save("suspects", page(lines, failures))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
