"""References to functions that a configuration names."""

import pytest

from rloo_pipeline import import_string
from rloo_pipeline.errors import UserError


@pytest.mark.parametrize(("old", "new"), import_string.RENAMED.items())
def test_a_module_that_has_another_name_now_is_said_with_it(old, new) -> None:
    assert import_string.source_of(f"{new}:function").is_file()
    with pytest.raises(UserError, match=f"{old} is now {new}; write {new}:function"):
        import_string.source_of(f"{old}:function")
