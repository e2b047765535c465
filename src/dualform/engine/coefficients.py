"""The coefficients of a parameter at a horizon, from the table of steps in the store."""

from dualform.errors import QueryError
from dualform.rules import Coefficients, sweep
from dualform.store import CoefficientsKey, Store


def coefficients(store: Store, parameter: str, horizon: int, quantity: str = "weight") -> Coefficients:
    """The coefficients of a parameter (``quantity="buffer"``: of the optimiser's buffer) at the horizon (cached)."""
    info = store.parameters[parameter]
    if not info.by_slots:
        raise QueryError(
            f"'{parameter}' is a part of the rest: it was recorded without errors or without a rule, so only weights α "
            "are available (score='weight' or 'abs'). For contributions record with keep='slots' and an optimiser "
            "that has a rule."
        )
    return store.cache.coefficients(
        CoefficientsKey(parameter, horizon, quantity),
        lambda: sweep(*store.schedule(parameter)[:3], horizon, store.steps, quantity),
    )
