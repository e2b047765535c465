"""What an offline run of Weights & Biases holds is what the memory says."""

import json
from pathlib import Path

import pytest

from dualform import log

pytestmark = pytest.mark.filterwarnings("default")


def test_wandb_holds_what_was_logged(logged, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: make loggers")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with wandb.init(project="dualform", dir=str(tmp_path), mode="offline", settings=wandb.Settings(silent=True)) as run:
        run.log({"loss": 1.0})
        log.wandb(logged.memory, run, tables=logged.tables)
        contents = log.contents(logged.memory, logged.tables)
        for name, value in contents.numbers.items():
            assert run.summary[name] == value
        assert "certificate at step 4" in run.summary["dualform/certificate_text"]
        assert run.summary["loss"] == 1.0 and run.step == 2
        files = {Path(file).name: json.loads(Path(file).read_text()) for file in Path(run.dir).rglob("*.table.json")}
    hits = logged.tables["top"].to_pandas()
    (top,) = [table for name, table in files.items() if name.startswith("top")]
    assert top["columns"] == list(hits.columns) and len(top["data"]) == len(hits)
    assert [row[top["columns"].index("contribution")] for row in top["data"]] == pytest.approx(hits["contribution"])
    assert len(files) == 3
    print(sorted(files), top["columns"], top["data"][0], sep="\n")
