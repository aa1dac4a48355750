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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.config.sampling import FP8
from rloo_pipeline.errors import IncompatibleEngine, UserError, one_line
from rloo_pipeline.rollout import device_limits, engine_process, engine_size, engine_weights, swap_check, vllm_import
from rloo_pipeline.rollout.engine_size import EngineSettings
from rloo_pipeline.rollout.requests import Completion, Request, SingleTurns, Turns, completion_of, params_of
from rloo_pipeline.runtime import caches, devices
from rloo_pipeline.runtime.progress import announcing, counting, say

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


class Sampler:
    """A vLLM engine that holds one policy."""

    def __init__(self, policy: Policy, engine: EngineSettings, max_model_len: int, seed: int) -> None:
        """Loads the policy: a full model, or an adapter with its base.

        Raises:
            UserError: prompt and completion do not fit the model's context, or vLLM does not
                apply all modules of the adapter.
        """
        if engine.router_replay and not _on_gpu():
            raise UserError(
                "rollout.router_replay: vLLM returns the experts of its tokens on GPUs only; set it to false, or "
                "sample on a GPU"
            )
        device_limits.check(policy, engine.dtype, engine.quantization)
        self.policy = policy
        self.digest = policy.digest
        """Digest of the weights that the engine holds; empty while others are loaded."""
        if policy.is_adapter:
            Policy(policy.base).verify()
        self.max_model_len = engine_size.context_length(policy, max_model_len)
        self.stop_ids = policy.stop_ids
        self.vocabulary = len(policy.tokenizer)
        self.never = policy.placeholder_ids
        self.placeholder = policy.image_tokens.whole if engine.most_images else None
        """Id of the token that stands for an image in a prompt; None where prompts have none."""
        self.settings = engine_size.settings(policy, engine, self.max_model_len, seed)
        self.sleeping = False
        """True if vLLM has moved the weights to host memory and dropped the KV cache."""
        self.swap_checked = False
        """True if a swap of this engine's weights has passed `swap_check`."""
        self.lora = engine_weights.request_of(policy, 1) if policy.is_adapter else None
        self.seconds = 0.0
        """Wall seconds of the last call of `sample`."""
        self.llm: LLM | None = self._start_engine()
        devices.hold_gpu(self)

    def _start_engine(self) -> LLM:
        vllm = vllm_import.import_vllm()
        self.settings |= engine_process.prepare()
        vllm_import.prepare(self.policy)
        on_gpu = _on_gpu()
        kernels = ", which compiles its kernels the first time" if on_gpu else ""
        compiling = self._compiling(vllm.__version__) if on_gpu else contextlib.nullcontext()
        with compiling, announcing(f"starting vLLM{kernels}"), engine_process.errors_told():
            engine: LLM = vllm.LLM(**self.settings)
        if not on_gpu:
            device_limits.check_heads(self.policy, engine.llm_engine.vllm_config.model_config)
            logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)  # else it warns once for each image
        if self.lora is not None:
            try:
                engine_weights.load_adapter(engine, self.lora)
            except UserError:
                engine.llm_engine.engine_core.shutdown()
                raise
        return engine

    def _compiling(self, version: str) -> contextlib.AbstractContextManager[None]:
        """A block in which vLLM may fill its compile cache. vLLM writes some of these files in place."""
        settings = {key: value for key, value in self.settings.items() if key != "model"}
        facts = json.dumps([version, devices.card(), settings, self.policy.config], sort_keys=True, default=str)
        folder = Path(os.environ.get("VLLM_CACHE_ROOT", caches.cache_folder() / "vllm"))
        return caches.compiling(folder / "torch_compile_cache", hashlib.sha256(facts.encode()).hexdigest()[:16])

    def swap(self, policy: Policy, max_model_len: int) -> None:
        """Loads another policy with the same `compatibility_key`; completions equal those of a new engine.

        If its digest is the current policy's, nothing is read again.

        Args:
            policy: the policy.
            max_model_len: number of tokens that must fit into the context.

        Raises:
            IncompatibleEngine: the context of the engine is shorter, its cache cannot be emptied, or it does not
                compute with the new weights.
            UserError: it does not compute with the new adapter; a new engine would not either.
        """
        if max_model_len > self.max_model_len:
            raise IncompatibleEngine(f"a context of {self.max_model_len} tokens")
        self._wake_up()
        self.policy, self.settings["model"] = policy, str(policy.base)
        if self.llm is None:
            self.lora = None if self.lora is None else engine_weights.request_of(policy, 1)
        elif policy.digest != self.digest:
            self.digest = ""
            with announcing(f"loading {policy} into vLLM"):
                self._load(self.llm, policy)
        if self.llm is not None:
            engine_process.reset_cache(self.llm)
        self.digest = policy.digest

    def _load(self, llm: LLM, policy: Policy) -> None:
        """Loads a policy into the engine and checks that it did."""
        block = int(llm.llm_engine.vllm_config.cache_config.block_size)
        prompts = swap_check.fixed_prompts(self.vocabulary, block, self.max_model_len, self.never)
        before = swap_check.query(llm, prompts, self.lora, self.placeholder)
        if self.lora is not None:  # under an id that it has seen, vLLM keeps serving the old adapter
            old = self.lora.lora_int_id
            llm.llm_engine.remove_lora(old)
            self.lora = engine_weights.request_of(policy, old + 1)
            engine_weights.load_adapter(llm, self.lora)
        else:
            engine_weights.reload_weights(llm, policy.folder)
        engine_process.reset_cache(llm)
        reply = swap_check.query(llm, prompts, self.lora, self.placeholder)
        if reply.cached:
            raise IncompatibleEngine("a cache of another policy's prompts")
        if reply.logps == before.logps:  # which no difference between number formats hides
            say(f"vLLM answers as before it loaded {policy}, so the policy gets a new engine")
            raise IncompatibleEngine("the weights of another policy")
        if not self.swap_checked or swap_check.is_cheap(policy):
            number_format = FP8 if "quantization" in self.settings else None
            swap_check.check_weights(reply, policy, self.settings["dtype"], number_format)
            self.swap_checked = True

    def leave_gpu(self) -> None:
        """Puts the engine of a worker to sleep and shuts any other down; `sample` and `swap` bring it back."""
        if self.llm is None or self.sleeping:
            return
        if "enable_sleep_mode" in self.settings and engine_process.sleeps(self.llm):
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
        turns = SingleTurns(requests)
        self.play(turns, label)
        return [turns.done[index] for index in range(len(requests))]

    def play(self, turns: Turns, label: str) -> None:
        """Runs all requests to completion, including follow-up turns. Requests are batched continuously.

        Starts the engine only if there is at least one request.

        Args:
            turns: yields requests and takes completions; new requests may follow from these.
            label: label of the progress line.
        """
        began = time.monotonic()
        if turns.total:
            self.llm = self.llm or self._start_engine()
            self._wake_up()
            with engine_process.errors_told():
                self._play_with(self.llm, turns, label)
        self.seconds = time.monotonic() - began

    def _play_with(self, llm: LLM, turns: Turns, label: str) -> None:
        engine = llm.llm_engine
        running: dict[str, tuple[int, Request, SamplingParams]] = {}
        with counting(label, turns.total) as counter, engine_process.frozen():
            while True:
                with engine_process.queued_together(llm, not running):
                    running |= self._enqueue(llm, turns.requests(not running))
                if not running:
                    break
                for output in engine.step():
                    if output.finished:
                        index, request, params = running.pop(output.request_id)
                        completion = completion_of(engine.get_tokenizer(), request, params, output)
                        counter.advance(turns.take(index, completion))

    def _enqueue(
        self, llm: LLM, requests: Iterable[tuple[int, Request]]
    ) -> dict[str, tuple[int, Request, SamplingParams]]:
        """Gives requests to the engine; returns them with index and parameters by the names that its outputs have."""
        if not (indexed_requests := list(requests)):
            return {}
        from vllm.exceptions import VLLMClientError

        prompts = [request.for_vllm for _, request in indexed_requests]
        try:
            params = [params_of(request, self.stop_ids, self.never) for _, request in indexed_requests]
            names = llm.enqueue(prompts, params, lora_request=self.lora, use_tqdm=False)
        except (ValueError, VLLMClientError) as error:
            if not any(request.sampling.kwargs for _, request in indexed_requests):
                raise
            message = f"rollout.generation_kwargs: vLLM refuses a value ({one_line(error)}); correct it"
            raise UserError(message) from error
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
