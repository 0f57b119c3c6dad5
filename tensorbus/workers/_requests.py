"""What callers may ask, as strict models: one per operation of ``docs/spec/control.md``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tensorbus.errors import InvalidArgumentError
from tensorbus.ids import check_name

PROTOCOL = 1
LIST_LIMIT_MAX = 1000


class Ask(BaseModel):
    """Base of all: strict types, unknown arguments ignored so that newer callers can talk to older workers."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


A = TypeVar("A", bound=Ask)

Position = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=0, lt=2**48)]
Key = Annotated[str, AfterValidator(lambda text: check_name(text, what="key"))]
GivenId = Annotated[str, AfterValidator(lambda text: check_name(text, what="id"))]
SeriesName = Annotated[str, AfterValidator(lambda text: check_name(text, what="series name"))]
Ref = Annotated[str, Field(min_length=1, max_length=4096)]
LeaseSeconds = Annotated[float, Field(strict=False, gt=0, le=86_400 * 365, allow_inf_nan=False)]


class Hello(Ask):
    protocol: int
    tenant: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    pid: int = 0
    version: str = ""


class Resolve(Ask):
    ref: Ref
    by: Literal["any", "id", "key"] = "any"
    at_least: Position | None = None
    follow: bool = False


class Unfollow(Ask):
    refs: list[Annotated[tuple[str, str], Field(strict=False)]]


class OneArtifact(Ask):
    artifact: Ref


class Complain(Ask):
    artifact: Ref
    workers: Annotated[list[str], Field(min_length=1, max_length=64)]


class List(Ask):
    prefix: str = ""
    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=LIST_LIMIT_MAX)] = LIST_LIMIT_MAX
    at_least: Position | None = None


class Bind(Ask):
    key: Key
    artifact: Ref
    rebind: bool = False


class Unbind(Ask):
    key: Key


class DefineView(Ask):
    artifact: Ref
    view: Ref
    definition: str


class Publish(Ask):
    name: SeriesName
    artifact: Ref


class Version(Ask):
    name: SeriesName
    number: int | None = None
    at_least: Position | None = None


class SeriesAfter(Ask):
    name: SeriesName
    after: int = Field(0, ge=0)
    follow: bool = False
    at_least: Position | None = None


class AtLeast(Ask):
    at_least: Position | None = None


class EventsOpen(Ask):
    after: Position = 0
    artifact: str | None = None
    follow: bool = False


class EventsNext(Ask):
    cursor: int
    wait_s: float = Field(0.0, strict=False, ge=0, le=60)
    limit: int = Field(500, ge=1, le=500)


class EventsClose(Ask):
    cursor: int


class Place(Ask):
    nbytes: Size


class Alloc(Ask):
    nbytes: Size
    purpose: Literal["put", "empty"] = "put"
    fresh: bool = False


class SegmentAsk(Ask):
    segment: int
    generation: int


class Birth(Ask):
    """What ``commit`` and ``register`` share."""

    layout: dict[str, Any]
    id: GivenId | None = None
    key: Key | None = None
    rebind: bool = False


Disk = Literal["must", "should", "may"]


class Commit(Birth):
    segment: int
    generation: int
    disk: Disk = "may"
    digest: Literal["now", "later"] = "now"


class Register(Birth):
    parts: list[Annotated[tuple[int, int], Field(strict=False)]] = Field(min_length=1, max_length=64)
    lease_s: LeaseSeconds
    sealed: bool = False


class Renew(Ask):
    leases: list[str] = Field(max_length=10_000)


class Release(Ask):
    lease: str


class Pin(Ask):
    artifact: Ref
    ttl_s: LeaseSeconds | None = None


class Open(Ask):
    artifact: Ref
    at_least: Position | None = None


class BulkCommit(Birth):
    disk: Disk = "may"
    manifest: str


def parse(model: type[A], args: dict[str, object], *, op: str) -> A:
    """The arguments of a call.

    Raises:
        InvalidArgumentError: If they do not fit; names the argument.
    """
    try:
        return model.model_validate(args)
    except ValidationError as exc:
        first = exc.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InvalidArgumentError):
            raise cause from exc
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidArgumentError(f"{op}: {where}: {first['msg']}", op=op, argument=where) from exc
