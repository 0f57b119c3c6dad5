"""The vocabulary: element types, manifests, layouts, views. No I/O."""

from tensorbus.model._dtypes import DTYPES, REFUSED, DType, dtype, is_dtype_name, itemsize
from tensorbus.model._layout import ALIGN, Layout, plan_layout
from tensorbus.model._manifest import EMPTY_DIGEST, Manifest, TensorSpec
from tensorbus.model._views import TensorView, ViewSpec, view_id

__all__ = [
    "ALIGN",
    "DTYPES",
    "EMPTY_DIGEST",
    "REFUSED",
    "DType",
    "Layout",
    "Manifest",
    "TensorSpec",
    "TensorView",
    "ViewSpec",
    "dtype",
    "is_dtype_name",
    "itemsize",
    "plan_layout",
    "view_id",
]
