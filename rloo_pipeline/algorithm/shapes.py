"""Tensors by their shapes, for signatures: to a type checker each of these is a plain Tensor."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

Scalar = Annotated[Tensor, "[]"]
PerPrompt = Annotated[Tensor, "[prompts]"]
PerSample = Annotated[Tensor, "[prompts, samples], NaN where unscorable"]
PerCompletion = Annotated[Tensor, "[completions]"]
PerToken = Annotated[Tensor, "[completions, tokens], 0 behind a completion's end"]
Mask = Annotated[Tensor, "[completions, tokens] bool, true on a completion's tokens"]
PerAction = Annotated[Tensor, "[completions, 1] where a completion is one action, else [completions, tokens]"]
