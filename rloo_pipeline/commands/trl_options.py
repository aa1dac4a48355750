"""Translates options of TRL's RLOOConfig and GRPOConfig (1.16) to configuration keys, as docs/trl.md describes.

An option that a script leaves out has TRL's default, which is written out if it differs from the default here.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from rloo_pipeline.commands import trl_tables as tables
from rloo_pipeline.config.generation import REFUSED, STOPS, GenerationKwargs
from rloo_pipeline.config.run_keys import TENSORBOARD, Tracker
from rloo_pipeline.config.section import JSON
from rloo_pipeline.errors import UserError, counted

NO_CLIPPING = 1e9
"""A max_grad_norm that no gradient reaches."""


class ArgumentRow(NamedTuple):
    """One argument of the script, and the keys that it was translated to."""

    option: str
    value: str
    here: str
    """Keys that it was translated to; empty if it has no counterpart."""
    note: str = ""

    @property
    def same_name(self) -> bool:
        """True if both name and value are kept."""
        return self.here.rpartition(".")[2] == self.option and not self.note


class Translation:
    """The keys that options are translated to, and a row for each option.

    Args:
        kind: `RLOO` or `GRPO`.
        options: those options of the script whose values are known.

    Raises:
        UserError: the batch sizes have no counterpart here.
    """

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self.kind = kind
        self.given = options = {**options}
        for name in sorted(tables.NEVER_NONE & {name for name, value in options.items() if value is None}):
            raise UserError(f"{name} None: has no counterpart; give a value, or leave it out for TRL's default")
        kwargs = options.get("generation_kwargs") or {}
        if isinstance(kwargs, str):  # transformers reads it as JSON
            try:
                kwargs = dict(json.loads(kwargs))
            except (ValueError, TypeError) as error:
                raise UserError(f"generation_kwargs {kwargs}: not a JSON object ({error})") from error
        options |= {name: value for name, value in kwargs.items() if _samples(name)}  # overridden
        self.options = {**tables.DEFAULTS[kind], **options}
        if self.options.get("top_k") == -1:  # -1 turns it off in vLLM, 0 does here
            self.options["top_k"] = 0
        self.keys: JSON = {}
        """Values by key, written as `section.key`."""
        self.rows: list[ArgumentRow] = []
        self.read: set[str] = {"output_dir", "model_init_kwargs", "reward_weights"}
        self._drop_unused()
        if kind == "RLOO":
            self.keys["algorithm.preset"] = "trl"
        self._same()
        self._batch()
        self._length()
        self._optimizer()
        if kind == "GRPO":
            self._grpo()
        self._sampling(kwargs)
        self._trackers()
        self._rest()

    def add(self, option: str, here: str, note: str = "") -> None:
        """Adds a row for an option. An option that the script leaves out has TRL's default. If that has changed, the
        row says since which release it is the default, and what it was before.
        """
        self.read.add(option)
        origin = "" if option in self.given else " (TRL's default)"
        if origin and (earlier := tables.EARLIER.get((self.kind, option))):
            told = "TRL's default since {}, {} before".format(*earlier)
            origin, note = (origin, f"{note}; {told}") if note else (f" ({told})", note)
        self.rows.append(ArgumentRow(option, shown(self.options.get(option)) + origin, here, note))

    def _set(self, option: str, key: str, value: Any, note: str = "") -> None:
        """Sets a key, and adds a row for the option that it comes from."""
        self.keys[key] = value
        self.add(option, key, note)

    def _drop_unused(self) -> None:
        """Leaves out options that have no effect on the loss or with the optimizer."""
        loss, unused = str(self.options.get("loss_type")), list[str]()
        if "clip" in tables.VALUES["loss_type"].get(loss, ()):
            unused += ["delta"] if loss == "cispo" else ["delta", "epsilon", "epsilon_high"]
        if tables.VALUES["optim"].get(str(self.options.get("optim"))) == "adafactor":
            unused += ["adam_beta1", "adam_beta2", "adam_epsilon"]
        for name in unused:
            self.options.pop(name, None)
        self.read |= {*unused}

    def _same(self) -> None:
        for name, key in tables.KEYS.items():
            if name == "max_grad_norm" and not self.options.get(name, 1.0):  # off in transformers
                self._set(name, key, NO_CLIPPING, f"{NO_CLIPPING:g}: no clipping")
            elif name in self.options:
                self._one(name, key)
        for name, default in {"temperature": 1.0, "top_k": 0}.items():  # the same here, so no key is set
            if self.kind == "GRPO" and name not in self.options:
                self.options[name] = default
                self.add(name, tables.KEYS[name])
        for name in ("beta", "num_iterations"):  # for RLOO, the preset has TRL's defaults
            if name in self.given or self.kind == "GRPO":
                self._one(name, f"algorithm.{name}")
        if self.options.get("max_prompt_length"):
            self._one("max_prompt_length", "dataset.max_prompt_length", "longer prompts are dropped, not cut")
        else:
            note = "512 by default: longer prompts are dropped, which TRL keeps"
            self.add("max_prompt_length", "dataset.max_prompt_length", note)
        if "disable_dropout" not in self.given:
            self.options["disable_dropout"] = False
            self.add(
                "disable_dropout", "update.disable_dropout", "true by default: no dropout of the model's config.json"
            )

    def _one(self, name: str, key: str, note: str = "") -> None:
        """Takes over an option unchanged. None means the default on both sides."""
        self.add(name, key, note)
        if self.options[name] is not None:
            self.keys[key] = self.options[name]

    def _batch(self) -> None:
        """Sets completions and optimizer steps per round, for one process if the number is unknown."""
        size = self.options.get("per_device_train_batch_size", 8)
        accumulated = self.options.get("gradient_accumulation_steps", 1)
        batch, micro_steps = self.options.get("generation_batch_size"), self.options.get("steps_per_generation")
        known = self.options.get("num_processes")
        micro_steps = micro_steps or (batch // (size * (known or 1)) if batch else accumulated)
        batch = batch or size * micro_steps
        if micro_steps % accumulated and (accumulated % micro_steps or self.options["num_iterations"] > 1):
            raise UserError(
                f"steps_per_generation {micro_steps} and gradient_accumulation_steps {accumulated}: an optimizer step "
                "would span parts of two rounds; make one a multiple of the other"
            )
        total, group = "generation_batch_size" in self.given, self.options["num_generations"]
        if micro_steps < accumulated:
            batch, micro_steps = size * accumulated * ((known or 1) if total else 1), accumulated
        self.steps = micro_steps // accumulated
        processes = 1 if total else known or group // math.gcd(batch, group)
        batch *= processes
        more = "on 1 process; with N processes, "
        self.options["generation_batch_size"] = batch
        note = "of all processes" if total else f"{size} × {micro_steps} {more}times N"
        if processes > 1 or (known and not total):
            fewest = f", the fewest that make whole groups of {group}"
            note = f"{size} × {micro_steps} × {processes} processes{'' if known else fewest}"
        if known:
            self.add("num_processes", "rollout.generation_batch_size", "they multiply the batch")
        self._set("generation_batch_size", "rollout.generation_batch_size", batch, note)
        self.options["steps_per_generation"] = micro_steps
        note = f"{self.steps}, in optimizer steps: {micro_steps} micro-steps / {accumulated}"
        note += f", {more}divided by N" * (total and not known)
        self._set("steps_per_generation", "algorithm.steps_per_generation", self.steps, note)

    def _length(self) -> None:
        """Sets the number of rounds, from optimizer steps or epochs."""
        per_round = self.steps * self.options["num_iterations"]
        steps, epochs = self.options.get("max_steps", -1), self.options["num_train_epochs"]
        batch, prompts = self.keys["rollout.generation_batch_size"], self.options["num_generations"]
        if steps > 0:
            self.read.add("num_train_epochs")
            rounds = math.ceil(steps / per_round)
            note = f"{rounds}: {counted(steps, 'optimizer step')}, {per_round} a round"
            self._set("max_steps", "rounds", rounds, note)
        else:
            rounds = 100
            note = f"100 for now; as in TRL: {epochs:g} × training prompts / {batch // prompts}"
            decays = str(self.options["lr_scheduler_type"]) not in ("constant", "constant_with_warmup")
            warms = self.options.get("warmup_ratio") or 0 < (self.options.get("warmup_steps") or 0) < 1
            keys = ["update.lr_horizon_rounds"] * decays + ["update.warmup_steps"] * bool(warms)
            self._set("num_train_epochs", "rounds", rounds, f"{note}; {' and '.join(keys)} too" if keys else note)
        self.read.add("max_steps")
        if self.options.get("eval_strategy") == "steps":
            every = self.options.get("eval_steps") or self.options.get("logging_steps", 10)
            if not every:
                raise UserError("eval_strategy steps without eval_steps; set one")
            every = every * rounds if every < 1 else every / per_round  # below 1, a share of the run
            every = max(1, round(every))
            self._set("eval_strategy", "evaluation.every", every, f"every {counted(every, 'round')}")

    def _optimizer(self) -> None:
        total = self.keys["rounds"] * self.steps * self.options["num_iterations"]
        name, kwargs = str(self.options["lr_scheduler_type"]), self.options.get("lr_scheduler_kwargs") or {}
        if name == "cosine_with_min_lr" and isinstance(kwargs, dict) and len(kwargs) == 1:
            least = kwargs.get("min_lr_rate", kwargs.get("min_lr", 0) / self.options["learning_rate"])
            self._set("lr_scheduler_kwargs", "update.min_lr_ratio", least, f"{least:g} of learning_rate")
        if schedule := tables.VALUES["lr_scheduler_type"].get(name):
            decays = schedule != "constant"
            note = "with update.lr_horizon_rounds" if decays else ""
            self._set("lr_scheduler_type", "update.lr_scheduler_type", schedule, note)
            if decays:
                self.keys["update.lr_horizon_rounds"] = self.keys["rounds"]
        warmup = self.options.get("warmup_steps") or 0
        ratio = self.options.get("warmup_ratio") or (warmup if 0 < warmup < 1 else 0)
        self.read |= {"warmup_steps", "warmup_ratio"}
        steps = math.ceil(ratio * total) if ratio else int(warmup)
        option = "warmup_ratio" if self.options.get("warmup_ratio") else "warmup_steps"
        if steps and name == "constant":
            self.add(option, "no key", "lr_scheduler_type constant has no warm-up; constant_with_warmup has")
        elif steps:
            self._set(option, "update.warmup_steps", steps, counted(steps, "optimizer step") if ratio else "")
        betas = [self.options.get("adam_beta1", 0.9), self.options.get("adam_beta2", 0.999)]
        for name in ("adam_beta1", "adam_beta2"):
            if name in self.given and name in self.options:
                self._set(name, "update.adam_betas", betas, "one key for both")
        if optimizer := tables.VALUES["optim"].get(str(self.options.get("optim"))):
            self._set("optim", "update.optimizer", optimizer, optimizer)

    def _grpo(self) -> None:
        """Sets the keys of GRPO's loss to TRL's defaults. In TRL, truncated completions stay in the baseline."""
        algorithm: JSON = {"importance_sampling_level": "token", "clip": "ppo"}
        if self.options.get("mask_truncated_completions"):
            algorithm["keep_truncated_in_baseline"] = True
        for option in ("loss_type", "scale_rewards"):
            value, table = self.options[option], tables.VALUES[option]
            value = {True: "group", False: "none"}.get(value, value) if option == "scale_rewards" else value
            if option == "scale_rewards" and self.options.get("multi_objective_aggregation") == "normalize_then_sum":
                # this divides by the spread of the batch, whatever scale_rewards says
                algorithm["advantage"] = "reinforce_pp"
                self.read.add(option)
                continue
            if value not in table:
                raise UserError(f"{option} {value}: has no counterpart; there are {', '.join(table)}")
            algorithm |= table[value]
            self.add(option, "algorithm", ", ".join(f"{key}: {set_to}" for key, set_to in table[value].items()))
        level = self.options.get("importance_sampling_level", "token")
        if level == "sequence":
            algorithm["importance_sampling_level"] = "sequence_mean"
            self.add("importance_sampling_level", "algorithm.importance_sampling_level", "sequence_mean (GSPO)")
        elif level != "token":
            raise UserError(f"importance_sampling_level {level}: has no counterpart; there are token, sequence")
        self.read.add("importance_sampling_level")
        loss = self.options["loss_type"]
        for name in (name for name in self.given if name.startswith(("sapo_", "vespo_"))):
            if name.startswith(f"{loss}_"):
                self._one(name, f"algorithm.{name}")
            self.read.add(name)  # it has no effect on other losses
        if loss == "cispo":
            # TRL's option is the bound itself
            bound = self.options.get("epsilon_high") or self.options.get("epsilon", 0.2)
            if bound <= 1:
                raise UserError(
                    f"loss_type cispo without an epsilon_high above 1: the bound of ratios is then {bound:g}, which "
                    "scales the loss down; set it, such as to 5.0"
                )
            for name in ("epsilon", "epsilon_high"):
                self.keys.pop(f"algorithm.{name}", None)
                self.rows = [row for row in self.rows if row.option != name]
            algorithm["epsilon_high"] = bound - 1
            self.add("epsilon_high", "algorithm.epsilon_high", "the bound minus 1")
        if self.options["beta"]:
            correction = bool(self.options["use_bias_correction_kl"])
            algorithm["kl"] = {"placement": "loss", "estimator": "k3", "bias_correction": correction}
            self.add("use_bias_correction_kl", "algorithm.kl.bias_correction", "with placement: loss, estimator: k3")
        self.read |= {"use_bias_correction_kl", "vllm_importance_sampling_correction"}
        algorithm |= self._mismatch(loss)
        self.keys = {f"algorithm.{key}": value for key, value in algorithm.items()} | self.keys

    def _mismatch(self, loss: str) -> JSON:
        """The keys of `algorithm` that correct for the difference between sampler and trainer."""
        names = [f"vllm_importance_sampling_{part}" for part in ("mode", "clip_max", "clip_min")]
        cap = "vllm_importance_sampling_cap"  # the older name of clip_max
        self.read |= {*names, cap}
        if not self.options.get("use_vllm") or not self.options.get("vllm_importance_sampling_correction", True):
            return {}
        mode, low = self.options[names[0]], self.options.get(names[2])
        high = self.options.get(cap) or self.options.get(names[1], 3.0)
        cut = [name for name in ("top_p", "top_k", "min_p") if self.options.get(name) not in (None, 0, 1, 1.0)]
        if cut:  # the sampler's log-probs are those of the cut distribution
            self.add(names[0], "", f"not with {' and '.join(cut)}")
            return {}
        if loss == "vespo":
            if mode != "token_truncate":
                raise UserError(f"loss_type vespo with {names[0]} {mode}: has no counterpart; set token_truncate")
            self.add(names[0], "algorithm.old_logps", "sampler: the ratios are to the sampler, none is truncated")
            return {"old_logps": "sampler"}
        if mode not in tables.VALUES[names[0]]:
            raise UserError(f"{names[0]} {mode}: has no counterpart; there are {', '.join(tables.VALUES[names[0]])}")
        correction, limits = tables.VALUES[names[0]][mode], {} if low is None else {"min": low}
        self.add(names[0], "algorithm.mismatch", f"correction: {correction}, max: {shown(high)}")
        if self.options.get("vllm_structured_outputs_regex"):  # needs the correction above
            self._one("vllm_structured_outputs_regex", "rollout.generation_kwargs.structured_outputs.regex")
        return {"mismatch": {"correction": correction, "max": high, **limits}}

    def _sampling(self, given: Mapping[str, Any]) -> None:
        """Takes over vLLM's other sampling parameters; those that mask tokens need the weights of `mismatch`."""
        self.read.add("generation_kwargs")
        for name, value in given.items():
            key = tables.SAMPLING.get(name, name)
            masks, note = key not in STOPS, REFUSED.get(key, "")
            option = f"generation_kwargs.{name}"
            self.options[option] = self.given[option] = value
            self.read.add(option)
            if key in GenerationKwargs.model_fields and not (masks and "algorithm.mismatch" not in self.keys):
                self._one(option, f"rollout.generation_kwargs.{key}")
            elif key in GenerationKwargs.model_fields:
                self.add(option, "", "masks tokens, which needs algorithm.mismatch.correction")
            elif name == "do_sample" and value is False:
                self.add(option, "", "completions are always sampled here")
            elif not _samples(key) and value not in (None, False, tables.OFF.get(name, False)):
                self.add(option, "", note)

    def _trackers(self) -> None:
        """Takes over the trackers that a run can write for."""
        wanted = self.given.get("report_to") or ()
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        if taken := [name for name in wanted if name in get_args(Tracker) and name != TENSORBOARD]:
            lost = [str(name) for name in wanted if name not in get_args(Tracker)]
            notes = ["W&B is written offline"] if "wandb" in taken else []
            notes += [f"{' and '.join(lost)} left out"] if lost else []
            self._set("report_to", "report_to", taken, "; ".join(notes))

    def _rest(self) -> None:
        """Adds rows for options that have no key."""
        for name, value in self.given.items():
            if name in self.read or name in tables.OF_MODEL:
                continue
            if name in tables.WITHOUT_KEY:
                if tables.WITHOUT_KEY[name]:
                    self.add(name, tables.WITHOUT_KEY[name])
            elif name == "fp16" and value:
                self._set(name, "model.dtype", "float16", "float16")
            elif value not in (None, False, tables.OFF.get(name, False)):
                self.add(name, "")


def _samples(name: str) -> bool:
    """True for a parameter of sampling with the same name on both sides."""
    return tables.KEYS.get(name) == f"rollout.{name}"


def shown(value: Any) -> str:
    """Formats a value as YAML on one line, shortened if it is long."""
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else str(value)
    return str(text) if len(str(text)) <= 60 else f"{str(text)[:57]}…"


def groups(rows: Sequence[ArgumentRow]) -> Iterator[tuple[str, list[ArgumentRow]]]:
    """Groups rows by kind, each of the three kinds under a title."""
    yield "Kept as they are", [row for row in rows if row.here and row.same_name]
    yield "Translated", [row for row in rows if row.here and not row.same_name]
    yield "Without a counterpart: NOT in this project", [row for row in rows if not row.here]
