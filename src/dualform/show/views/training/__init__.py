"""The training set: its examples, what they add, which labels look wrong, and a map of them."""

from .csv_table import selection_csv, suspects_csv
from .examples import TrainingExamples, training_examples
from .filters import shown_indices
from .layer_space import LayerSpace, points_of
from .lines import ExampleLine, feature_names, label_name, lines_of
from .map import MapView, example_map, principal_axes
from .moved import LearnedOverTime, MovedAnswer, MovedAnswers, learned_over_time, moved_answers, spot_of_visits
from .neighbours import Neighbour, Neighbours, neighbours_of
from .page import TrainingSetView, training_set
from .question import Correctness, Showing, SortOrder, Subset, TrainingSetQuestion, settle_choice
from .summary import TrainingSummary, training_summary
from .sums import ExampleSums, right_target, sums_of
from .suspicion import suspicion_of
from .table import training_table

__all__ = [
    "Correctness",
    "ExampleLine",
    "ExampleSums",
    "LayerSpace",
    "LearnedOverTime",
    "MapView",
    "MovedAnswer",
    "MovedAnswers",
    "Neighbour",
    "Neighbours",
    "Showing",
    "SortOrder",
    "Subset",
    "TrainingExamples",
    "TrainingSetQuestion",
    "TrainingSetView",
    "TrainingSummary",
    "example_map",
    "feature_names",
    "label_name",
    "learned_over_time",
    "lines_of",
    "moved_answers",
    "neighbours_of",
    "points_of",
    "principal_axes",
    "right_target",
    "selection_csv",
    "settle_choice",
    "shown_indices",
    "spot_of_visits",
    "sums_of",
    "suspects_csv",
    "suspicion_of",
    "training_examples",
    "training_set",
    "training_summary",
    "training_table",
]
