"""The coefficients of a parameter at a horizon, from the steps that the store keeps."""

from dualform.errors import QueryError
from dualform.rules import Coefficients, sweep
from dualform.store import CoefficientsKey, Store


def coefficients(store: Store, parameter: str, horizon: int, of: str = "weight") -> Coefficients:
    """How a parameter (or the optimiser's buffer of it) is put together at the horizon. Kept for the next question."""
    info = store.parameters[parameter]
    if not info.by_slots:
        raise QueryError(
            f"'{parameter}' is a part of the rest: it was recorded without errors or without a rule, so only weights "
            "α can be asked (score='weight' or 'abs'). For contributions record with keep='slots' and an optimiser "
            "that has a rule."
        )
    return store.cache.coefficients(
        CoefficientsKey(parameter, horizon, of),
        lambda: sweep(*store.schedule(parameter)[:3], horizon, store.steps, of=of),
    )
