"""Train a small vision transformer on the digits 0 to 4, freeze it, and teach it 5 to 9 with learned query tokens.

Run as: python examples/tuning.py. It needs the extra demo, takes some ten seconds, and leaves 22 MB in runs/tuning.
"""

import torch
from torch.nn.functional import cross_entropy

import dualform
from dualform import tuning
from dualform.data import digits
from dualform.models import ViT

torch.set_num_threads(1)  # on layers this small a second thread costs more than it brings
torch.manual_seed(0)
images, labels = digits()  # 5,000 MNIST digits, 28 × 28 bytes each
x, order = images.unsqueeze(1) / 127.5 - 1, torch.randperm(5000)
known, new = order[labels[order] < 5], order[labels[order] >= 5]
train, test = new[:200], new[1000:]  # 200 pictures with labels are all that there is of the new digits


def adam(model, rate):
    """For what asks for a gradient: all of a network, or what is tuned beside it."""
    return torch.optim.Adam(tuning.trained_parameters(model).values(), lr=rate)


def learning(model, optimizer, index, epochs):
    """Learn some pictures, batch by batch. Each batch is told before its step."""
    for _ in range(epochs):
        for some in index[torch.randperm(len(index))].split(50):
            yield some
            cross_entropy(model(x[some]), labels[some] % 5).backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def right(model, index):
    """The share of pictures that a model gets right."""
    return f"{100 * (model.eval()(x[index]).argmax(1) == labels[index] % 5).double().mean():.1f} %"


vit = ViT(28, 7, channels=1, classes=5, width=32, heads=4, layers=4)
for _ in learning(vit, adam(vit, 2e-3), known[:2000], epochs=12):
    pass
print(f"0 to 4: the network gets {right(vit, known[2000:])} of the other pictures right")

probe = tuning.Probe(vit, classes=5)  # a linear layer on its last class token; the network is frozen from here on
for _ in learning(probe, adam(probe, 0.03), train, epochs=40):
    pass
print(f"5 to 9: {right(probe, test)} with a linear probe")

asking = tuning.VisualQueryTuning(vit, classes=5, tokens=5)  # and on what five queries a layer read in it
optimizer = adam(asking, 0.03)
with dualform.record(asking, optimizer, "runs/tuning", dtype="float32", overwrite=True) as tape:
    for some in learning(asking, optimizer, train, epochs=40):
        tape.note(index=some, label=labels[some])
print(f"5 to 9: {right(asking, test)} with five queries a layer")
print(f"0 to 4: still {right(vit, known[2000:])}")

memory = dualform.open("runs/tuning")
spot = memory.attend(asking, x[test[:1]])
by_digit, by_picture = spot.by("label", layer="head"), spot.by("index", layer="head")
print(f"\nA {labels[test[0]]}, and the network says {5 + int(spot.prediction.argmax())}. To that logit")
print("the digits add", ", ".join(f"{digit}: {value:+.2f}" for digit, value in by_digit.largest(5)[0]))
print("the biases add", f"{by_digit.bias.sum():+.2f}, and what the head began with {by_digit.initial[0]:+.2f}")
print("together that is", f"{by_digit.total[0]:+.2f}, the residual is {by_digit.residual[0]:.0e}")
for picture, value in by_picture.largest(3)[0]:
    print(f"picture {picture}, a {labels[picture]}, adds {value:+.2f} over all its visits")
