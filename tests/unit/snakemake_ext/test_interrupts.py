"""Ctrl-C twice is Ctrl-C once."""

import signal

import pytest

from rloo_pipeline.snakemake_ext import interrupts


def test_only_the_first_interrupt_is_raised() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupts.only_first()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        handler = signal.getsignal(signal.SIGINT)
        interrupts.only_first()
        assert signal.getsignal(signal.SIGINT) is handler, "the handler of someone else stays"
    finally:
        signal.signal(signal.SIGINT, before)
