"""The vocabulary: element types, manifests, layouts. No I/O."""

from tensorbus.model._dtypes import DTYPES, REFUSED, DType, dtype, is_dtype_name, itemsize
from tensorbus.model._layout import ALIGN, Layout, plan_layout
from tensorbus.model._manifest import EMPTY_DIGEST, Manifest, TensorSpec

__all__ = [
    "ALIGN",
    "DTYPES",
    "EMPTY_DIGEST",
    "REFUSED",
    "DType",
    "Layout",
    "Manifest",
    "TensorSpec",
    "dtype",
    "is_dtype_name",
    "itemsize",
    "plan_layout",
]
