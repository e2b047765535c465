"""What the weights of a network are made of: parameters rebuilt from slots, ledgers, norms, and how exact they are."""

from .certificate import Certificate
from .ledger import LARGEST, Ledger, first_names, make_ledger
from .model_fit import first_difference
from .model_identity import check_samples, foreign_frozen, is_network_of
from .network import (
    explained,
    is_shared,
    kept_network,
    network,
    one_parameter,
    split_by,
    weights_from_ledger,
)
from .visit_norms import visit_sizes

__all__ = [
    "LARGEST",
    "Certificate",
    "Ledger",
    "check_samples",
    "explained",
    "first_difference",
    "first_names",
    "foreign_frozen",
    "is_network_of",
    "is_shared",
    "kept_network",
    "make_ledger",
    "network",
    "one_parameter",
    "split_by",
    "visit_sizes",
    "weights_from_ledger",
]
