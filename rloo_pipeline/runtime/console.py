"""The console that commands print tables and messages to."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rloo_pipeline.errors import printable


class Terminal(Console):
    """A rich console that shows text from models, data sets and functions as plain text.

    Markup and control characters in it have no effect; `rich.text.Text` and styles give colours.
    """

    def __init__(self, **options: Any) -> None:
        """Takes the options of rich's Console."""
        super().__init__(markup=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders an object to segments; everything that is printed passes through here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
