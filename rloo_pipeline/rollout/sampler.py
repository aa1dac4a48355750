"""vLLM as a function from (prompt ids, seed) to completion ids and their log-probs.

Each request has its own seed, so a completion does not depend on the rest of the batch (on GPUs except for rounding,
which varies with the batch size). Log-probs are those of the distribution that was sampled from (`processed_logprobs`:
temperature and truncation applied), in the engine's dtype, which is set explicitly. Both are written to the footer of
the table. Nothing is tokenized here: token ids go in and come out.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config.sampling import FP8
from rloo_pipeline.errors import IncompatibleEngine, UserError, one_line
from rloo_pipeline.rollout import engine_arguments, engine_process, swap_check, vllm_internals
from rloo_pipeline.rollout.engine_arguments import EngineSettings
from rloo_pipeline.rollout.requests import Begun, Completion, Request, RequestSource, SingleTurnRequests, params_of
from rloo_pipeline.runtime import caches, devices
from rloo_pipeline.runtime.progress import announcing, counting

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

BROKEN = "\ufffd"
"""Character that replaces bytes that are not a whole character."""


class Sampler:
    """A vLLM engine that holds one policy."""

    def __init__(self, policy: Policy, engine: EngineSettings, max_model_len: int, seed: int) -> None:
        """Loads the policy: a full model, or an adapter with its base.

        Raises:
            UserError: see `engine_arguments.arguments`; or vLLM does not apply all modules of the adapter.
        """
        self.policy = policy
        self.digest = policy.digest
        """Digest of the weights that the engine holds; empty while others are loaded."""
        self.engine_key = policy.engine_key
        self.settings = engine_arguments.arguments(policy, engine, max_model_len, seed)
        self.stop_ids, self.banned_ids = policy.stop_ids, policy.placeholder_ids
        whole_image = policy.image_tokens.whole if engine.most_images else None
        shared = min(len(policy.tokenizer), policy.vocabulary)  # some classes of tokenizers add tokens
        self.probe = swap_check.Probe(shared, self.banned_ids, whole_image)
        self.sleeping = False
        """True if vLLM has moved the weights to host memory and dropped the KV cache."""
        self.swap_checked = False
        """True after a swap of this engine's weights has passed `swap_check`."""
        self.lora: LoRARequest | None = None
        self.seconds = 0.0
        """Wall seconds of the last call of `sample`."""
        self.llm: LLM | None = self._start_engine()
        devices.hold_gpu(self)

    def _start_engine(self) -> LLM:
        vllm = vllm_internals.import_vllm()
        self.settings |= engine_process.prepare()
        vllm_internals.prepare(self.policy)
        on_gpu = _on_gpu()
        kernels = ", which compiles its kernels the first time" if on_gpu else ""
        compiling = self._compiling(vllm.__version__) if on_gpu else contextlib.nullcontext()
        with compiling, announcing(f"starting vLLM{kernels}"), engine_process.errors_told():
            engine: LLM = vllm.LLM(**self.settings)
        engine_process.end_calls_with_engine(engine)
        if not on_gpu:
            engine_arguments.check_heads(self.policy, engine.llm_engine.vllm_config.model_config)
            logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)  # otherwise it warns for each image
        if self.policy.is_adapter:
            self.lora = vllm_internals.request_of(self.policy, 1)
            try:
                vllm_internals.load_adapter(engine, self.lora)
            except UserError:
                engine.llm_engine.engine_core.shutdown()
                raise
        return engine

    def _compiling(self, version: str) -> contextlib.AbstractContextManager[None]:
        """A block in which vLLM may fill its compile cache. vLLM writes some of these files in place."""
        settings = {key: value for key, value in self.settings.items() if key != "model"}
        invariant = os.environ.get("VLLM_BATCH_INVARIANT")  # makes vLLM compile different code
        facts = json.dumps(
            [version, devices.card(), invariant, settings, self.policy.config], sort_keys=True, default=str
        )
        folder = Path(os.environ.get("VLLM_CACHE_ROOT", caches.cache_folder() / "vllm"))
        return caches.compiling(folder / "torch_compile_cache", hashlib.sha256(facts.encode()).hexdigest()[:16])

    def swap(self, policy: Policy, max_model_len: int) -> None:
        """Loads another policy; completions are the same as from a new engine.

        If its digest equals the current policy's, nothing is loaded.

        Args:
            policy: the policy.
            max_model_len: number of tokens that must fit into the context.

        Raises:
            IncompatibleEngine: the engine cannot hold the policy, its context is shorter, its cache cannot be emptied,
                or it computes with weights other than the new ones.
            UserError: the engine does not apply the new adapter, and neither would a new engine.
        """
        if policy.engine_key != self.engine_key:
            raise IncompatibleEngine("another model")
        if max_model_len > (longest := self.settings["max_model_len"]):
            raise IncompatibleEngine(f"a context of {longest} tokens")
        if self.llm is not None:
            engine_process.follow_output(self.llm)
        self._wake_up()
        self.policy, self.settings["model"] = policy, str(policy.base)
        if self.llm is not None:
            if policy.digest != self.digest:
                self.digest = ""
                with announcing(f"loading {policy} into vLLM"):
                    self._load(self.llm, policy)
            vllm_internals.reset_cache(self.llm)
        self.digest = policy.digest

    def _load(self, llm: LLM, policy: Policy) -> None:
        """Loads a policy into the engine and checks that the engine uses it."""
        before = swap_check.ask(llm, self.probe, self.lora)
        self.lora = vllm_internals.replace_weights(llm, policy, self.lora)
        vllm_internals.reset_cache(llm)
        reply = swap_check.ask(llm, self.probe, self.lora)
        swap_check.check_change(before, reply, policy)
        size = sum(file.stat().st_size for file in policy.weights)
        if not self.swap_checked or size <= swap_check.ALWAYS_CHECKED_BYTES:
            number_format = FP8 if "quantization" in self.settings else None
            swap_check.check_weights(reply, policy, self.settings["dtype"], number_format)
            self.swap_checked = True

    def leave_gpu(self) -> None:
        """Puts the engine of a worker to sleep and shuts any other down; `sample` and `swap` bring it back."""
        if self.llm is None or self.sleeping:
            return
        if "enable_sleep_mode" in self.settings and vllm_internals.sleeps(self.llm):
            self.sleeping = True
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if _on_gpu():
            import torch

            torch.cuda.empty_cache()

    def sample(self, requests: Sequence[Request], label: str) -> list[Completion]:
        """Samples one completion per request.

        Args:
            requests: token ids, seeds and sampling parameters.
            label: label of the progress line.

        Returns:
            The completions in the order of the requests.
        """
        source = SingleTurnRequests(requests)
        self.play(source, label)
        return [source.done[index] for index in range(len(requests))]

    def play(self, source: RequestSource, label: str) -> None:
        """Runs all requests to completion, including follow-up turns. Requests are batched continuously.

        Starts the engine only if there is at least one request.

        Args:
            source: yields requests and takes completions; new requests may follow from these.
            label: label of the progress line.
        """
        began = time.monotonic()
        if source.total:
            self.llm = self.llm or self._start_engine()
            self._wake_up()
            with engine_process.errors_told():
                self._play_with(self.llm, source, label)
        self.seconds = time.monotonic() - began

    def _play_with(self, llm: LLM, source: RequestSource, label: str) -> None:
        engine = llm.llm_engine
        running: dict[str, tuple[int, Request, SamplingParams]] = {}
        with counting(label, source.total) as counter, engine_process.frozen():
            while True:
                with vllm_internals.queued_together(llm, not running):
                    running |= self._enqueue(llm, source.requests(not running))
                if not running:
                    break
                for output in engine.step():
                    if output.finished:
                        index, request, params = running.pop(output.request_id)
                        completion = completion_of(self.policy, request, params, output)
                        if source.take(index, completion):
                            counter.advance()

    def _enqueue(
        self, llm: LLM, requests: Iterable[tuple[int, Request]]
    ) -> dict[str, tuple[int, Request, SamplingParams]]:
        """Queues requests in the engine; returns their indices and parameters, by the names of the outputs."""
        if not (indexed_requests := list(requests)):
            return {}
        prompts = [request.for_vllm for _, request in indexed_requests]
        with refusals_told(any(request.sampling.kwargs for _, request in indexed_requests)):
            params = [params_of(request, self.stop_ids, self.banned_ids) for _, request in indexed_requests]
            names = llm.enqueue(prompts, params, lora_request=self.lora, use_tqdm=False)
        return {
            name.partition("-")[0]: (*indexed, each)
            for name, indexed, each in zip(names, indexed_requests, params, strict=True)
        }

    def _wake_up(self) -> None:
        if self.sleeping and self.llm is not None:
            self.llm.wake_up()
        self.sleeping = False


def _on_gpu() -> bool:
    return devices.device_type() == "cuda"


@contextlib.contextmanager
def refusals_told(of_kwargs: bool) -> Iterator[None]:
    """A block in which vLLM may refuse parameters; with `of_kwargs` such an error is a UserError."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (ValueError, VLLMClientError) as error:
        if not of_kwargs:
            raise
        message = f"rollout.generation_kwargs: vLLM refuses a value ({one_line(error)}); correct it"
        raise UserError(message) from error


def completion_of(policy: Policy, request: Request, params: SamplingParams, output: Any) -> Completion:
    """Converts vLLM's output; with logprobs=0, each position holds exactly the sampled token.

    Args:
        policy: the policy, for its tokenizer.
        request: the request.
        params: parameters of the request; its seed is not read.
        output: a finished RequestOutput with one completion.

    Raises:
        UserError: vLLM and the model's processor disagree on the prompt's image tokens, or vLLM gave up on a completion
            with structured outputs.
        RuntimeError: vLLM gave up on any other completion.
    """
    if request.shown is not None and output.prompt_token_ids != request.prompt_ids:
        raise UserError(
            f"vLLM makes {len(output.prompt_token_ids)} tokens of a prompt with images, but the model's processor "
            f"makes {len(request.prompt_ids)}: look at preprocessor_config.json of the model, which both read, and at "
            "newlines beside images"
        )
    (sampled,) = output.outputs
    if sampled.finish_reason not in ("stop", "length", "repetition"):
        cause = f"vLLM ended a completion with '{sampled.finish_reason}'; its log has the cause"
        if params.structured_outputs is None:
            raise RuntimeError(cause)
        raise UserError(f"rollout.generation_kwargs: {cause}, such as masks that leave no token; correct them")
    new_ids = list(sampled.token_ids)
    assert sampled.logprobs.token_ids == new_ids
    begun = request.begun or Begun([], [])
    ids = [*begun.ids, *new_ids]
    text = _text(policy, params, request.prompt_ids, ids)
    experts = _experts_of(sampled.routed_experts, len(output.prompt_token_ids) + len(new_ids) - 1)
    logps = array("f", [*begun.logps, *sampled.logprobs.logprobs])
    return Completion(array("i", ids), text, logps, sampled.finish_reason, experts)


def _experts_of(chosen: Any, tokens: int) -> Sequence[int] | None:
    """vLLM's experts, [tokens, layers, choices], in one dimension; None if it returned none."""
    if chosen is None:
        return None
    if len(chosen) < tokens:
        raise UserError(
            f"vLLM returns the experts of {len(chosen)} of {tokens} tokens; set rollout.router_replay: false"
        )
    return array("H", chosen[:tokens].flatten().tolist())


def _text(policy: Policy, params: SamplingParams, prompt_ids: list[int], ids: list[int]) -> str:
    """The text of all tokens except `Policy.hidden_ids`.

    If it shows no special tokens, it equals vLLM's own text (detokenize=True).
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    tokenizer: Any = policy.tokenizer
    hidden = policy.hidden_ids.union(params.stop_token_ids or ())
    shown = [id_ for id_ in ids if id_ not in hidden]
    params.skip_special_tokens = policy.special_ids.isdisjoint(shown)
    if (text := _byte_text(tokenizer, prompt_ids, shown, params.skip_special_tokens)) is not None:
        return text
    params.stop = []  # else the text would end before the stop string
    request: Any = SimpleNamespace(
        request_id="", prompt_token_ids=prompt_ids, prompt_embeds=None, sampling_params=params
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(_cached(tokenizer), request)
    detokenizer.update(shown, stop_terminated=False)
    return str(detokenizer.output_text)


@lru_cache(maxsize=1)
def _cached(tokenizer: Any) -> Any:
    """A tokenizer as vLLM holds it: one in Python would make its list of special tokens anew for each token."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def _byte_text(tokenizer: Any, prompt_ids: list[int], ids: list[int], skip_special: bool) -> str | None:
    """The text that vLLM's detokenizer would make token by token, from one call of a tokenizer whose tokens are bytes.

    Like vLLM, it leaves out the last tokens if the text ends within a character. Returns None for other tokenizers, and
    after a prompt that ends within a character.
    """
    from tokenizers.decoders import ByteLevel

    backend: Any = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(getattr(backend, "decoder", None), ByteLevel):
        return None
    if backend.decode(prompt_ids, skip_special_tokens=skip_special).endswith(BROKEN):
        return None
    text, count = BROKEN, len(ids) + 1
    while text.endswith(BROKEN):
        count -= 1
        text = str(backend.decode(ids[:count], skip_special_tokens=skip_special))
    return text
