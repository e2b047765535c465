"""A spotlight shows itself in a notebook."""

import torch
from helpers import batches, mlp, sgd, trained

import dualform


def test_a_spotlight_shows_what_it_is_made_of(tmp_path):
    model = mlp(5, 4, 3)
    run = trained(tmp_path / "memory", model, sgd(model), batches(6, 4, 5, 3))
    spot = run.memory.attend(model, torch.randn(12, 5, dtype=torch.float64))
    html = spot._repr_html_()
    best = next(iter(spot.top(1, layer=run.memory.layers[-1], per="slot")[0]))
    assert f"{best.contribution:+.3g}" in html and f"class {int(spot.prediction[0].argmax())}" in html
    assert "4 more" in html and html.count("<tr>") == 9


def test_where_it_would_take_long_it_says_how_to_ask(tmp_path):
    model = mlp(5, 4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    run = trained(tmp_path / "memory", model, optimizer, batches(3, 4, 5, 3))
    html = run.memory.attend(model, torch.randn(2, 5, dtype=torch.float64))._repr_html_()
    assert "spot.top(10" in html and html.count("<tr>") == 3


def test_who_wants_to_be_told_is_told(tmp_path):
    model, told = mlp(5, 4, 3), []
    run = trained(tmp_path / "memory", model, sgd(model), batches(6, 4, 5, 3))
    memory = dualform.open(run.path)

    def tell(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    memory.ledger("label", progress=tell)
    assert told and told[-1][1] == told[-1][2] > 0 and "weights" in told[-1][0]
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    told.clear()
    memory.attend(model, torch.randn(2, 5, dtype=torch.float64)).top(
        2, layer=memory.layers[0], progress=tell, per="slot"
    )
    assert told[-1][1] == told[-1][2] == 24
