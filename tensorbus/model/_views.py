"""Views: a selection of an artifact's tensors, and of indices and axes within each, always one step from the base."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Final, Protocol, Self, SupportsIndex, TypeAlias, TypeVar

from blake3 import blake3

from tensorbus.errors import CorruptError, InvalidArgumentError
from tensorbus.ids import VIEW_PREFIX, ArtifactId, prefixed
from tensorbus.model._manifest import Manifest, TensorSpec, load_json

VIEW_VERSION: Final = 1

Span: TypeAlias = tuple[int, int, int]
"""``(start, step, count)``: the indices ``start``, ``start + step``, …; start from 0 on, step from 1 on."""
Dim: TypeAlias = int | Span | None
"""What of one dimension is taken: one index (the dimension goes), a span, or all."""
Index: TypeAlias = SupportsIndex | slice | EllipsisType
Transpose: TypeAlias = Sequence[int] | Sequence[Sequence[int]]


class Indexable(Protocol):
    """What torch and numpy arrays have in common."""

    def __getitem__(self, index: tuple[int | slice | EllipsisType, ...], /) -> Self: ...


ArrayT = TypeVar("ArrayT", bound=Indexable)
T = TypeVar("T")

_FLAGS: Final = frozenset({"bool", "torch.bool"})


@dataclass(frozen=True, slots=True)
class TensorView:
    """What is taken of one tensor, in its only spelling.

    Attributes:
        dims: One entry per dimension of the base's tensor.
        axes: For each dimension of the result, the base's dimension that it is.
    """

    dims: tuple[Dim, ...]
    axes: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether it is the tensor as it is."""
        return all(dim is None for dim in self.dims) and self.axes == tuple(range(len(self.dims)))

    @property
    def perm(self) -> tuple[int, ...]:
        """How the dimensions that indexing leaves are reordered, as ``torch.permute`` takes it."""
        places = {axis: place for place, axis in enumerate(sorted(self.axes))}
        return tuple(places[axis] for axis in self.axes)

    @property
    def index(self) -> tuple[int | slice | EllipsisType, ...]:
        """The index that selects the elements, for torch and numpy alike; :attr:`perm` comes after it."""
        return (*map(_as_index, self.dims), ...)  # the Ellipsis makes numpy give an array, not a scalar, for 0-d

    def shape_of(self, base: tuple[int, ...]) -> tuple[int, ...]:
        """The result's shape over a tensor of shape ``base``."""
        return tuple(_count(self.dims[axis], base[axis]) for axis in self.axes)

    def fits(self, base: tuple[int, ...]) -> bool:
        """Whether every index lies within a tensor of shape ``base``."""
        return len(base) == len(self.dims) and all(_last(dim) < size for dim, size in zip(self.dims, base, strict=True))

    def apply(self, array: ArrayT) -> ArrayT:
        """The selection of a torch tensor or numpy array, sharing its memory."""
        picked = array[self.index]
        if self.perm == tuple(range(len(self.axes))):
            return picked
        permute = getattr(picked, "permute", None) or operator.attrgetter("transpose")(picked)
        result: ArrayT = permute(self.perm)
        return result

    def compose(self, outer: TensorView) -> TensorView:
        """The view ``outer`` of this view, as one view of the base."""
        dims = list(self.dims)
        for axis, dim in zip(self.axes, outer.dims, strict=True):
            dims[axis] = _compose(dims[axis], dim)
        return TensorView(tuple(dims), tuple(self.axes[axis] for axis in outer.axes))


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """A selection of an artifact. Equal selections of the same base are equal, however they were written.

    Attributes:
        names: The selected tensors in the order of their bytes; ``None`` for all.
        tensors: The selected tensors that are not taken whole, in that order, and what of each.
    """

    names: tuple[str, ...] | None
    tensors: tuple[tuple[str, TensorView], ...]

    @staticmethod
    def build(
        base: Manifest,
        names: Iterable[str] | None = None,
        slices: Mapping[str, Index | tuple[Index, ...]] | None = None,
        transpose: Mapping[str, Transpose] | None = None,
    ) -> ViewSpec:
        """The selection that the caller asks for.

        Args:
            base: The artifact's manifest, or a view's for a view of it.
            names: The tensors to take; all when ``None``. Repeats and order do not matter.
            slices: Per tensor an index or a tuple of them as torch takes it: whole numbers (the dimension goes), slices
                with a step of at least 1, at most one Ellipsis.
            transpose: Per tensor what becomes of the dimensions that ``slices`` leaves: a permutation of them all, as
                ``torch.permute`` takes it, or pairs to swap one after the other, as ``((0, 1),)``.

        Raises:
            NotFoundError: If the base has no tensor of a name.
            InvalidArgumentError: If an index or permutation does not fit, or names a tensor that is not taken.
        """
        chosen = base.names if names is None else tuple(sorted({base.find(name).name for name in _names(names)}))
        if not chosen:
            raise InvalidArgumentError("a view has at least one tensor; names is empty")
        slices, transpose = _by_name(slices, "slices"), _by_name(transpose, "transpose")
        touched = sorted(base.find(name).name for name in {**slices, **transpose})
        if left_out := set(touched).difference(chosen):
            raise InvalidArgumentError(f"tensor {min(left_out)[:80]!r} is sliced or transposed but not among names")
        views = [(name, _view_of(base.find(name), slices.get(name, ()), transpose.get(name))) for name in touched]
        return ViewSpec(
            None if len(chosen) == len(base) else chosen,
            tuple((name, view) for name, view in views if not view.whole),
        )

    @property
    def whole(self) -> bool:
        """Whether it is all of the base as it is."""
        return self.names is None and not self.tensors

    def of(self, name: str) -> TensorView | None:
        """What is taken of that tensor; ``None`` if all of it. The name must be a selected one."""
        return dict(self.tensors).get(name)

    def manifest_of(self, base: Manifest) -> Manifest:
        """The view's tensors. Those taken whole keep their digest, the others have none.

        Raises:
            NotFoundError: If the base lacks a tensor.
            InvalidArgumentError: If an index does not fit the base.
        """
        views = dict(self.tensors)
        chosen = base.tensors if self.names is None else tuple(base.find(name) for name in self.names)
        if not views.keys() <= {spec.name for spec in chosen}:
            raise InvalidArgumentError("the view takes a part of a tensor that is not among its names")
        return Manifest(tuple(_viewed(spec, views.get(spec.name)) for spec in chosen))

    def compose(self, outer: ViewSpec) -> ViewSpec:
        """The view ``outer``, built on this view's manifest, as one view of this view's base."""
        names = self.names if outer.names is None else outer.names
        views = dict(self.tensors)
        for name, view in outer.tensors:
            views[name] = views[name].compose(view) if name in views else view
        kept = views if names is None else views.keys() & set(names)
        parts = ((name, views[name]) for name in sorted(kept))
        return ViewSpec(names, tuple((name, view) for name, view in parts if not view.whole))

    def to_json(self) -> str:
        """The definition: canonical JSON, see ``docs/spec/ids.md``."""
        tensors = {name: {"dims": view.dims, "axes": view.axes} for name, view in self.tensors}
        body = {"v": VIEW_VERSION, "names": self.names, "tensors": tensors}
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_json(data: str | bytes) -> ViewSpec:
        """What :meth:`to_json` wrote.

        Raises:
            CorruptError: If it is anything else, also another spelling of it.
        """
        body = load_json(data, what="view definition")
        try:
            spec = _spec_of_body(body)
            text = spec.to_json()
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptError(f"the view definition is not valid: {str(body)[:200]}") from exc
        if text != (data if isinstance(data, str) else data.decode("utf-8", "replace")):
            raise CorruptError(f"the view definition is not canonical: {str(body)[:200]}")
        return spec


def view_id(base: str, spec: ViewSpec) -> ArtifactId:
    """The id of the view: ``tbv:`` and a digest of base and definition; the base's own id if the view is all of it."""
    if spec.whole:
        return ArtifactId(base)
    return ArtifactId(VIEW_PREFIX + blake3(prefixed(base, spec.to_json())).hexdigest())


def _names(names: object) -> list[str]:
    if isinstance(names, str):
        raise InvalidArgumentError(f"names must be several names, not the one str {names[:80]!r}")
    if not isinstance(names, Iterable):
        raise InvalidArgumentError(f"names must be several names, not {names!r:.80}")
    found = []
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"a tensor's name is a str; names has {name!r:.80}")
        found.append(name)
    return found


def _by_name(parts: Mapping[str, T] | None, what: str) -> Mapping[str, T]:
    if parts is None:
        return {}
    given: object = parts  # of a caller without a type checker
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidArgumentError(f"{what} must be a dict by tensor name, not {parts!r:.80}")
    return parts


def _viewed(spec: TensorSpec, view: TensorView | None) -> TensorSpec:
    if view is None:
        return spec
    if not view.fits(spec.shape):
        raise InvalidArgumentError(f"the view does not fit tensor {spec.name[:80]!r} of shape {spec.shape}")
    return TensorSpec(spec.name, spec.dtype, view.shape_of(spec.shape))


def _as_index(dim: Dim) -> int | slice:
    match dim:
        case None:
            return slice(None)
        case int():
            return dim
        case (start, step, count):
            return slice(start, start + (count - 1) * step + 1 if count else start, step)


def _count(dim: Dim, size: int) -> int:
    return size if dim is None else dim[2] if isinstance(dim, tuple) else 1


def _last(dim: Dim) -> int:
    """The largest index that is taken, -1 for none."""
    match dim:
        case None:
            return -1
        case int():
            return dim
        case (start, step, count):
            return start + (count - 1) * step if count else -1


def _span(start: int, step: int, count: int) -> Span:
    return (start, step, count) if count > 1 else (start, 1, 1) if count else (0, 1, 0)


def _compose(inner: Dim, outer: Dim) -> Dim:
    if not isinstance(inner, tuple) or outer is None:
        return inner if outer is None else outer  # an outer dimension never lies over a dropped one
    start, step, _ = inner
    if isinstance(outer, int):
        return start + outer * step
    return _span(start + outer[0] * step, step * outer[1], outer[2])


def _view_of(spec: TensorSpec, index: object, transpose: Transpose | None) -> TensorView:
    what = f"tensor {spec.name[:80]!r} of shape {spec.shape}"
    items = _spread(index if isinstance(index, tuple) else (index,), len(spec.shape), what)
    dims = tuple(_dim(item, size, what) for item, size in zip(items, spec.shape, strict=True))
    left = tuple(axis for axis, dim in enumerate(dims) if not isinstance(dim, int))
    perm = range(len(left)) if transpose is None else _permutation(transpose, len(left), what)
    return TensorView(dims, tuple(left[place] for place in perm))


def _spread(items: tuple[object, ...], ndim: int, what: str) -> tuple[object, ...]:
    """The items, one per dimension: an Ellipsis, or the end, stands for as many whole dimensions as are left."""
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    missing = ndim - (len(items) - len(dots))
    if len(dots) > 1 or missing < 0:
        raise InvalidArgumentError(f"{what}: {items!r:.200} has too many indices or more than one Ellipsis")
    place = dots[0] if dots else len(items)
    return (*items[:place], *(slice(None),) * missing, *items[place + 1 :])


def _dim(item: object, size: int, what: str) -> Dim:
    if isinstance(item, slice):
        return _dim_of_slice(item, size, what)
    number = _whole(item, what)
    if not -size <= number < size:
        raise InvalidArgumentError(f"{what}: index {number} is outside a dimension of {size}")
    return number % size


def _dim_of_slice(item: slice, size: int, what: str) -> Dim:
    bounds = [None if bound is None else _whole(bound, what) for bound in (item.start, item.stop, item.step)]
    step = bounds[2]
    if step == 0:
        raise InvalidArgumentError(f"{what}: the step of {item!r:.80} is 0; it must be 1 or more")
    if step is not None and step < 0:
        raise InvalidArgumentError(f"{what}: the step of {item!r:.80} must be 1 or more; flip a copy instead")
    taken = range(*slice(*bounds).indices(size))
    if len(taken) == size:
        return None
    return _span(taken.start, taken.step, len(taken))


def _whole(item: object, what: str) -> int:
    # A flag counts as 0 or 1 to operator.index, and selects with a mask to torch and numpy: it means neither here.
    if isinstance(item, bool) or str(getattr(item, "dtype", "")) in _FLAGS or not isinstance(item, SupportsIndex):
        raise InvalidArgumentError(
            f"{what}: {item!r:.80} is not an index of a view; there are whole numbers, slices and Ellipsis"
        )
    try:
        return operator.index(item)
    except TypeError as exc:
        raise InvalidArgumentError(f"{what}: {item!r:.80} is not a whole number: {exc}") from exc


def _permutation(transpose: object, ndim: int, what: str) -> list[int]:
    """The order of the dimensions that a permutation or a list of swaps asks for."""
    if not isinstance(transpose, Iterable) or isinstance(transpose, str | Mapping):
        raise InvalidArgumentError(
            f"{what}: {transpose!r:.80} is no transposition; give a permutation such as (1, 0), or pairs to swap"
        )
    items = list(transpose)
    if items and all(isinstance(item, Sequence) for item in items):
        order = list(range(ndim))
        for pair in items:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise InvalidArgumentError(f"{what}: {pair!r:.80} is not a pair of dimensions to swap")
            one, other = (_axis(axis, ndim, what) for axis in pair)
            order[one], order[other] = order[other], order[one]
        return order
    order = [_axis(axis, ndim, what) for axis in items]
    if sorted(order) != list(range(ndim)):
        raise InvalidArgumentError(
            f"{what}: {transpose!r:.80} does not name each of the {ndim} dimensions once; to swap two write ((a, b),)"
        )
    return order


def _axis(axis: object, ndim: int, what: str) -> int:
    number = _whole(axis, what)
    if not -ndim <= number < ndim:
        raise InvalidArgumentError(f"{what}: there is no dimension {number} among {ndim}")
    return number % ndim


def _spec_of_body(body: object) -> ViewSpec:
    """The view that a JSON value means. What is not of the form raises ValueError, TypeError or KeyError."""
    if not isinstance(body, dict) or body["v"] != VIEW_VERSION or not isinstance(body["tensors"], dict):
        raise ValueError("not a view definition")
    names = body["names"]
    if names is not None and (not names or sorted(set(map(_text, names))) != names):
        raise ValueError("names")
    tensors = body["tensors"]
    if sorted(tensors) != list(tensors):
        raise ValueError("order")
    views = tuple((name, _tensor_of_body(part)) for name, part in tensors.items())
    if any(view.whole for _, view in views) or (names is not None and not tensors.keys() <= set(names)):
        raise ValueError("tensors")
    return ViewSpec(None if names is None else tuple(names), views)


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError("name")
    return name


def _tensor_of_body(part: dict[str, list[object]]) -> TensorView:
    dims = tuple(map(_dim_of_body, part["dims"]))
    axes = tuple(operator.index(axis) for axis in part["axes"])  # type: ignore[arg-type]  # a TypeError is the check
    if sorted(axes) != [axis for axis, dim in enumerate(dims) if not isinstance(dim, int)]:
        raise ValueError("axes")
    return TensorView(dims, axes)


def _dim_of_body(dim: object) -> Dim:
    if dim is None or (type(dim) is int and dim >= 0):
        return dim
    if not isinstance(dim, list) or not all(type(number) is int for number in dim):
        raise TypeError("dim")
    start, step, count = dim
    if start < 0 or step < 1 or count < 0 or _span(start, step, count) != (start, step, count):
        raise ValueError("dim")
    return (start, step, count)
