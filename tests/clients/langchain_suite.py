"""LangChain's own tests of chat models (langchain-tests), run by `python -m tests.clients.suites` against a mesh."""

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestTandem(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": os.environ["TANDEM_MODEL"],
            "base_url": f"{os.environ['TANDEM_URL']}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 64,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True


_OF_THE_MODEL = {
    "calls another function than it should, or none": (
        *("test_tool_calling", "test_tool_calling_async", "test_agent_loop", "test_unicode_tool_call_integration"),
    ),
    "does not end a text within JSON": (
        *("test_structured_output", "test_structured_output_async", "test_structured_output_pydantic_2_v1"),
        *("test_structured_output_optional_param", "test_json_mode"),
    ),
}
"""Tests that need a better model than the bundled one, by what that does. A better one passes them."""

for _reason, _names in _OF_THE_MODEL.items():
    for _name in _names:
        setattr(TestTandem, _name, pytest.mark.xfail(reason=f"the model {_reason}")(getattr(TestTandem, _name)))
