"""Optimisers that divide each entry by a number of its own (Adam and its kin): the recurrence run again from slots."""
