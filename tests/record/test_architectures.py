"""Architectures of ``transformers``, trained bare and recorded: nothing changes, all is certified and credited."""

import os
from collections.abc import Callable, Iterator

import pytest
from architectures import ARCHITECTURES, QUICK
from sweep import Verdict, examine

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

pytestmark = [
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::torch"),
]

Verdicts = Callable[[str], Verdict]
every_architecture = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdicts]:
    """Each architecture, examined once."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    found: dict[str, Verdict] = {}

    def verdict_on(name: str) -> Verdict:
        if name not in found:
            found[name] = examine(ARCHITECTURES[name], tmp_path_factory.mktemp("sweep"))
        return found[name]

    yield verdict_on
    transformers.utils.logging.set_verbosity(verbosity)


def test_the_sweep_covers_forty_architectures_of_all_families():
    families = {architecture.family for architecture in ARCHITECTURES.values()}
    assert len(ARCHITECTURES) >= 40 and set(QUICK) <= ARCHITECTURES.keys() and len(QUICK) == 8
    assert families >= {"encoder", "decoder", "encoder-decoder", "vision", "audio", "experts", "state space"}


@every_architecture
def test_recorded_training_is_bare_training_bit_for_bit(name: str, verdicts: Verdicts):
    assert verdicts(name).same_bits


@every_architecture
def test_the_certificate_says_what_the_full_check_says(name: str, verdicts: Verdicts):
    verdict = verdicts(name)
    wrong = {name: (verdict.certificate[name], verdict.full[name]) for name in verdict.disagreeing}
    assert not wrong and verdict.full.worst < 1e-3


@every_architecture
def test_every_parameter_is_explained_or_in_the_rest_with_its_reason(name: str, verdicts: Verdicts):
    verdict = verdicts(name)
    parameters = {name for name, _ in ARCHITECTURES[name].make().named_parameters()}
    assert parameters <= {*verdict.full, *verdict.full.rest} and not set(verdict.full) & set(verdict.full.rest)
    assert not verdict.without_reason and len(verdict.full) > 0


@every_architecture
def test_parts_of_single_examples_are_their_gradients(name: str, verdicts: Verdicts):
    verdict = verdicts(name)
    known = [credit for credit in verdict.credits if credit.error is not None]
    assert known and verdict.worst_credit < 1e-9, verdict.credits
