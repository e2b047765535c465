"""What TensorBoard reads back is what the memory says."""

import pytest

from dualform import log

pytestmark = pytest.mark.filterwarnings("default")


def test_tensorboard_reads_what_was_logged(logged, tmp_path):
    events_of = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed: make loggers"
    )
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        log.tensorboard(logged.memory, writer, tables=logged.tables)
    events = events_of.EventAccumulator(str(tmp_path))
    events.Reload()
    contents = log.contents(logged.memory, logged.tables)
    assert set(events.Tags()["scalars"]) == {name.replace(" ", "_") for name in contents.numbers}
    for name, value in contents.numbers.items():
        (event,) = events.Scalars(name.replace(" ", "_"))
        assert event.value == pytest.approx(value, rel=1e-6) and event.step == 4
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "certificate at step 4" in texts["dualform/certificate/text_summary"]
    table = texts["dualform/top/text_summary"].splitlines()
    hits = logged.tables["top"].to_pandas()
    assert len(table) == 2 + len(hits) and "| contribution |" in table[0]
    assert f"{hits['contribution'][0]:.6g}" in table[2] and all(
        line.count(" | ") == table[0].count(" | ") for line in table
    )
    print({name: round(value, 9) for name, value in contents.numbers.items()})
    print(*table, sep="\n")
