"""Clients that npm installs: libraries, each with a program that asks what its users ask, and coding agents, each with
a task of two turns.

The model calls the agent's tool for commands with `ls`, and tells its story when it has seen the files.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fakes.sdk_router import STORY, Script
from tests.service.gateway.http import running_gateway

Answers = list[tuple[str, bool, str]]
_CONTINUE = """
name: tandem
version: 1.0.0
schema: v1
models:
  - name: tandem
    provider: openai
    model: fake
    apiBase: {url}/v1
    apiKey: x
    capabilities: [tool_use]
"""
_CODEX = """
model = "fake"
model_provider = "tandem"
[model_providers.tandem]
name = "Tandem"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "TANDEM_API_KEY"
"""


@dataclass(frozen=True, slots=True)
class Agent:
    """`configure` writes files for a gateway into the home, which is the agent's folder, too, and returns variables.
    `tool` runs commands; `key` is the argument that has one.
    """

    package: str
    tool: str
    key: str
    command: tuple[str, ...]
    configure: Callable[[str, Path], Mapping[str, str]]


def _configure_codex(url: str, home: Path) -> Mapping[str, str]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(_CODEX.format(url=url))
    return {"TANDEM_API_KEY": "x"}


def _configure_claude(url: str, home: Path) -> Mapping[str, str]:
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "x", "ANTHROPIC_MODEL": "fake", **quiet}


def _configure_opencode(url: str, home: Path) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "x"},
        "models": {"fake": {"limit": {"context": 32768, "output": 4096}}},
    }
    (home / "opencode.json").write_text(json.dumps({"provider": {"tandem": provider}}))
    return {}


def _configure_continue(url: str, home: Path) -> Mapping[str, str]:
    (home / "config.yaml").write_text(_CONTINUE.format(url=url))
    return {"CONTINUE_TELEMETRY_ENABLED": "0"}


def _configure_qwen(url: str, home: Path) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "x", "OPENAI_MODEL": "fake"}


def _configure_copilot(url: str, home: Path) -> Mapping[str, str]:
    return {"COPILOT_OFFLINE": "true", "COPILOT_PROVIDER_BASE_URL": f"{url}/v1", "COPILOT_MODEL": "fake"}


AGENTS: Mapping[str, Agent] = {
    "codex": Agent(
        "@openai/codex",
        "exec_command",
        "cmd",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        _configure_codex,
    ),
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        "Bash",
        "command",
        ("claude", "--allowedTools", "Bash(ls)", "-p"),
        _configure_claude,
    ),
    "opencode": Agent(
        "opencode-ai",
        "bash",
        "command",
        ("opencode", "run", "-m", "tandem/fake"),
        _configure_opencode,
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        "run_shell_command",
        "command",
        ("qwen", "--auth-type", "openai", "--yolo", "-p"),
        _configure_qwen,
    ),
    "continue": Agent(
        "@continuedev/cli",
        "Bash",
        "command",
        ("cn", "--config", "config.yaml", "--auto", "-p"),
        _configure_continue,
    ),
    "copilot": Agent(
        "@github/copilot",
        "bash",
        "command",
        ("copilot", "--allow-all-tools", "-p"),
        _configure_copilot,
    ),
}
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "ai-sdk": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    "langchain-js": ("@langchain/openai", "@langchain/core", "zod"),
    "openai-agents-js": ("@openai/agents", "openai", "zod"),
}
"""Their packages, the library's own first. The program of a library has its name: ask_ai_sdk.mjs."""


async def ask_library(name: str, url: str, calls_url: str) -> tuple[str, Answers]:
    """Return the version and the answers. Raises OSError and SubprocessError if there is no npm, or no package."""
    folder = await asyncio.to_thread(_installed, name, LIBRARIES[name])
    # Modules are looked for beside the program.
    program = shutil.copy(Path(__file__).with_name(f"ask_{name.replace('-', '_')}.mjs"), folder)
    told = await _output_of(["node", program, url, calls_url], folder, {})
    return _version(folder, LIBRARIES[name][0]), json.loads(told)


async def ask_agent(name: str) -> tuple[str, Answers]:
    """As `ask_library`, with a gateway of its own, whose model knows the agent's tool."""
    agent = AGENTS[name]
    folder = await asyncio.to_thread(_installed, name, (agent.package,))
    program, *arguments = agent.command
    call = {"name": agent.tool, "arguments": {agent.key: "ls", "description": "Lists the files"}}
    script = Script(call=json.dumps(call), tool_call_format="hermes", max_total_tokens=1_000_000)
    with TemporaryDirectory(prefix="tandem-agent-", ignore_cleanup_errors=True) as home:
        (Path(home) / "a-file.txt").touch()
        async with running_gateway(script) as gateway:
            environment = {"HOME": home, "PWD": home, **agent.configure(gateway.url, Path(home))}
            command = [str(folder / "node_modules" / ".bin" / program), *arguments, "Look around."]
            printed = await _output_of(command, Path(home), environment)
    seen = [turn.content for request in script.requests for turn in request.chat.messages if turn.role == "tool"]
    is_answered = STORY in printed and any("a-file.txt" in text for text in seen)
    return _version(folder, agent.package), [("a command, then an answer", is_answered, printed.strip()[-200:])]


def _installed(name: str, packages: tuple[str, ...]) -> Path:
    """A folder with the packages, made once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem-tests"
    folder = cache / f"npm-{name}"
    if not all((folder / "node_modules" / package).exists() for package in packages):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    return folder


def _version(folder: Path, package: str) -> str:
    described: dict[str, Any] = json.loads((folder / "node_modules" / package / "package.json").read_text())
    return str(described["version"])


async def _output_of(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(300):
            printed, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return (complaint if process.returncode else printed).decode()
