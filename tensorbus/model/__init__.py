"""The vocabulary: element types, manifests, layouts, views. No I/O."""

from tensorbus.model._dtypes import DTYPES, REFUSED, DType, dtype, is_dtype_name, itemsize
from tensorbus.model._keyspace import Keyspace
from tensorbus.model._layout import ALIGN, Layout, plan_layout
from tensorbus.model._manifest import EMPTY_DIGEST, Manifest, TensorSpec
from tensorbus.model._page_keys import KEY_BYTES, KeyChain, Keys, page_keys, request_key, shard_of
from tensorbus.model._page_states import PageOutcome, PageState
from tensorbus.model._views import TensorView, ViewSpec, view_id

__all__ = [
    "ALIGN",
    "DTYPES",
    "EMPTY_DIGEST",
    "KEY_BYTES",
    "REFUSED",
    "DType",
    "KeyChain",
    "Keys",
    "Keyspace",
    "Layout",
    "Manifest",
    "PageOutcome",
    "PageState",
    "TensorSpec",
    "TensorView",
    "ViewSpec",
    "dtype",
    "is_dtype_name",
    "itemsize",
    "page_keys",
    "plan_layout",
    "request_key",
    "shard_of",
    "view_id",
]
