"""Cars in a CSV of numbers and words: one label in twenty is wrong, and the recording finds which."""

import torch
from mlxtend.data import autompg_data
from pandas import DataFrame
from torch.nn import functional as F

import dualform
from dualform.data import read
from dualform.evaluate import mislabelled
from dualform.models import MLP

torch.manual_seed(0)
names = ["cylinders", "displacement", "horsepower", "weight", "acceleration", "year", "origin"]
values, mpg = autompg_data()
cars = DataFrame(values[:, :7], columns=names).assign(mpg=mpg).query("cylinders in (4, 6, 8)")
cars["origin"] = cars["origin"].map({1: "usa", 2: "europe", 3: "japan"})
truth = torch.tensor(cars.pop("cylinders").to_numpy()).long() // 2 - 2
wrong = torch.randperm(len(cars)) < len(cars) // 20
given = torch.where(wrong, (truth + torch.randint(1, 3, truth.shape)) % 3, truth)
cars.assign(label=[["four", "six", "eight"][i] for i in given]).to_csv("cars.csv", index=False)

table = read("cars.csv", categories=["origin"], scale=True)
x, y = table.inputs, table.labels
model = MLP(len(table.features), 32, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
with dualform.record(model, optimizer, "runs/cars", overwrite=True) as tape:
    tape.describe(model="dualform.models:MLP(9, 32, 3)", train=table)
    for _ in range(20):
        for index in torch.randperm(len(x)).split(20):
            tape.note(index=index, label=y[index])
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()

suspects = dualform.open("runs/cars").suspects(model, x, y)
print(suspects)
for name, scores in {"score": suspects.scores, "loss": suspects.column("loss")}.items():
    print(f"{name}: AUC {mislabelled(scores, wrong).auc:.3f}")
