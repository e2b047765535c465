"""What is logged is what the memory says, with names and values that every tool takes."""

import re

import pandas as pd
import pytest

from dualform.errors import MissingExtra, QueryError, require
from dualform.log import bytes_by_kind, contents


def test_the_numbers_are_those_of_the_memory(logged):
    memory, numbers = logged.memory, contents(logged.memory).numbers
    assert numbers["dualform/steps"] == 4 and numbers["dualform/visits"] == 20 and numbers["dualform/marks"] == 0
    assert numbers["dualform/slots/0"] == 20
    for name, error in memory.certificate.items():
        assert numbers[f"dualform/certificate/{name}"] == error
        assert numbers[f"dualform/floor/{name}"] == memory.certificate.floor[name]
    assert numbers["dualform/certificate/worst"] == memory.certificate.worst
    on_disk = {
        kind.name: sum(file.stat().st_size for file in kind.iterdir())
        for kind in memory.path.iterdir()
        if kind.is_dir()
    }
    assert {name: size for name, size in bytes_by_kind(memory).items() if name != "init"} == {
        name: size for name, size in on_disk.items() if size
    }
    assert numbers["dualform/bytes/total"] == sum(bytes_by_kind(memory).values())


def test_tables_hold_plain_values_and_every_column(logged):
    tables = contents(logged.memory, logged.tables).tables
    assert list(tables) == ["dualform/top", "dualform/by label", "dualform/mixed"]
    top = logged.tables["top"].to_pandas()
    pd.testing.assert_series_equal(tables["dualform/top"]["contribution"], top["contribution"])
    assert list(tables["dualform/by label"].columns) == ["query", "0", "1"]
    assert tables["dualform/mixed"]["what"].tolist() == ["a", "3", "unknown"]


def test_names_hold_no_character_that_a_tool_refuses(logged):
    names = contents(logged.memory, {"a=b?[c]": logged.tables["top"]}).tables
    assert list(names) == ["dualform/a_b__c_"]
    assert all(re.fullmatch(r"[\w\-./ ]+", name) for name in contents(logged.memory).numbers)


def test_what_is_no_table_is_refused_in_a_sentence(logged):
    with pytest.raises(QueryError, match="holds a int, which is no table"):
        contents(logged.memory, {"top": 3})


def test_a_missing_tool_is_named_with_the_command_that_installs_it():
    with pytest.raises(MissingExtra, match=r"pip install 'no_such_tool'$"):
        require("no_such_tool")
