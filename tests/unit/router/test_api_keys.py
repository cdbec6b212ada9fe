"""API keys: the file, who a key belongs to, and what tenants may do."""

import errno
import os
import tomllib
from pathlib import Path

import pytest
import structlog

from mesh.domain.block_hashes import block_hashes
from mesh.domain.errors import ConfigurationError, InvalidRequest, Overloaded, PermissionDenied, Unauthenticated
from router.admission.limiter import LocalLimiter
from router.tenants import ANONYMOUS, ApiKeys, KeysFile, NoKeys, Priority, Tenant, digest_of, new_key
from tandem_cli.main import main as tandem_command
from tests.defects import Repaired

DIGEST = digest_of("a")
LONG = "a" * 1025


def write(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def test_a_byte_order_mark_is_no_part_of_the_file() -> None:
    keys = ApiKeys.parse(f'{digest_of("plain")} = "bob"'.encode("utf-8-sig"), Path("keys.toml"))
    assert keys.tenant_of((("x-api-key", "plain"),)) == Tenant("bob")


def test_keys_lead_to_tenants(tmp_path: Path) -> None:
    alice, old, ops = new_key(), new_key(), new_key()
    lines = (
        f'{digest_of(alice)} = {{ tenant = "alice", max_concurrent_requests = 2 }}',
        f'{digest_of(old)} = {{ tenant = "alice", max_concurrent_requests = 2 }}',
        f'{digest_of(ops)} = {{ tenant = "ops", operator = true }}',
        f'{digest_of("plain")} = "bob"',
    )
    keys = ApiKeys.load(write(tmp_path, "\n".join(lines)))
    assert keys.tenant_of((("authorization", f"Bearer {alice}"),)) == Tenant("alice", max_concurrent_requests=2)
    assert keys.tenant_of((("authorization", f"bearer  {old}"),)).name == "alice"
    assert keys.tenant_of((("x-api-key", ops),)) == Tenant("ops", operator=True)
    assert keys.tenant_of((("x-api-key", "plain"),)) == Tenant("bob")


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (),
        (("authorization", "Bearer "),),
        (("authorization", "a"),),
        (("authorization", "Basic a"),),
        (("authorization", "Bearer b"),),
        (("authorization", f"Bearer {DIGEST}"),),
        (("x-api-key", "aa"),),
        (("x-api-key-bin", b"a"),),
        (("authorization", "Bearer é\udc80"),),
        (("authorization", f"Bearer {LONG}"),),
    ],
)
def test_everything_else_is_refused(metadata) -> None:
    with pytest.raises(Unauthenticated) as refused:
        ApiKeys({DIGEST: Tenant("alice"), digest_of(LONG): Tenant("bob")}).tenant_of(metadata)
    assert "alice" not in str(refused.value)


def test_every_entry_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time a refusal takes must not tell how far the search came."""
    compared = []
    monkeypatch.setattr("router.tenants.hmac.compare_digest", lambda a, b: compared.append(a) or a == b)
    keys = ApiKeys({digest_of(name): Tenant(name) for name in "abc"})
    assert keys.tenant_of((("x-api-key", "a"),)).name == "a"
    assert len(compared) == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no keys"),
        ("x = [", "cannot read"),
        ("x = " + "[" * 2000, "cannot read"),
        ('abc = "alice"', "64 lower-case hex digits: abc"),
        (f"{DIGEST} = 1", "want"),
        (f"{DIGEST} = {{ operator = true }}", "want"),
        (f'{DIGEST} = {{ tenant = "a", admin = true }}', "want"),
        (f'{DIGEST} = {{ tenant = "a", operator = "no" }}', "operator must be bool"),
        (f'{DIGEST} = {{ tenant = "a", max_concurrent_requests = 0 }}', "must be >= 1"),
        (f'{DIGEST} = {{ tenant = "a", max_concurrent_requests = true }}', "must be int"),
        (f'{DIGEST} = {{ tenant = "a", priority = "urgent" }}', "priority must be one of batch, standard, interactive"),
        (f'{DIGEST} = {{ tenant = "a", priority = 3 }}', "priority must be str"),
        (f'{DIGEST} = {{ tenant = "a", max_priority = "batch" }}', "want"),
        (f'{DIGEST} = "a b"', "a tenant's name"),
        (f'{DIGEST} = "a"\n{digest_of("b")} = {{ tenant = "a", operator = true }}', "differ"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ApiKeys.load(write(tmp_path, text))


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        ApiKeys.load(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot read"):
        ApiKeys.load(tmp_path / "binary")


class Clock:
    """Seconds that tests move on."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def known(keys: KeysFile, *names: str) -> list[str]:
    """Which of these keys let their holder in."""
    found = []
    for name in names:
        try:
            found.append(keys.tenant_of((("x-api-key", name),)).name)
        except Unauthenticated:
            continue
    return found


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    clock, path = Clock(), write(tmp_path, f'{digest_of("a")} = "a"\n{digest_of("b")} = "b"\n')
    keys = KeysFile(path, {digest_of("more"): Tenant("more")}, clock)
    assert known(keys, "a", "b", "c", "more") == ["a", "b", "more"]
    write(tmp_path, f'{digest_of("b")} = {{ tenant = "b", priority = "batch" }}\n{digest_of("c")} = "c"\n')
    assert known(keys, "a", "b", "c", "more") == ["a", "b", "more"]  # looked a moment ago
    clock.now_s = 1.0
    assert known(keys, "a", "b", "c", "more") == ["b", "c", "more"]
    assert keys.tenant_of((("x-api-key", "b"),)).priority is Priority.BATCH
    with pytest.raises(Unauthenticated):
        keys.check((("x-api-key", "a"),))


@pytest.mark.parametrize("text", ["", "x = [", f'{DIGEST} = "two words"', None])
def test_a_broken_file_changes_nothing_and_is_complained_of_once(tmp_path: Path, text: str | None) -> None:
    clock, path = Clock(), write(tmp_path, f'{DIGEST} = "alice"')
    keys = KeysFile(path, clock=clock)
    if text is None:
        path.unlink()
    else:
        write(tmp_path, text)
    with structlog.testing.capture_logs() as logs:
        for second in range(1, 5):
            clock.now_s = second
            assert known(keys, "a") == ["alice"]
    assert [line["log_level"] for line in logs] == ["error"]
    new = tmp_path / "new.toml"
    new.write_text(f'{digest_of("b")} = "bob"')
    os.replace(new, path)
    clock.now_s = 5.0
    assert known(keys, "a", "b") == ["bob"]


def test_a_file_that_cannot_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    clock, path = Clock(), write(tmp_path, f'{DIGEST} = "alice"\n{digest_of("b")} = "bob"')
    keys = KeysFile(path, clock=clock)
    write(tmp_path, f'{digest_of("b")} = "bob"')

    def read(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
        patched.setattr(Path, "open", read)
        for second in range(1, 70):
            clock.now_s = second
            assert known(keys, "a", "b") == ["alice", "bob"]
    assert [line["log_level"] for line in logs] == ["error"] * 2
    clock.now_s = 70.0
    assert known(keys, "a", "b") == ["bob"]
    repaired("D37", "tried again every second; the log says so once a minute")


def test_a_file_that_is_broken_from_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no keys"):
        KeysFile(write(tmp_path, ""))


@pytest.mark.parametrize(
    ("tenant", "requested", "given"),
    [
        (ANONYMOUS, None, Priority.STANDARD),
        (ANONYMOUS, Priority.INTERACTIVE, Priority.INTERACTIVE),
        (Tenant("a"), None, Priority.STANDARD),
        (Tenant("a"), Priority.BATCH, Priority.BATCH),
        (Tenant("a"), Priority.INTERACTIVE, "at most standard for you, got interactive"),
        (Tenant("a", priority=Priority.INTERACTIVE), None, Priority.INTERACTIVE),
        (Tenant("a", priority=Priority.INTERACTIVE), Priority.STANDARD, Priority.STANDARD),
        (Tenant("a", priority=Priority.BATCH), None, Priority.BATCH),
        (Tenant("a", priority=Priority.BATCH), Priority.STANDARD, "at most batch for you, got standard"),
    ],
)
def test_a_tenants_priority_is_its_default_and_its_ceiling(
    tenant: Tenant, requested: Priority | None, given: Priority | str
) -> None:
    if isinstance(given, Priority):
        assert tenant.priority_of(requested) is given
    else:
        with pytest.raises(InvalidRequest, match=given):
            tenant.priority_of(requested)


def test_without_keys_everybody_is_the_operator() -> None:
    NoKeys().tenant_of(None).require_operator()
    with pytest.raises(PermissionDenied, match="operator"):
        Tenant("alice").require_operator()


async def test_a_tenants_cap_leaves_room_for_others() -> None:
    permits, alice = LocalLimiter(4), Tenant("alice", max_concurrent_requests=2)
    held = await permits.acquire(2, alice)
    with pytest.raises(Overloaded, match="2 of your 2"):
        await permits.acquire(1, alice)
    await permits.acquire(2, Tenant("bob"))
    held[0].release()
    held[0].release()
    assert await permits.acquire(1, alice)


def test_prefixes_of_tenants_never_match() -> None:
    namespaces = [tenant.cache_namespace("m") for tenant in (ANONYMOUS, Tenant("a"), Tenant("b"))]
    hashes = [set(block_hashes(range(64), 16, namespace)) for namespace in namespaces]
    assert len(set.union(*hashes)) == sum(map(len, hashes)) == 12


def test_the_command_makes_a_line_for_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rights = ["--operator", "--max-concurrent-requests", "3", "--priority", "batch"]
    assert tandem_command(["keys", "new", "alice", *rights]) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    assert key not in out
    assert len(tomllib.loads(out)) == 1
    tenant = ApiKeys.load(write(tmp_path, out)).tenant_of((("x-api-key", key),))
    assert tenant == Tenant("alice", operator=True, max_concurrent_requests=3, priority=Priority.BATCH)


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x"])
def test_the_command_refuses_bad_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tandem_command(["keys", "new", "--", name]) == 2
    assert "name" in capsys.readouterr().err
