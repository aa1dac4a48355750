"""What every section of the configuration is."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["float32", "bfloat16", "float16"]


JSON = dict[str, Any]


class Section(BaseModel):
    """A section: no unknown keys, no changes after loading, docstrings are the descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
