"""Generates images of a coloured square, and rewards the name of the colour.

The background is grey with noise; position, size and shade of the square vary. Rows depend only on the arguments, and
rows of `train` and `test` are drawn from different seeds.
"""

import random
from typing import Any

from rloo_pipeline.user_code.completion_text import text_of

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (225, 205, 40)}
QUESTION = "colour?"
SIDE = 56
"""Side of an image in pixels."""


def squares(split: str, size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns `size` rows with columns `prompt`, `image` (a PIL image) and `answer`, the name of a colour.

    Args:
        split: `train` or `test`.
        size: number of rows.
        seed: seed of the draws.
    """
    draw = random.Random(f"squares {split} {seed}")
    names = [draw.choice([*COLOURS]) for _ in range(size)]
    prompt = [{"role": "user", "content": QUESTION}]
    return [{"prompt": prompt, "image": square(name, draw), "answer": name} for name in names]


def square(name: str, draw: random.Random) -> Any:
    """Draws a PIL image with a square of this colour."""
    from PIL import Image

    image = Image.frombytes("L", (SIDE, SIDE), bytes(draw.randrange(100, 156) for _ in range(SIDE**2))).convert("RGB")
    side, shade = draw.randrange(SIDE // 2, SIDE * 3 // 4), draw.uniform(0.8, 1.1)
    left, top = (draw.randrange(SIDE - side) for _ in range(2))
    colour = tuple(min(255, round(part * shade)) for part in COLOURS[name])
    image.paste(colour, (left, top, left + side, top + side))
    return image


def names_colour(completions: list[Any], answer: list[str]) -> list[float]:
    """1 for the name of the colour and nothing else, 0.5 for a text that begins with it, otherwise 0."""
    texts = [text_of(completion).strip() for completion in completions]
    return [1.0 if text == name else 0.5 * text.startswith(name) for text, name in zip(texts, answer, strict=True)]
