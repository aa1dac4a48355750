"""One sentence for a configuration that pydantic refuses: which key is wrong, and what to write instead."""

from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rloo_pipeline.config.run import Config
from rloo_pipeline.config.section import S, Section, section_in
from rloo_pipeline.errors import UserError, did_you_mean
from rloo_pipeline.runtime.installation import csv_rows

UNKNOWN = ("extra_forbidden", "missing")
"""Types of problems with a key that the section does not have."""
MOST_NAMED = 5
"""Keys that a message names besides the one that it explains."""
KEYS_OF_OTHER_SYSTEMS = {
    key: row["meaning"] for row in csv_rows("config/other_systems.csv") for key in row["keys"].split()
}
"""Keys of TRL, verl, OpenRLHF and others, and what they are called here."""


def checked(section: type[S], raw: Any, origin: str, context: str | None = None) -> S:
    """Validates a mapping as a section or as a whole file.

    Args:
        section: section class that defines the keys.
        raw: the mapping.
        origin: source of the mapping, for the message.
        context: `BY_RUN`, if a run wrote it.

    Raises:
        UserError: a key is unknown, missing or out of range; the message says what to do about one, and names others.
    """
    try:
        return section.model_validate(raw, context=context)
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error, section)}") from None


def _first_problem(error: ValidationError, whole: type[Section]) -> str:
    """One sentence for the first problem that pydantic found; unknown keys go first because they explain the others.

    Args:
        error: pydantic's error.
        whole: the whole configuration as read.
    """
    problems = sorted(error.errors(), key=lambda one: (one["type"] != "extra_forbidden", _is_mapping_for_text(one)))
    problem, location = problems[0], problems[0]["loc"]
    # the members of a union are one place
    key, *rest = dict.fromkeys(_key_of(one, whole) for one in problems)
    more = f" and {len(rest) - MOST_NAMED} more" if len(rest) > MOST_NAMED else ""
    others = f" (also wrong: {', '.join(filter(None, rest[:MOST_NAMED]))}{more})" if any(rest) else ""
    if problem["type"] == "missing":
        return f"key '{key}' is missing{others}"
    if problem["type"] in UNKNOWN:
        section = _follow(location[:-1], whole)[1]
        suggestion = _suggestion(section, str(location[-1]))
        listing = "" if suggestion or not section else f"; known keys here: {', '.join(section.model_fields)}"
        return f"unknown key '{key}'{suggestion}{others}{listing}"
    section, message = _follow(location, whole)[1], problem["msg"].removeprefix("Value error, ")
    if section is not None and problem["type"] in ("model_type", "dict_type"):
        if problem["input"] is None:
            return f"{key}: the section is empty; give it a key, or leave it out{others}"
        message = f"must be a section with keys of its own ({', '.join(section.model_fields)})"
    value = "" if problem["type"] == "value_error" else f", got {problem['input']!r:.100}"
    if _is_mapping_for_text(problem):
        value += "; quote a string that begins with a brace"
    return f"{key + ': ' if key else ''}{message}{value}{others}"


def _key_of(problem: ErrorDetails, whole: type[Section]) -> str:
    """The key that a problem is about; for an unknown or missing key, that key itself."""
    location = problem["loc"]
    named = [str(location[-1])] if problem["type"] in UNKNOWN else []
    return ".".join([*_follow(location[: len(location) - len(named)], whole)[0], *named])


def _is_mapping_for_text(problem: ErrorDetails) -> bool:
    """True for a mapping in place of a string. Where mappings are allowed, too, another problem says what is wrong."""
    return problem["type"] == "string_type" and isinstance(problem["input"], dict)


def _follow(location: tuple[int | str, ...], whole: type[Section]) -> tuple[list[str], type[Section] | None]:
    """The keys in a pydantic error location, without the union members that pydantic puts between them, and the section
    that it points into, if it does.
    """
    keys: list[str] = []
    section: type[Section] | None = whole
    is_name = False  # as in a mapping of names to sections
    for part in location:
        field = section.model_fields.get(part) if section and isinstance(part, str) and not is_name else None
        if isinstance(part, int) or field or is_name:
            keys.append(str(part))
        if isinstance(part, str) and not is_name:
            section = section_in(field.annotation) if field else None
        is_name = field is not None and get_origin(field.annotation) is dict
    return keys, section


def _suggestion(section: type[Section] | None, unknown: str) -> str:
    """Suggests a known key for an unknown one: by its meaning in other systems, but in a section that the meaning does
    not name first a similar key; else a similar key of the section, the same key of another section, or a less similar
    key of the section; in this order.
    """
    if ":" in unknown:
        return "; YAML needs a space after the colon"
    fields = list(section.model_fields) if section else []
    if meaning := KEYS_OF_OTHER_SYSTEMS.get(unknown):
        named = (section_in(field.annotation) for name, field in Config.model_fields.items() if f"{name}." in meaning)
        is_elsewhere = section not in (None, Config, *named)
        return (did_you_mean(unknown, fields) if is_elsewhere else "") or f"; {meaning}"
    return did_you_mean(unknown, fields, 0.8) or _in_other_section(section, unknown) or did_you_mean(unknown, fields)


def _in_other_section(section: type[Section] | None, unknown: str) -> str:
    models = {name: section_in(field.annotation) for name, field in Config.model_fields.items()}
    others = {name: model for name, model in models.items() if model and model is not section}
    holders = [name for name, model in others.items() if unknown in model.model_fields]
    paths = " or ".join(f"'{name}.{unknown}'" for name in holders)
    return f"; did you mean {paths}?" if len(holders) in (1, 2) else ""
