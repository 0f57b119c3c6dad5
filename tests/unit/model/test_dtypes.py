"""The table of element types against torch, numpy and safetensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorbus.errors import InvalidArgumentError
from tensorbus.model import DTYPES, REFUSED, dtype

TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("theirs", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_is_known_or_refused_with_a_reason(theirs: torch.dtype) -> None:
    name = str(theirs).removeprefix("torch.")
    if name in REFUSED:
        with pytest.raises(InvalidArgumentError, match=f"{name} is not taken: .+"):
            dtype(theirs)
    else:
        assert getattr(torch, dtype(theirs).torch) is theirs
        assert dtype(theirs).itemsize == theirs.itemsize


@pytest.mark.parametrize("known", DTYPES, ids=str)
def test_each_spelling_names_the_same_type(known: object) -> None:
    assert isinstance(known, type(DTYPES[0]))
    spellings = (known, known.name, known.torch, f"torch.{known.torch}", known.numpy, known.safetensors, *known.aliases)
    assert {dtype(text) for text in spellings if text is not None} == {known}
    if known.numpy is not None:
        assert np.dtype(known.numpy).itemsize == known.itemsize
        assert dtype(np.dtype(known.numpy)) is known
        assert dtype(np.dtype(known.numpy).type) is known


def test_no_spelling_is_taken_twice() -> None:
    spellings = [s for k in DTYPES for s in {k.name, k.torch, k.numpy, k.safetensors, *k.aliases} if s is not None]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("text", ["float", float, int, "f128", "object", ">f4", None, ""])
def test_an_unknown_type_is_an_error_that_lists_the_known(text: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"there are f64, f32, .*c128"):
        dtype(text)
