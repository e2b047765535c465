"""The walks through the code stay short: counted on what really runs."""

import pytest
from walk_question import adam, hops_of_top, sgd
from walks import batch_to_disk, crossing, kinds


def test_a_batch_changes_hands_at_most_25_times_on_its_way_to_disk(tmp_path):
    calls = batch_to_disk(tmp_path)
    kind_of = kinds(calls)
    hops = crossing(calls, [hop for hop in calls if kind_of[hop] == "main path"])
    assert len(hops) <= 25 and len({hop.file for hop in hops}) <= 15, hops


@pytest.mark.parametrize(("optimizer", "files"), [(sgd, 15), (adam, 16)])
def test_a_question_passes_few_files(optimizer, files, tmp_path):
    hops = hops_of_top(optimizer, tmp_path / "memory")
    assert len({hop.file for hop in hops}) <= files, hops
