"""A DeepSpeed engine around a policy: log-probs, optimizer steps, saving.

The loss of an optimizer step is a sum over sequences divided by a number that is fixed before the step, so it does not
depend on how sequences are split into micro-batches and over ranks. Only dropout does, since it is drawn for each
micro-batch. DeepSpeed averages gradients over ranks, so the loss is multiplied by their number. The learning rate is a
pure function of the step, so the step count is the whole state of the scheduler.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloo_pipeline.artifacts import files, node_files
from rloo_pipeline.artifacts.policy import Policy, seal
from rloo_pipeline.config import JSON
from rloo_pipeline.errors import UserError
from rloo_pipeline.runtime import devices, ranks
from rloo_pipeline.runtime.host_copies import HostCopies
from rloo_pipeline.runtime.progress import announcing
from rloo_pipeline.seeds import derive
from rloo_pipeline.training import (
    faster_kernels,
    formats,
    optimizers,
    plain_model,
    policy_model,
    sequence_group,
    weight_files,
)
from rloo_pipeline.training.deepspeed_internals import deepspeed_config, split_model
from rloo_pipeline.training.expert_load import ExpertLoad
from rloo_pipeline.training.kernels.lm_head import LossOf, TokenOutputs
from rloo_pipeline.training.logprobs import TokenLogProbs
from rloo_pipeline.training.packing import Sequences
from rloo_pipeline.training.settings import TrainerSettings
from rloo_pipeline.transformers_internals import optional_parts

T = TypeVar("T")
Advance = Callable[[int], None]


class Engine:
    """A policy in training on this rank.

    Attributes:
        policy: the policy that the engine holds or last trained from.
        step_count: optimizer steps so far, over all rounds.
        grad_norm: gradient norm of the last step, before clipping.
    """

    def __init__(self, policy: Policy, settings: TrainerSettings, seed: int) -> None:
        """Loads a policy. `seed` decides all randomness: new adapter weights, dropout (`seed_dropout`).

        Raises:
            UserError: this machine cannot train in the policy's number format, or the policy cannot be loaded.
        """
        deepspeed = import_libraries()
        formats.check_dtype(settings.dtype)
        self.rank = ranks.current()
        self.settings = settings
        self.policy = policy
        split_model.start_ranks()
        self.group = sequence_group.group_of(settings.deepspeed.sequence_parallel)
        torch.manual_seed(seed)
        section, on_disk = settings.deepspeed, None
        if section.offload.on_disk:
            on_disk = split_model.on_disk(plain_model.check_tensors(policy), section)
        configuration = deepspeed_config.configuration(settings, on_disk)
        self.split = section.zero_stage == 3 and self.rank.world > 1
        """True if the ranks share the weights from the start."""
        with announcing(f"loading {policy}"):
            self.model, module = self.load(configuration)
        if section.zero_stage == 3:
            plain_model.check_gathered(self.model, policy)
        self.form = module.form
        self.experts = ExpertLoad(self.model)
        # In bfloat16 DeepSpeed runs the garbage collector twice per parameter group. Some optimizers have a group per
        # tensor, and that takes minutes if the collector scans all objects each time.
        gc.freeze()
        with announcing("starting DeepSpeed"):
            optimizer = optimizers.build(module, settings)
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=configuration)
        gc.unfreeze()
        self.device: torch.device = self.engine.device
        self.zero_stage = deepspeed_config.effective_zero_stage(settings.dtype, section.zero_stage)
        self.step_count = 0
        self.grad_norm = 0.0
        deepspeed_config.adjust(self.engine, settings)
        if settings.torch_compile:
            with announcing("compiling the layers"):
                faster_kernels.install_compiled(module, policy, self.device)
        self.seed_dropout(seed)
        self.host_copies = HostCopies()
        """Host memory for offloaded weights and optimizer."""
        devices.hold_gpu(self)

    def load(self, configuration: JSON) -> tuple[Any, Any]:
        """Loads the model for DeepSpeed's configuration; returns it, and the module around it that trains it."""
        model = policy_model.load_trainable(self.policy, self.settings, configuration if self.split else None)
        with split_model.gathered(model):
            offloads = self.settings.deepspeed.gradient_checkpointing == "offload"
            return model, TokenLogProbs(model, self.settings.temperature, self.group, offloads)

    def seed_dropout(self, seed: int) -> None:
        """Seeds dropout, differently on every rank, since the ranks have different micro-batches."""
        torch.manual_seed(derive(seed, "dropout", self.rank.number))

    def logps(self, sequences: Sequences, advance: Advance = lambda _: None, dropout: bool = True) -> Tensor:
        """Computes log-probs of the sampled tokens under the current policy, without gradient, split over the ranks.

        Dropout is active if it is active in optimizer steps; otherwise a ratio would compare two different policies.

        Args:
            sequences: prompts and completions; the same on every rank.
            advance: called with the number of finished sequences.
            dropout: False turns dropout off.

        Returns:
            [sequences, most sampled tokens] float32 on the CPU, the same on every rank; 0 at padding.
        """
        return self.outputs(sequences, advance, dropout)[0]

    def outputs(self, sequences: Sequences, advance: Advance, dropout: bool = True, entropies: bool = False) -> Tensor:
        """As `logps`, followed by the entropies of the distributions in nats if they are wanted: [1 or 2, sequences,
        most sampled tokens].
        """
        values = torch.zeros(1 + entropies, len(sequences.prompts), max(sequences.sampled()), device=self.device)
        self.engine.train(dropout and self.settings.uses_dropout)
        with torch.no_grad():
            for rows in self._own_micro_batches(sequences, range(len(sequences.prompts))):
                pack = sequences.pick(rows or [0], self.group).to(self.device)
                outputs: TokenOutputs = self.engine(pack, entropies=entropies)
                if rows:
                    places = devices.moved(torch.tensor(rows), self.device)
                    padded = torch.stack([pack.unpack(part)[0] for part in outputs if part is not None])
                    values[:, places, : padded.shape[-1]] = padded
                advance(len(rows))
        self.engine.train()
        return self.sum_over_ranks(values)

    def _own_micro_batches(self, sequences: Sequences, rows: Sequence[int]) -> list[list[int]]:
        """The micro-batches of this rank's group. Every group gets the same number (some empty), since each pass is
        collective.
        """
        most = self.settings.deepspeed.micro_batch_tokens
        batches = self.form.micro_batches(sequences, rows, most, self.group.streams)
        missing = -len(batches) % self.group.streams
        return [*batches, *([[]] * missing)][self.group.stream :: self.group.streams]

    def step(
        self,
        sequences: Sequences,
        rows: Sequence[int],
        loss_of: LossOf,
        advance: Advance = lambda _: None,
        before_change: Callable[[], None] | None = None,
    ) -> float:
        """Takes one optimizer step on `rows`, split over the ranks.

        If a gradient overflows float16, the step is repeated with a smaller loss scale, never skipped.

        Args:
            sequences: prompts and completions of the round; the same on every rank.
            rows: indices of this step's sequences.
            loss_of: returns the contribution of some rows to the loss, already divided by the step's denominator.
            advance: called with the number of finished sequences.
            before_change: called between the backward pass and the change of weights.

        Returns:
            The loss, the same on every rank.

        Raises:
            UserError: the gradient is not finite.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate.at_step(self.step_count)
        batches = self._own_micro_batches(sequences, rows)
        loss = self._backward(sequences, batches, rows[0], loss_of, advance)
        if before_change is not None:
            before_change()
        self.engine.step()
        while not self.engine.was_step_applied() and deepspeed_config.can_lower_loss_scale(self.engine):
            self._backward(sequences, batches, rows[0], loss_of, None)
            self.engine.step()
        # ZeRO 3 has it in float64, where the last bits depend on the number of ranks
        self.grad_norm = torch.as_tensor(self.engine.get_global_grad_norm() or 0.0).float().item()
        if not isfinite(self.grad_norm):
            raise UserError(
                f"optimizer step {self.step_count + 1}: the gradient norm is {self.grad_norm}; look for values that "
                "are not finite or very large in the training data, or lower the learning rate"
            )
        self.step_count += 1
        return float(self.sum_over_ranks(loss))

    def _backward(
        self, sequences: Sequences, batches: list[list[int]], filler: int, loss_of: LossOf, advance: Advance | None
    ) -> Tensor:
        """Accumulates this rank's gradients and returns its share of the loss; an empty batch runs row `filler`
        instead.

        Without `advance` no progress is counted, because the step is repeated. The next micro-batch is packed before
        the backward pass, after which DeepSpeed may wait for its reductions.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        packs = (sequences.pick(rows or [filler], self.group) for rows in batches)
        following = next(packs, None)
        for rows in batches:
            assert following is not None
            pack = following.to(self.device)
            self.experts.counts_now = bool(rows) and advance is not None
            loss = self.engine(pack, loss_at_rows(rows, loss_of))
            self.experts.counts_now = False  # the backward pass may run layers again
            following = next(packs, None)
            self.engine.backward(loss * self.rank.world)
            total += loss.detach().double()
            if advance is not None:
                advance(len(rows))
        return total

    def skip_step(self) -> None:
        """Advances the learning rate without an optimizer step: weights and moments stay as they are."""
        self.step_count += 1

    def sum_over_ranks(self, values: Tensor, of_tokens: bool = False) -> Tensor:
        """Sums a tensor over all ranks, on the CPU. Ranks that share a micro-batch all have the same values, which
        count once; with `of_tokens`, each has the values of its own tokens, and all count.
        """
        if self.rank.world == 1:
            return values.cpu()
        summed = values.to(self.device, copy=True)
        torch.distributed.all_reduce(summed, group=None if of_tokens else self.group.peers)
        return summed.cpu()

    def from_first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        values: list[T] = [value]
        if self.rank.world > 1:
            torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def save_policy(self, target: Path, on_nodes: bool = False, **made_from: object) -> str:
        """Writes the policy as Hugging Face or PEFT files. Every rank must call it: each writes some of the weights of
        a full model. The files do not depend on the number of ranks. With `on_nodes`, the weights go to the nodes' own
        disks, if the controller has made a folder there (`node_files`).

        Returns:
            The policy's digest.
        """
        digest, digests = "", dict[str, str]()
        with files.atomic_folder(target) if self.rank.first else nullcontext() as temporary:
            if self.settings.lora is not None:
                weights = dict(self.weights())
                if temporary is not None:
                    self._write_adapter(weights, temporary)
            else:
                if temporary is not None:
                    policy_model.save_beside(self.model, temporary, self.policy)
                folder = self.from_first(temporary)
                assert folder is not None
                place = node_files.place(folder) if on_nodes else None
                digests = weight_files.write_together(self.model, folder, place)
            if temporary is not None:
                digest = seal(temporary, target.name, digests, **made_from)
        return self.from_first(digest)

    def _write_adapter(self, weights: dict[str, Tensor], target: Path) -> None:
        """Writes PEFT's files to an empty folder."""
        adapter = self.model.peft_config["default"]
        adapter.base_model_name_or_path = str(self.policy.base)
        if isinstance(adapter.target_modules, set):  # the order of a set differs between processes
            adapter.target_modules = sorted(adapter.target_modules)
        # else PEFT adds the frozen base weights of an embedding, which no rank has whole under ZeRO 3
        self.model.save_pretrained(target, state_dict=weights, save_embedding_layers=False)
        (target / "README.md").unlink(missing_ok=True)  # PEFT's model card, an empty form

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under the model's own names. Under ZeRO 3 the ranks gather them on the first, one at a time, on the
        CPU.
        """
        if self.settings.deepspeed.zero_stage == 3:
            yield from split_model.weights(self.model, trained_only=self.settings.lora is not None)
        else:
            for name, tensor in self.engine.module.state_dict().items():
                yield name.removeprefix("model."), tensor.detach()

    @property
    def can_wait(self) -> bool:
        """True if a worker can keep the engine while other stages use the GPU."""
        return self.device.type == "cpu" or deepspeed_config.obstacle(self.engine) is None

    def leave_gpu(self) -> None:
        """Calls `offload`, but only if the engine is on a GPU."""
        if self.device.type != "cpu":
            self.offload()

    def offload(self) -> None:
        """Moves weights and optimizer to host memory, until `enter_gpu`.

        Raises:
            IncompatibleEngine: under ZeRO 3.
        """
        deepspeed_config.to_host(self.engine, self.host_copies)
        torch.cuda.empty_cache()

    def enter_gpu(self) -> None:
        """Moves weights and optimizer back to the device."""
        self.host_copies.restore()

    def close(self) -> None:
        """Destroys the process group."""
        torch.distributed.destroy_process_group()

    def barrier(self) -> None:
        """Waits until every rank is here."""
        torch.distributed.barrier()


def import_libraries() -> ModuleType:
    """Imports the libraries that engines need, before a warm worker makes its first one; returns DeepSpeed."""
    with announcing("importing DeepSpeed and transformers"):
        deepspeed = deepspeed_config.import_deepspeed()
        optional_parts.prepare_transformers()
        import_module("transformers").PreTrainedModel  # noqa: B018
    return deepspeed


def loss_at_rows(rows: Sequence[int], loss_of: LossOf) -> LossOf:
    """Turns a loss over rows into a loss over positions in a pack of these rows; without rows the loss is 0."""

    def loss_of_positions(positions: Sequence[int], logps: Tensor, *others: Tensor) -> Tensor:
        return loss_of([rows[i] for i in positions], logps, *others) if rows else 0.0 * logps.sum()

    return loss_of_positions
