"""Options of regions: what is not one of them is refused where it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmlane import RegionOptions, UsageError


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "0666"}, "mode='0666'): give permission bits"),
        ({"mode": None}, "mode=None): give permission bits"),
        ({"mode": True}, "mode=True): give permission bits"),
        ({"mode": 666}, "mode=666): give permission bits"),
        ({"mode": -1}, "mode=-1): give permission bits"),
        ({"hugepages": "always"}, "hugepages='always'): give 'auto' or 'never'"),
        ({"hugepages": True}, "hugepages=True): give 'auto' or 'never'"),
        ({"hugepages": []}, "hugepages=[]): give 'auto' or 'never'"),
        ({"prefault": "no"}, "prefault='no'): give True or False"),
        ({"lock": 1}, "lock=1): give True or False"),
        ({"max_bytes": "1"}, "max_bytes='1'): give a whole number of bytes"),
        ({"max_bytes": 0}, "max_bytes=0): give a whole number of bytes"),
        ({"max_bytes": 1e9}, "max_bytes=1000000000.0): give a whole number of bytes"),
        ({"max_bytes": True}, "max_bytes=True): give a whole number of bytes"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError) as caught:
        RegionOptions(**options)
    assert str(caught.value).startswith(f"RegionOptions({told}")


def test_a_mode_with_the_digits_of_chmod_is_told_how_python_writes_it() -> None:
    with pytest.raises(UsageError, match=r"such as 0o600 or 0o666\.$"):
        RegionOptions(mode=660)


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o777])
def test_permission_bits_are_taken(mode: int) -> None:
    assert RegionOptions(mode=mode).mode == mode


def test_everything_may_be_left_out_or_said() -> None:
    said = RegionOptions(
        mode=0o600, hugepages="auto", prefault=True, lock=False, max_bytes=None
    )
    assert said == RegionOptions()
    assert RegionOptions(max_bytes=1).max_bytes == 1
    counted: Any = np.prod([1, 640, 640])
    assert RegionOptions(max_bytes=counted).max_bytes == 409600
