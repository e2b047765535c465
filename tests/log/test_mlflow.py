"""What MLflow gives back is what the memory says."""

import json

import pytest

from dualform import log

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("by_id", [False, True])
def test_mlflow_gives_back_what_was_logged(logged, tmp_path, monkeypatch, by_id):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: make loggers")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment(
        experiment_id=mlflow.create_experiment("dualform", artifact_location=(tmp_path / "files").as_uri())
    )
    with mlflow.start_run() as run:
        log.mlflow(logged.memory, run.info.run_id if by_id else run, tables=logged.tables)
    client, contents = mlflow.MlflowClient(), log.contents(logged.memory, logged.tables)
    assert client.get_run(run.info.run_id).data.metrics == pytest.approx(dict(contents.numbers))
    assert {metric.step for metric in client.get_metric_history(run.info.run_id, "dualform/steps")} == {4}
    text = (tmp_path / "text").resolve()
    text.mkdir()
    folder = tmp_path / client.download_artifacts(run.info.run_id, "dualform", str(text))
    assert "certificate at step 4" in (folder / "certificate.txt").read_text()
    table, hits = json.loads((folder / "top.json").read_text()), logged.tables["top"].to_pandas()
    place = table["columns"].index("contribution")
    assert [row[place] for row in table["data"]] == pytest.approx(hits["contribution"])
    print(sorted(file.name for file in folder.iterdir()), table["columns"], table["data"][0], sep="\n")
