"""The quickstart of the README: record a network while it learns digits, then ask what one prediction is made of."""

import torch

import dualform
from dualform.data import digits
from dualform.models import MLP

torch.manual_seed(0)
images, labels = digits()  # 5,000 MNIST digits, 28 × 28 bytes each
x, (train, test) = images / 255, torch.randperm(5000).split([4500, 500])
model = MLP(784, 64, 10)  # any model with linear layers
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with dualform.record(model, optimizer, "runs/quickstart", overwrite=True) as tape:
    for index in train.split(50):
        tape.note(index=index, label=labels[index])  # what you want to know about each example later
        torch.nn.functional.cross_entropy(model(x[index]), labels[index]).backward()
        optimizer.step()
        optimizer.zero_grad()

memory = dualform.open("runs/quickstart")
spot = memory.attend(model, x[test[:1]])
print(f"a {labels[test[0]]}, and the network says {spot.prediction.argmax()}, made of:")
for hit in spot.top(3):  # training examples, over the whole network to first order
    print(f"image {hit.index}, a {hit.label}, adds {hit.contribution:+.3f} to the logit")
totals = spot.by("label", layer="fc2")  # the exact account of the last layer
print("by label:", {name: round(value, 1) for name, value in totals.largest(3)[0]})
print(f"the parts sum to {totals.total[0]:.3f}, the residual is {totals.residual[0]:.0e}")
