"""dualform: which training examples is this prediction made of?"""

from importlib.metadata import version

from dualform import attention, data, evaluate, log, rules, svm, tasks, tuning
from dualform.explain import Memory, survey
from dualform.explain import open_memory as open
from dualform.record import Tape, record
from dualform.show import figures as plot
from dualform.show.notebook import explore

__all__ = [
    "Memory",
    "Tape",
    "attention",
    "data",
    "evaluate",
    "explore",
    "log",
    "open",
    "plot",
    "record",
    "rules",
    "survey",
    "svm",
    "tasks",
    "tuning",
]
__version__ = version("dualform")
