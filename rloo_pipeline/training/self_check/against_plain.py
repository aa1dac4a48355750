"""Compares log-probs and gradients of a form of batch with those of plain transformers, one sequence at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo_pipeline.artifacts import vision
from rloo_pipeline.artifacts.files import write_json
from rloo_pipeline.artifacts.model_dims import LengthLimit, length_limit
from rloo_pipeline.artifacts.model_files import SELF_CHECK
from rloo_pipeline.training import plain_model
from rloo_pipeline.training.batch_forms import FORMS, Packed
from rloo_pipeline.training.kernels import attention, lm_head
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import RowImages, Sequences
from rloo_pipeline.training.self_check import small

LONGEST = attention.SHORT + 24
"""Tokens of the longest sequence, which takes the code path of long sequences; the others take that of short ones."""
SHARED, OTHER = [(2, 3)], [(3, 1), (2, 2)]
"""Height and width in tokens of the images: one in the shared prompt, with different pixels in each sequence, and one
in the other prompt. A model whose images all have one size gets as many of that size.
"""


class SelfCheck(NamedTuple):
    """The largest differences between a form of batch and plain transformers, as `self_check.json` holds them."""

    model: str
    """Class name."""
    logps: float
    """Largest difference of a token's log-prob, nats."""
    gradient: float
    """Largest difference of a parameter's gradient, divided by its norm (at least a hundredth of the largest norm)."""
    parameter: str
    """Name of that parameter."""
    digest: str = ""
    """Digest of configuration, code and library versions."""
    form: str = "packed"
    """Name of the form in `batch_forms`."""
    why: str = ""
    """The reason a faster form is not used; empty for the fastest."""
    images: bool = False
    """True if the sequences of the check had images in their prompts."""

    @property
    def slow(self) -> str:
        """Describes a form that is slower than packed, and why it is needed; empty for packed."""
        speed = FORMS[self.form].speed
        return f"{speed} ({self.why})" if speed else ""

    def write(self, folder: Path) -> None:
        """Writes the result into a policy's folder."""
        write_json(folder / SELF_CHECK, self._asdict())


class PlainModel:
    """A small model in plain transformers, with the log-probs and gradients of the probe.

    Attributes:
        causal_within: largest difference of a log-prob, in nats, when the tokens after it are cut off.
    """

    def __init__(self, config: Any, shrink: small.Shrink, trust_remote_code: bool, images: bool = False) -> None:
        """Builds the model and computes log-probs and gradients of the probe.

        Args:
            config: transformers configuration of the full model.
            shrink: how to make it small.
            trust_remote_code: allows the model's own code to run.
            images: True if prompts have images.
        """
        self.config, self.trust_remote_code = small.shrink(config, shrink), trust_remote_code
        self.model = small.build(self.config, trust_remote_code, "eager").eval()
        self.sequences = probe(self.model.config, length_limit(config.to_dict()))
        if images:
            self.sequences = _with_images(self.sequences, self.config)
        self.logps = _one_by_one(self.model, self.sequences)
        self.causal_within = _difference_without_rest(self.model, self.sequences, self.logps)

    def compare(self, form: Packed, prepare: Callable[[Any], None] | None = None) -> SelfCheck:
        """The differences of a form of batch, in a copy that `prepare` may move and change."""
        model = small.build(self.config, self.trust_remote_code, form.attention)
        model.load_state_dict(self.model.state_dict())
        plain_model.remove_dropout(model)
        if prepare is not None:
            prepare(model)
        logps = _in_form(model.train(), self.sequences, form)
        largest = max(float((a - b).abs().max()) for a, b in zip(logps, self.logps, strict=True))
        return SelfCheck(type(model).__name__, largest, *_gradients(model, self.model), form=form.name)


def probe(config: Any, limit: LengthLimit | None) -> Sequences:
    """Random sequences for a model of this configuration, within the limit of their length; some share their prompt."""
    draw, vocabulary = torch.Generator().manual_seed(1), small.words(config)

    def ids(count: int) -> list[int]:
        return torch.randint(min(3, vocabulary - 1), vocabulary, (max(count, 1),), generator=draw).tolist()

    most = LONGEST if limit is None else max(2, min(limit.tokens, LONGEST))
    shared, other = ids(min(9, most // 2)), ids(most - min(12, most // 2))
    rest = most - len(shared)
    return Sequences(
        [shared, shared, shared, other], [ids(min(30, rest)), ids(min(5, rest)), ids(1), ids(most - len(other))]
    )


def _with_images(sequences: Sequences, config: Any) -> Sequences:
    """The sequences of the probe with images in their prompts, after the first token.

    Args:
        sequences: sequences of `probe`: three with one prompt, and one with another.
        config: transformers configuration of the small model.
    """
    draw = torch.Generator().manual_seed(2)
    sizes = [SHARED, SHARED, SHARED, OTHER]
    images = [[_image(config, *size, draw) for size in of_row] for of_row in sizes]
    shown = [[token for size in of_row for token in _tokens(config, _count(config, *size))] for of_row in sizes]
    return Sequences(
        [[*prompt[:1], *tokens, *prompt[1:]] for prompt, tokens in zip(sequences.prompts, shown, strict=True)],
        sequences.completions,
        images=RowImages(images, lambda image: image, vision.tokens_of(config.to_dict())),
    )


def _tokens(config: Any, count: int) -> list[int]:
    """The tokens of an image with `count` parts."""
    kind = vision.kind_of(config.to_dict())
    return [getattr(config, kind.begin), *[getattr(config, kind.part)] * count, getattr(config, kind.end)]


def _count(config: Any, height: int, width: int) -> int:
    """Number of tokens that stand for parts of an image."""
    return int(getattr(config, "mm_tokens_per_image", height * width))


def _image(config: Any, height: int, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """An image of Qwen-VL: patches [patches, values of a patch] and their grid; `height` and `width` in tokens. Or one
    of Gemma: pixels [1, channels, height, width], all of one size.
    """
    part = config.vision_config
    if hasattr(config, "mm_tokens_per_image"):
        return {"pixel_values": torch.randn(1, part.num_channels, part.image_size, part.image_size, generator=draw)}
    merge = part.spatial_merge_size
    grid = [1, height * merge, width * merge]
    values = part.in_channels * part.temporal_patch_size * part.patch_size**2
    pixels = torch.randn(grid[1] * grid[2], values, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}


def _weights(count: int) -> Tensor:
    """Weights of tokens in the loss: of both signs and all different, so that swapping two positions shows."""
    return torch.linspace(-1, 2, count).cos()


def _logps(model: Any, sequences: Sequences, row: int, tokens: int | None = None) -> Tensor:
    """Log-probs of one completion, alone; with `tokens`, only its first tokens go through the model."""
    prompt, completion = sequences.prompts[row], sequences.completions[row][:tokens]
    ids = torch.tensor([[*prompt, *completion]])
    shown = sequences.images.pick([row]) if sequences.images else None
    more = shown.inputs(ids) if shown else {}
    logits: Tensor = model(input_ids=ids, use_cache=False, **more).logits[0, len(prompt) - 1 : -1].float()
    logits[:, vision.placeholder_ids(model.config.to_dict())] = lm_head.NEVER
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1)


def _one_by_one(model: Any, sequences: Sequences) -> list[Tensor]:
    """Log-probs of each completion; leaves the gradients in the model."""
    all_logps = []
    for row in range(len(sequences.prompts)):
        logps = _logps(model, sequences, row)
        (logps * _weights(len(logps))).sum().backward()
        all_logps.append(logps.detach())
    return all_logps


@torch.no_grad()
def _difference_without_rest(model: Any, sequences: Sequences, all_logps: list[Tensor]) -> float:
    """Largest difference of a log-prob, in nats, when the second half of the completion is cut off."""
    largest = 0.0
    for row, logps in enumerate(all_logps):
        half = len(sequences.completions[row]) // 2
        if half:
            difference = _logps(model, sequences, row, half) - logps[:half]
            largest = max(largest, float(difference.abs().max()))
    return largest


def _in_form(model: Any, sequences: Sequences, form: Packed) -> list[Tensor]:
    """The result of `_one_by_one`, computed by the training code."""
    logps_by_row: dict[int, Tensor] = {}
    module = TokenLogProbs(model, 1.0)
    module.form, device = form, next(model.parameters()).device
    for rows in form.micro_batches(sequences, range(len(sequences.prompts)), 10**9):

        def loss(
            positions: Sequence[int], logps: Tensor, mask: Tensor, _: Tensor, rows: Sequence[int] = rows
        ) -> Tensor:
            unpadded = [row[row_mask] for row, row_mask in zip(logps, mask, strict=True)]
            logps_by_row.update({rows[i]: row.detach().cpu() for i, row in zip(positions, unpadded, strict=True)})
            return torch.stack([(row * _weights(len(row)).to(row.device)).sum() for row in unpadded]).sum()

        module(sequences.pick(rows).to(device), loss).backward()
    return [logps_by_row[row] for row in range(len(sequences.prompts))]


def _gradients(model: Any, plain: Any) -> tuple[float, str]:
    """The largest relative difference of a parameter's gradient, and the parameter's name."""
    expected = {name: _gradient_of(parameter) for name, parameter in plain.named_parameters()}
    floor = 0.01 * max(float(gradient.norm()) for gradient in expected.values())
    worst = (0.0, "")
    for name, parameter in model.named_parameters():
        size = max(float(expected[name].norm()), floor)
        worst = max(worst, (float((_gradient_of(parameter) - expected[name]).norm()) / size, name))
    return worst


def _gradient_of(parameter: Tensor) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).cpu()
