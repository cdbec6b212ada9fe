"""Request bodies: JSON to checked values, with messages a person can act on."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tandem import InvalidRequest

M = TypeVar("M", bound=BaseModel)

_MAX_SHOWN = 3


class Body(BaseModel):
    """Members nobody knows are left alone: clients of newer servers send them. Null is the same as nothing."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def parse(schema: type[M], body: bytes) -> M:
    """JSON to a checked value. Raises InvalidRequest that names the members at fault."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(_explain(error)) from None


def check(schema: type[M], payload: dict[str, Any]) -> M:
    """The same for JSON that has been read already."""
    try:
        return schema.model_validate(payload)
    except ValidationError as error:
        raise InvalidRequest(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    """What is wrong, without the input: that may be long, or secret."""
    found: dict[str, str] = {}
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        path = ".".join(map(str, each["loc"]))
        found.setdefault(path, f"{path}: {each['msg']}" if path else str(each["msg"]))
    return "; ".join(list(found.values())[:_MAX_SHOWN])
