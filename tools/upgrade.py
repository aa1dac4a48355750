"""`make upgrade`: prints what the installed versions have changed of the internals that the package uses.

It also prints what stops stages from running with them.
"""

from collections.abc import Iterator
from importlib.metadata import requires, version

from packaging.requirements import Requirement

from rloo_pipeline.runtime import guard


def unmet(distribution: str) -> Iterator[str]:
    """Yields the unmet requirements on torch and on libraries in PINS, one clause each."""
    for line in requires(guard.installed_name(distribution) or distribution) or ():
        asked = Requirement(line.replace("+cpu", ""))  # a build of torch that PyPI lacks
        if asked.name in (*guard.PINS, "torch") and (asked.marker is None or asked.marker.evaluate()):
            found = version(asked.name)
            if not asked.specifier.contains(found, prereleases=True):
                yield f"asks for {asked.name}{asked.specifier}, but {found} is installed"


def main() -> None:
    """Exits with an error if a stage would refuse one of the versions, or they do not go together."""
    good = True
    for name in filter(guard.is_installed, guard.PINS):
        accepted, changes = guard.is_accepted(name), guard.changes(name)
        found = [*changes, *unmet(name)]
        refused = "" if accepted else f"; stages refuse it while {guard.PINS[name]} is pinned"
        print(f"{name} {guard.installed(name)}, pinned {guard.PINS[name]}: {len(changes)} changes{refused}")
        for problem in found:
            print(f"  {problem}")
        good = good and accepted and not found
    if not good:
        print("docs/internals.md says how to take a newer release")
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
