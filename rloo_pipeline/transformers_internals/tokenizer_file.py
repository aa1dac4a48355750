"""Makes transformers load a tokenizer as its tokenizer.json describes it.

transformers takes only the vocabulary, the merges and the added tokens from tokenizer.json, and the rest (normalizer,
splitting into words, options of the merges, decoder) from the class that tokenizer_config.json names. That class may be
wrong: DeepSeek-R1-Distill-Llama names LlamaTokenizerFast, which would lose all its spaces. transformers knows such
models by their Hub id, which a local folder does not have.
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from rloo_pipeline.runtime.import_shims import replaced
from rloo_pipeline.transformers_internals import optional_parts


@cache
def prepare_tokenizers() -> Any:
    """Makes tokenizer.json, where there is one, decide everything about token ids; call it before loading a tokenizer.

    It also applies to tokenizers that vLLM loads in this process. Returns the method that it replaces.

    Raises:
        UserError: the installed transformers is not the version whose internals this package uses.
    """
    optional_parts.prepare_transformers()
    from transformers import TokenizersBackend

    backend: Any = TokenizersBackend
    original = backend.__dict__["convert_to_native_format"]
    original = getattr(original.__func__, "replaced", original)  # by another import of this module
    convert = original.__func__

    def keep_file(cls: Any, /, trust_remote_code: bool = False, **arguments: Any) -> dict[str, Any]:
        """The arguments of the class: `tokenizer_file` itself rather than what transformers would read of it."""
        return arguments if arguments.get("tokenizer_file") else convert(cls, trust_remote_code, **arguments)

    keep_file.replaced = original  # type: ignore[attr-defined]
    backend.convert_to_native_format = classmethod(keep_file)
    return original


def as_in_other_programs() -> AbstractContextManager[None]:
    """A block in which transformers loads tokenizers as in programs that do not call `prepare_tokenizers`."""
    original = prepare_tokenizers()
    from transformers import TokenizersBackend

    return replaced(TokenizersBackend, "convert_to_native_format", original)
