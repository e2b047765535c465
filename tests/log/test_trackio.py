"""What Trackio's own database holds is what the memory says."""

import pytest

from dualform import log

pytestmark = pytest.mark.filterwarnings("default")


def test_trackio_holds_what_was_logged(logged, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # is read when the package is imported
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: make loggers")

    storage = pytest.importorskip("trackio.sqlite_storage")
    run = trackio.init(project="dualform", name="one", auto_log_gpu=False)
    run.log({"loss": 1.0})
    log.trackio(logged.memory, run, tables=logged.tables)
    trackio.finish()
    values = {name: value for line in storage.SQLiteStorage.get_logs("dualform", "one") for name, value in line.items()}
    contents = log.contents(logged.memory, logged.tables)
    for name, value in contents.numbers.items():
        assert values[name] == pytest.approx(value, rel=1e-12)
    assert values["loss"] == 1.0 and "certificate at step 4" in str(values["dualform/certificate_text"])
    hits = logged.tables["top"].to_pandas()
    rows = values["dualform/top"]["_value"]
    assert [row["contribution"] for row in rows] == pytest.approx(hits["contribution"])
    print(sorted(values), rows[0], sep="\n")
