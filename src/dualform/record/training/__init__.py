"""What happens while a step is trained: backward passes, the change of each parameter, the live ledger."""
