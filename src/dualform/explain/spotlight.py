"""A spotlight: some inputs of a network, and what its layers recall from training when they see them."""

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dualform.engine import dual_output, initial_part, split_by_group
from dualform.errors import QueryError
from dualform.progress import Progress, bar
from dualform.store import assemble_matrix
from dualform.types import LayerInfo, ModuleInfo

from .ask import AskedQuestions, ask_places, step_coefficients
from .attribution import Attribution
from .hits import HitPlaces, Hits
from .notebook import Displayed, spotlight_html, spotlight_lines
from .query import Capture, Question, Target, apply, capture, first_axis, is_preconditioned, labelled, target_key
from .weights import is_shared

if TYPE_CHECKING:
    from .memory import Memory


class Spotlight(Displayed, Attribution):
    """What a memory recalls for some inputs. Lazy: one forward pass gives all queries, each question is one scan.

    ``target`` is what contributions add to: the logit of the predicted class (None), a class, one class an example, a
    pair of classes (the difference of their logits), "margin" or "loss" (of the ``labels``), or a function of the
    model's output that gives one number an example. A contribution is exact for the last layer and first order through
    the layers after it otherwise; it always sums to the layer's own change.
    """

    def __init__(
        self,
        memory: "Memory",
        model: nn.Module,
        inputs: Any,
        weights: Mapping[str, Tensor] | None,
        target: Target,
        labels: Any = None,
    ) -> None:
        first_axis(inputs)
        self.memory, self.model, self.inputs = memory, model, inputs
        self._weights, self._labels = weights, labels
        target = self._with_labels(target)
        self._target: Target = target.clone() if isinstance(target, Tensor) else target
        self._captures: dict[Hashable, Capture] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state without the passes that were run: another process runs its own."""
        return {**{name: value for name, value in vars(self).items() if name != "_own_capture"}, "_captures": {}}

    def __str__(self) -> str:
        return "\n".join(spotlight_lines(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return spotlight_html(self)

    @property
    def prediction(self) -> Any:
        """The output of the network for the inputs."""
        return self._own_capture.output

    @property
    def examples(self) -> int:
        """The number of examples that the inputs hold."""
        return self._own_capture.examples

    def output(self, layer: str | int, *, progress: Progress = True) -> Tensor:
        """The output of a layer, computed from its first weights and its slots alone, in the layer's own shape."""
        store, view = self.memory.store, self.memory.view
        store.need_training()
        info, module = store.layer(layer)
        calls = self._own_capture.calls[module.name]
        if not calls.inputs:
            raise QueryError(f"layer '{layer}' was not used in this forward pass.")
        rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in calls.inputs]).cpu()
        with bar(f"dual output of {layer}", store.slots(info.name), progress) as watch:
            if is_preconditioned(store, info) or is_shared(store, info) or info.in_ledger:
                parts = split_by_group(store, view, info.weights, watch=watch)
                out = apply(info, assemble_matrix(info, {name: part.total for name, part in parts.items()}), rows)
            else:
                of_step = step_coefficients(store, view, info)
                out = dual_output(store, info.name, view, rows.to(store.compute), of_step, watch)
                start = {name: initial_part(store, name, view.horizon) for name in info.weights}
                out += apply(info, assemble_matrix(info, start), rows)
        for bias in module.biases:
            out += self.memory.parameter(bias)
        parts = out.to(calls.outputs[0].dtype).split([z.shape[:-1].numel() for z in calls.outputs])
        outs = [shape(part) for part, shape in zip(parts, calls.shapes, strict=True)]
        if len(outs) == 1:
            return outs[0]
        return torch.stack(outs) if len({tensor.shape for tensor in outs}) == 1 else torch.cat(parts)

    def places(self, hits: Hits, *, target: Target = None, progress: Progress = True) -> HitPlaces:
        """Split what hits add to the target over the rows (tokens) of the query, and over rows of their own.

        The hits are those of this spotlight on one input: of the whole network or of a layer, examples, visits or
        slots. A ``target`` of their own must be given again.
        """
        self.memory.store.need_training()
        return ask_places(
            self.memory.store, self._question, self._view_after(hits.origin.after), hits, target, progress
        )

    # ------------------------------------------------------------------------------------------- passes

    def _question(self, asked: AskedQuestions, info: LayerInfo, module: ModuleInfo) -> Question:
        shown = self._capture(asked.target)
        calls = shown.calls[module.name]
        return Question(
            self.memory.store,
            asked.view,
            info,
            module,
            shown.target,
            shown.examples,
            calls,
            asked.score,
            asked.position,
        )

    @cached_property
    def _own_capture(self) -> Capture:
        """The pass for the spotlight's own target."""
        return self._run(self._target)

    def _with_labels(self, target: Target) -> Target:
        """A target that is named by a word, with the labels of the spotlight."""
        return labelled(target, self._labels) if isinstance(target, str) else target

    def _capture(self, target: Target) -> Capture:
        target = self._with_labels(target)
        if target is None or target is self._target:
            return self._own_capture
        key = target_key(target)
        if key is None:
            return self._run(target)
        if key not in self._captures:
            self._captures[key] = self._run(target)
        return self._captures[key]

    def _run(self, target: Target) -> Capture:
        if self._weights is None:  # the model may have changed since the last pass
            self._weights = self.memory.weights_for(self.model)
        layers = {module.name: (info, module) for info in self.memory.store.manifest.layers for module in info.modules}
        return capture(self.model, self.inputs, layers, self._weights, target, self.memory.store)
