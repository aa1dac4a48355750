"""Decides which policies one vLLM engine can hold, one after the other."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from rloo_pipeline.artifacts.policy import Policy
from rloo_pipeline.runtime import import_shims

IGNORED_KEYS = {"dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Keys of a model's configuration that do not matter to an engine, which gets its dtype as an option."""


def compatibility_key(policy: Policy) -> str:
    """A key that is equal for all policies that one engine can hold one after the other.

    It has whether the model's code may run, and the model's configuration with defaults filled in; for an adapter, its
    base model and its own settings.
    """
    trusted = policy.trust_remote_code
    if policy.adapter is not None:
        in_order = {key: sorted(value) if isinstance(value, list) else value for key, value in policy.adapter.items()}
        return json.dumps([trusted, str(policy.base.resolve()), in_order], sort_keys=True)
    import_shims.prepare_transformers()
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(policy.folder, trust_remote_code=trusted).to_dict()
    return json.dumps([trusted, _without(config, IGNORED_KEYS)], sort_keys=True, default=str)


def _without(config: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A configuration without some keys, at every level."""
    return {
        key: _without(value, keys) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in keys
    }
