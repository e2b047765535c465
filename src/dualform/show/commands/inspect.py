"""What is in a memory, told on the terminal."""

from rich.console import Console

from dualform.explain import Memory

from ..text import certificate_table, columns_table, disk_table, layers_table


def describe(memory: Memory, say: Console) -> None:
    """Steps, visits, columns, layers, sizes on disk, marks, and the certificate."""
    manifest = memory.store.manifest
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    say.print(f"[bold]{memory.path}[/]: {memory.step:,} steps, {manifest.visits:,} visits, slots in {manifest.dtype}")
    say.print(f"recorded with {versions}\n")
    if manifest.ending:
        say.print(f"{manifest.ending}\n")
    say.print(layers_table(memory), disk_table(memory))
    if not memory.step:
        say.print("No step is complete, so there is nothing to ask yet.")
        return
    say.print(columns_table(memory))
    say.print(f"How exactly the memory rebuilds the weights of step {memory.step:,}:")
    say.print(certificate_table(memory.certificate))
    for mark in manifest.marks:
        say.print(f"[bold]![/] '{mark.name}' from step {mark.first_step}, {mark.times}×: {mark.message}.")
    if not manifest.marks:
        say.print("No marks: nothing was noticed that the memory does not explain.")
