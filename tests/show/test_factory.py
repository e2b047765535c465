"""A model from its name, and weights into it."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dualform.errors import DataNotFound, ModelMismatch, QueryError
from dualform.models import MLP
from dualform.show.factory import load_weights, make_model


def test_a_class_with_plain_arguments_makes_a_model():
    model = make_model("dualform.models:MLP(16, 8, 3)")
    assert isinstance(model, MLP) and model.layers[-1].out_features == 3
    assert isinstance(make_model("torch.nn:Linear(in_features=2, out_features=1, bias=False)"), nn.Linear)


def test_a_module_in_the_working_folder_counts(tmp_path, monkeypatch):
    (tmp_path / "my_train_module.py").write_text("import torch\n\n\ndef make():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(make_model("my_train_module:make"), nn.Linear)


NO_MODELS = """
    torch | torch.nn: | torch.nn:Linear( | torch.nn:Linear(open('x')) | torch.nn:Linear(2, 2)(3) | no.such:thing |
    torch.nn:Nothing | torch.nn:Linear() | torch.nn:ReLU(1, 2, 3) | math:sqrt(4) | torch.nn:[1][0] | :
"""


@pytest.mark.parametrize("name", [name.strip() for name in NO_MODELS.split("|")])
def test_what_makes_no_model_is_refused_in_a_sentence(name):
    with pytest.raises(QueryError, match=r"package\.module:factory"):
        make_model(name)


def test_weights_come_from_safetensors_and_must_fit(tmp_path):
    model, file = MLP(4, 3, 2), tmp_path / "weights.safetensors"
    save_file(model.state_dict(), file)
    other = load_weights(MLP(4, 3, 2), file)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for wrong in (MLP(4, 5, 2), MLP(4, 3, 2, 2), nn.Linear(4, 3)):
        with pytest.raises(ModelMismatch, match="do not fit"):
            load_weights(wrong, file)


def test_other_weight_files_are_refused(tmp_path):
    with pytest.raises(DataNotFound, match="there is no file"):
        load_weights(MLP(4, 2), tmp_path / "none.safetensors")
    torch.save(MLP(4, 2).state_dict(), tmp_path / "pickle.safetensors")
    with pytest.raises(QueryError, match="not a safetensors file"):
        load_weights(MLP(4, 2), tmp_path / "pickle.safetensors")
