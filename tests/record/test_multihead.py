"""``nn.MultiheadAttention`` is watched in its own forward pass alone: no thread, mode or tensor subclass notices."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import state_of
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import dualform
from dualform.record.layers import multihead
from dualform.record.layers.linear import LINEAR


class AttentionAndSum(nn.Module):
    def __init__(self, modify: Any = None) -> None:
        super().__init__()
        self.body, self.modify = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.1), modify

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.modify is None else self.modify(x)
        return self.body(x, x, x)[0].as_subclass(Tensor)


def train_attention(model: Any) -> None:
    """Three steps; the optimiser may be recorded by a tape that is open already."""
    torch.manual_seed(5)
    for _ in range(3):
        model(torch.randn(2, 3, 4)).square().sum().backward()
        model.optimizer.step()
        model.optimizer.zero_grad()


def attention_model(modify: Any = None) -> Any:
    torch.manual_seed(4)
    model: Any = AttentionAndSum(modify)
    model.optimizer = optim.SGD(model.parameters(), lr=0.1)
    return model


def test_functions_that_others_call_meanwhile_are_not_replaced(tmp_path):
    """Attention is watched in its own forward pass alone: nobody else's ``F.linear`` changes."""
    model, linear, linears_in_hooks = attention_model(), F.linear, []

    def hook(*args: Any) -> None:
        linears_in_hooks.append(F.linear)

    model.body.register_forward_pre_hook(hook)
    with dualform.record(model, model.optimizer, tmp_path, progress=False):
        model.body.register_forward_pre_hook(hook)  # after that of the recorder: the pass is being watched
        train_attention(model)
    assert len(linears_in_hooks) >= 6 and all(function is linear for function in linears_in_hooks)


def test_what_another_thread_computes_during_a_watched_pass_is_not_seen(tmp_path, monkeypatch):
    model, threads_seen, products, projections = attention_model(), set(), [], []
    dispatch, end = multihead.Projections.__torch_function__, multihead.Projections.end

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        threads_seen.add(threading.get_ident())
        return dispatch(self, *args, **kwargs)

    def multiply_elsewhere(*args: Any) -> None:
        """With the very weight of the layer that is watched in this thread."""
        weight = model.body.in_proj_weight
        thread = threading.Thread(target=lambda: products.append(F.linear(torch.ones(5, 4), weight)))
        thread.start()
        thread.join()

    def counted(self: Any) -> None:
        projections.append(len(self.calls))
        end(self)

    monkeypatch.setattr(multihead.Projections, "__torch_function__", observed)
    monkeypatch.setattr(multihead.Projections, "end", counted)
    with dualform.record(model, model.optimizer, tmp_path, dtype="float32", batch_dim=1, progress=False):
        model.body.register_forward_pre_hook(multiply_elsewhere)
        train_attention(model)
    assert threads_seen == {threading.get_ident()} and len(products) == 3
    assert projections == [2, 2, 2]  # query, key and value at once, and the output
    torch.testing.assert_close(dualform.open(tmp_path).weights(), state_of(model), rtol=0, atol=1e-6)


class LoggingMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.listens = False

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if self.listens:
            self.log.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", ["around the loop", "inside the pass"])
def test_the_modes_of_the_user_see_an_attention_layer_as_they_do_without_recording(place, tmp_path):
    def logged(path: Path | None) -> tuple[list[Any], dict[str, Tensor]]:
        model, mode = attention_model(), LoggingMode()
        with (
            mode if place == "around the loop" else nullcontext(),
            dualform.record(model, model.optimizer, path, batch_dim=1, progress=False) if path else nullcontext(),
        ):
            if place == "inside the pass":
                model.body.register_forward_pre_hook(lambda *args: mode.__enter__() and None)
                model.body.register_forward_hook(lambda *args: mode.__exit__(None, None, None), prepend=True)
            model.body.register_forward_pre_hook(lambda *args: setattr(mode, "listens", True))
            model.body.register_forward_hook(lambda *args: setattr(mode, "listens", False), prepend=True)
            train_attention(model)
            assert torch._C._len_torch_function_stack() == (place == "around the loop")
        return mode.log, state_of(model)

    recorded, plain = logged(tmp_path), logged(None)
    assert recorded[0] == plain[0] and recorded[0].count(F.multi_head_attention_forward) == 3
    torch.testing.assert_close(recorded[1], plain[1], rtol=0, atol=0)
    torch.testing.assert_close(dualform.open(tmp_path).weights(), recorded[1], rtol=0, atol=1e-3)


class LoggingTensor(Tensor):
    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        cls.calls.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensor_subclasses_see_an_attention_layer_as_they_do_without_recording(tmp_path):
    def logged(path: Path | None) -> tuple[int, dict[str, Tensor]]:
        model = attention_model(modify=lambda x: x.as_subclass(LoggingTensor))
        LoggingTensor.calls.clear()
        with dualform.record(model, model.optimizer, path, batch_dim=1, progress=False) if path else nullcontext():
            train_attention(model)
        return LoggingTensor.calls.count(F.multi_head_attention_forward), state_of(model)

    recorded, plain = logged(tmp_path), logged(None)
    assert recorded[0] == plain[0] == 3 and LINEAR not in LoggingTensor.calls
    torch.testing.assert_close(recorded[1], plain[1], rtol=0, atol=0)
    torch.testing.assert_close(dualform.open(tmp_path).weights(), recorded[1], rtol=0, atol=1e-3)
