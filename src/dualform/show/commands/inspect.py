"""``dualform inspect``: what a memory holds, printed on the terminal."""

from typing import Any

from rich.console import Console

from dualform.explain import Memory
from dualform.log import bytes_by_kind

from ..text import certificate_table, columns_table, disk_table, layers_table


def contents(memory: Memory) -> dict[str, Any]:
    """The same for programs."""
    manifest = memory.store.manifest
    layers = [
        {
            "layer": layer.name, "modules": [module.name for module in layer.modules], "inputs": layer.d_in,
            "outputs": layer.d_out, "slots": memory.store.slots(layer.name), "kept": layer.keep,
            "rule": memory.store.parameters[layer.weights[0]].rule,
        }
        for layer in manifest.layers
    ]  # fmt: skip
    certificate = memory.certificate if memory.step and manifest.layers and not manifest.survey else {}
    schema = memory.visits.schema
    return {
        "memory": memory.path, "survey": bool(manifest.survey), "steps": memory.step, "visits": manifest.visits,
        "versions": manifest.versions, "dtype": manifest.dtype, "layers": layers,
        "columns": {name: schema.field(name).type for name in schema.names},
        "bytes": bytes_by_kind(memory), "certificate": dict(certificate),
        "floor": dict(getattr(certificate, "floor", {})),
        "marks": manifest.marks, "ending": manifest.ending,
    }  # fmt: skip


def print_contents(memory: Memory, console: Console) -> None:
    """Print steps, visits, columns, layers, sizes on disk, the certificate and the marks."""
    manifest = memory.store.manifest
    if manifest.survey:
        print_survey(memory, console)
        return
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    slots = f"slots in {manifest.dtype}" if manifest.layers else "no slots"
    console.print(f"[bold]{memory.path}[/]: {memory.step:,} steps, {manifest.visits:,} visits, {slots}")
    console.print(f"recorded with {versions}\n")
    if manifest.ending:
        console.print(f"{manifest.ending}\n")
    print_recipe(memory, console)
    console.print(*([layers_table(memory)] if manifest.layers else []), disk_table(memory))
    if not memory.step:
        console.print("No step is complete, so there is nothing to ask yet.")
        return
    console.print(columns_table(memory))
    if manifest.run_log is not None:
        console.print(f"{manifest.run_log}\n")
    if manifest.layers:
        console.print(f"How exactly the memory rebuilds the weights of step {memory.step:,}:")
        console.print(certificate_table(memory.certificate))
    for mark in manifest.marks:
        console.print(f"[bold]![/] '{mark.name}' from step {mark.first_step}, {mark.times}×: {mark.message}.")
    if not manifest.marks:
        console.print("No marks: the recorder noticed nothing that the memory cannot explain.")


def print_recipe(memory: Memory, console: Console) -> None:
    """Print how the model is made and where its examples are, if the memory was told."""
    if memory.recipe is not None:
        console.print("[bold]Recipe[/] (what commands take where you give no options; nothing in it runs unasked):")
        for name, text in memory.recipe.lines().items():
            printable = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
            console.print(f"  {name + ':':<11}{printable}", markup=False, soft_wrap=True)
        console.print()


def print_survey(memory: Memory, console: Console) -> None:
    """Print the checkpoints, columns, layers and sizes of a survey, which has neither steps nor a certificate."""
    manifest = memory.store.manifest
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    examples = manifest.visits // len(manifest.survey)
    rates = ", ".join(f"{one_pass.learning_rate:g}" for one_pass in manifest.survey)
    console.print(
        f"[bold]{memory.path}[/]: a survey of {examples:,} examples at {len(manifest.survey)} checkpoints "
        f"(learning rates {rates}), slots in {manifest.dtype}"
    )
    console.print(f"made with {versions}\n")
    console.print(layers_table(memory), disk_table(memory), columns_table(memory))
    console.print(
        "The network was trained before: there are no steps and nothing to rebuild. Its scores, "
        "memory.scores(model, inputs), are approximations."
    )
