"""Sections `correct`, `evaluation` and `select`."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, Field

from rloo_pipeline.config.sampling import check_temperature
from rloo_pipeline.config.section import JSON, Section, Unused


class Correct(Section):
    """Definition of a right completion, for accuracy and pass@k. A change reruns the checks and the evaluations; with
    `dataset.select` also `difficulty` or `pass-rates`, and the rounds whose prompts they choose.
    """

    reward: str | None = None
    """Name of the reward that decides. Default: the first one in `rewards`."""
    threshold: float = 1.0
    """A completion is right if that reward is at least this value."""


class Harness(Section):
    """Benchmarks of the lm-eval library, run through its vLLM backend on every evaluated policy."""

    tasks: list[str | JSON] = Field(min_length=1)
    """Names of lm-eval tasks; or mappings with `task` and the settings to override, for example `dataset_path: json`
    and `dataset_kwargs` for a local file.
    """
    num_fewshot: int | None = Field(None, ge=0)
    """Number of worked examples before each problem. Default: that of the task."""
    limit: int | None = Field(None, ge=1)
    """Evaluate only this many problems of each task, from the start."""
    apply_chat_template: bool = False
    """Format prompts with the model's chat template, `dataset.chat_template_kwargs` and `dataset.system_prompt`, with
    the worked examples as earlier turns.
    """
    gen_kwargs: JSON = {}
    """Overrides of the task's generation settings, for example `{max_gen_toks: 1024}`."""
    include_path: str | None = None
    """Folder with your own lm-eval task files."""
    max_model_len: int | None = Field(None, ge=1)
    """Maximum length of prompt and answer together, in tokens. Default: the context length of the model."""


def check_evaluation_temperature(temperature: float) -> float:
    """Like `check_temperature`, but also allows 0, which decodes greedily."""
    return temperature if temperature == 0 else check_temperature(temperature)


class Evaluation(Section):
    """Evaluation on the held-out prompts. All evaluated policies get the same prompts and seeds."""

    num_prompts: int | None = Field(None, ge=1)
    """Number of held-out prompts: the first ones, so shuffle rows that are sorted by subject or difficulty. Default:
    all.
    """
    num_generations: int = Field(1, ge=1)
    """Completions per prompt. pass@k is reported for k = 1, 2, 4, … up to this number."""
    temperature: Annotated[float, Field(ge=0), AfterValidator(check_evaluation_temperature)] = 1.0
    """Sampling temperature, from 0.01 to 2; 0 decodes greedily."""
    greedy: bool = True
    """Also generate one greedy completion per prompt."""
    every: int | None = Field(None, ge=1)
    """Also evaluate the policy of every n-th round; a multiple of `keep_every`. Default: only the warm start and the
    final policy.
    """
    each_round: int | None = Field(None, ge=0)
    """Number of held-out prompts, from the start, that the sampler of each round also answers, once each and together
    with the round's completions: a curve of held-out accuracy at little cost. Default: a twentieth of the round's
    completions, at most 200. 0 turns it off; it is also off if the reward that decides (`correct.reward`) needs a GPU.
    """
    harness: Harness | None = None
    """lm-eval benchmarks, in addition to the held-out prompts. Off by default."""
    max_completion_length: int | None = Field(None, ge=1)
    """Maximum completion length in tokens. Default: `rollout.max_completion_length`."""

    def _problems(self) -> Iterator[str]:
        if self.num_prompts is not None and (self.each_round or 0) > self.num_prompts:
            yield Unused(
                f"each_round ({self.each_round}) exceeds num_prompts ({self.num_prompts}); change one of the two"
            )


class Select(Section):
    """Selects a policy on the rows of `dataset.dev`, and evaluates it once on the test rows, `dataset.eval`. In each
    run it selects the best round among those of `evaluation.every` and the last one; in an experiment, also the arm
    with the highest mean over seeds. On ties it takes the earliest round and the arm that is named first.
    """

    by: str = "dev.pass@1"
    """Criterion for the choice: `dev.pass@K` for a K that evaluations report, or `dev.greedy`."""

    @property
    def measure(self) -> str:
        """The measure by which policies are compared: `pass@K` or `greedy`."""
        return self.by.removeprefix("dev.")

    def problems_with(self, evaluation: Evaluation) -> Iterator[str]:
        """A sentence if evaluations do not report this measure."""
        measures = [f"dev.pass@{2**power}" for power in range(evaluation.num_generations.bit_length())]
        if evaluation.greedy and evaluation.temperature > 0:
            measures.append("dev.greedy")
        if self.by not in measures:
            yield f"select.by: evaluations on dataset.dev do not report '{self.by}'; set one of {', '.join(measures)}"

    def value(self, evaluation: JSON) -> float:
        """Reads the measure from an evaluation's summary."""
        if self.measure == "greedy":
            return float(evaluation["greedy"]["accuracy"])
        return float(evaluation["pass@k"][self.measure.removeprefix("pass@")]["value"])
