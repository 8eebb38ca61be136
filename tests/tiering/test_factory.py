"""From an entry of `secondary_tiers` to a tier, and everything that can be wrong with the entry."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import (
    Locality,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
)
from kvtier.config import TIER_KEYS, ConfigError, Problem, TierConfig, TierOptions
from kvtier.config.fields import TEXT, key, whole_number
from kvtier.tiering.base import JobResult, SecondaryTierManager, TierRefused, TransferJob
from kvtier.tiering.example.manager import ExampleSecondaryTierManager
from kvtier.tiering.factory import PlannedTier, SecondaryTierFactory, TierStartError
from tests.config.sample import make_config, options_of
from tests.installed import install, write_module

HIDDEN = "hunter2"
HERE = __name__


class SpecOfThisTest(OffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_worker(self, kv_caches: object) -> OffloadingWorker:
        raise NotImplementedError


class Tier(SecondaryTierManager):
    """Does nothing, which is enough to start it."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        raise NotImplementedError

    def submit_load(self, job: TransferJob) -> None:
        raise NotImplementedError

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return ()

    def drain_jobs(self) -> None:
        return


class Shelf(Tier):
    """Has keys of its own, and refuses some of their values."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        *,
        boards: int = 3,
        password: str | None = None,
        raises: Exception | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = Locality.LOCAL
        self.path = path
        self.boards = boards
        if raises is not None:
            raise raises
        if boards > 9:
            raise ValueError(f"boards={boards} do not fit on {path!r}: write 9 or less.")


class TakesAnything(Tier):
    def __init__(self, **keys: Any) -> None:
        given = ("offloading_spec", "primary_kv_view", "tier_type")
        super().__init__(**{name: keys.pop(name) for name in given})
        self.keys = keys


class ReadsSharedKeys(Tier):
    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        enable_kv_events: bool,
        load_timeout_ms: float = 7,
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.seen = (enable_kv_events, load_timeout_ms, locality)


@dataclass(frozen=True, slots=True)
class DeclaredOptions(TierOptions):
    path: str = key(TEXT, "A place.", example='"/shelf"')
    boards: int = key(whole_number(1), "A number.", default=3, null_is_default=True)
    color: str = key(TEXT, "Another text.", default="red")

    not_here: ClassVar[Mapping[str, str]] = {"directory": 'Here it is "path"'}

    def require_consistent(self) -> None:
        if self.boards > 9:
            remedy = "Write 9 or less"
            raise ConfigError(Problem("boards", self.as_given("boards"), "9 or less", remedy))


class Declared(Tier):
    """Declares its keys, and takes one more by name."""

    options_cls = DeclaredOptions

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        extra: int = 0,
        **keys: Any,
    ) -> None:
        self.options = DeclaredOptions.parse(keys)
        self.extra = extra
        super().__init__(offloading_spec, primary_kv_view, tier_type)


class TakesOtherKeys(Declared):
    """Has parameters in place of the keys that its base declares."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        depth: int = 1,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, path="/")


class FromOldTimes(Tier):
    def __init__(self, vllm_config: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        raise NotImplementedError


class HalfMovedOn(Tier):
    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        vllm_config: Any,
        primary_kv_view: memoryview,
        tier_type: str,
    ) -> None:
        raise NotImplementedError


class NeedsNeither(Tier):
    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        vllm_config: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)


class Lonely(Tier):
    """Does not call its base class's constructor, but closes what it opened."""

    closed: ClassVar[list[str]] = []

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        self.view = primary_kv_view[:]

    def shutdown(self) -> None:
        self.closed.append("shut down")


class OnADisk(Tier):
    medium = "disk"  # type: ignore[assignment]


class Somewhere(Tier):
    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, tier_type: str
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.locality = "LOCAL"  # type: ignore[assignment]


class OwnWords(Tier):
    def __init__(self, spec: OffloadingSpec, view: memoryview, tier_type: str) -> None:
        raise NotImplementedError


@pytest.fixture
def spec() -> OffloadingSpec:
    return SpecOfThisTest(make_config({"engine_config": {"rack": 7}}))


def new_view() -> memoryview:
    return np.zeros((4, 64), np.uint8).data


def make(
    spec: OffloadingSpec, entry: dict[str, Any], view: memoryview | None = None
) -> SecondaryTierManager:
    """The tier of an entry that stands second in the user's list."""
    tiers = options_of({"secondary_tiers": [{"type": "example"}, entry]}).secondary_tiers
    return SecondaryTierFactory.create_secondary_tier(tiers[1], view or new_view(), spec)


def shelf(**keys: Any) -> dict[str, Any]:
    return {"type": "Shelf", "module_path": HERE} | keys


def declared(**keys: Any) -> dict[str, Any]:
    return {"type": "Declared", "module_path": HERE} | keys


def planned(entry: dict[str, Any]) -> PlannedTier:
    (tier,) = SecondaryTierFactory.plan_secondary_tiers([TierConfig.from_entry(entry, 1)])
    return tier


def refusal_of(spec: OffloadingSpec, entry: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        make(spec, entry)
    return refused.value


# ---------------------------------------------------------------------------------------------
# What is made
# ---------------------------------------------------------------------------------------------


def test_a_tier_gets_the_spec_the_view_its_type_and_its_own_keys(spec: OffloadingSpec) -> None:
    view = new_view()
    tier = make(spec, shelf(path="/shelf", boards=5, load_timeout_ms=5), view)
    assert isinstance(tier, Shelf)
    assert tier.offloading_spec is spec
    assert tier.offloading_spec.config.engine_config == {"rack": 7}
    assert tier.tier_type == "Shelf"
    assert (tier.path, tier.boards) == ("/shelf", 5)
    tier.rows[2][:] = b"x" * 64
    assert bytes(view.cast("B")[128:192]) == b"x" * 64


def test_the_example_tier_is_built_in(spec: OffloadingSpec) -> None:
    tier = make(spec, {"type": "example", "max_blocks": 5})
    assert isinstance(tier, ExampleSecondaryTierManager)
    assert tier.max_blocks == 5
    tier.shutdown()


def test_an_installed_tier_is_found(
    spec: OffloadingSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_module(tmp_path, "my_installed_tiers", f"from {HERE} import Shelf")
    install(tmp_path, "my-tiers", "kvtier.tiers", {"my-shelf": "my_installed_tiers:Shelf"})
    tier = make(spec, {"type": "my-shelf", "path": "/shelf"})
    assert isinstance(tier, Shelf)
    assert tier.tier_type == "my-shelf"


def test_a_registered_tier_is_found(spec: OffloadingSpec) -> None:
    SecondaryTierFactory.register_secondary_tier("test_factory", HERE, "Shelf")
    SecondaryTierFactory.register_secondary_tier("test_factory", HERE, "Shelf")  # once more
    assert isinstance(make(spec, {"type": "test_factory", "path": "/shelf"}), Shelf)
    with pytest.raises(ValueError, match="tier 'test_factory' is already registered"):
        SecondaryTierFactory.register_secondary_tier("test_factory", HERE, "TakesAnything")


def test_an_entry_as_the_user_writes_it_is_parsed(spec: OffloadingSpec) -> None:
    entry = {"type": "example", "max_blocks": 5, "locality": "REMOTE"}
    tier = SecondaryTierFactory.create_secondary_tier(entry, new_view(), spec)
    assert isinstance(tier, ExampleSecondaryTierManager)
    assert (tier.max_blocks, tier.locality) == (5, Locality.REMOTE)
    tier.shutdown()
    with pytest.raises(ConfigError, match=r"^secondary_tiers\[0\]\.type: got nothing"):
        SecondaryTierFactory.create_secondary_tier({}, new_view(), spec)


def test_the_locality_is_the_users_where_there_is_one(spec: OffloadingSpec) -> None:
    assert make(spec, shelf(path="/shelf")).locality is Locality.LOCAL
    assert make(spec, shelf(path="/shelf", locality="REMOTE")).locality is Locality.REMOTE


def test_a_constructor_may_take_anything(spec: OffloadingSpec) -> None:
    tier = make(spec, {"type": "TakesAnything", "module_path": HERE, "a": 1, "b": None})
    assert isinstance(tier, TakesAnything)
    assert tier.keys == {"a": 1, "b": None}


def test_a_key_of_every_tier_goes_to_the_tier_that_asks_for_it(spec: OffloadingSpec) -> None:
    """As in vLLM, whose tiers take some of them."""
    entry = {"type": "ReadsSharedKeys", "module_path": HERE}
    tier = make(spec, entry)
    assert isinstance(tier, ReadsSharedKeys)
    assert tier.seen == (False, 7, None)
    tier = make(spec, entry | {"enable_kv_events": True, "locality": "LOCAL", "load_timeout_ms": 5})
    assert isinstance(tier, ReadsSharedKeys)
    assert tier.seen == (True, 5, "LOCAL")
    assert tier.locality is Locality.LOCAL


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


def test_an_unknown_type(spec: OffloadingSpec) -> None:
    message = str(refusal_of(spec, {"type": "exampel"}))
    assert message.startswith('secondary_tiers[1].type: got "exampel"; allowed: a known tier (')
    assert "secondary_tiers[1].module_path" in message
    assert message.endswith('Did you mean "example"?')


@pytest.mark.parametrize("name", ["FromOldTimes", "HalfMovedOn"])
def test_a_tier_that_wants_vllms_configuration(spec: OffloadingSpec, name: str) -> None:
    assert str(refusal_of(spec, {"type": name, "module_path": HERE})) == (
        f'secondary_tiers[1].type: got "{name}" ({HERE}.{name}); allowed: a tier whose '
        "constructor takes offloading_spec; this one takes vllm_config. Take offloading_spec "
        "instead; what the engine wants to pass on is in offloading_spec.config.engine_config, "
        "and vLLM's own configuration is offloading_spec.engine."
    )


def test_a_tier_that_can_do_without_vllms_configuration(spec: OffloadingSpec) -> None:
    assert isinstance(make(spec, {"type": "NeedsNeither", "module_path": HERE}), NeedsNeither)


def test_a_constructor_that_cannot_be_called(spec: OffloadingSpec) -> None:
    assert str(refusal_of(spec, {"type": "OwnWords", "module_path": HERE})) == (
        f'secondary_tiers[1].type: got "OwnWords" ({HERE}.OwnWords); allowed: a tier whose '
        "constructor takes offloading_spec, primary_kv_view, tier_type by name. "
        "Let OwnWords take offloading_spec and primary_kv_view."
    )


def test_a_key_that_the_tier_does_not_know(spec: OffloadingSpec) -> None:
    (problem,) = refusal_of(spec, shelf(path="/shelf", board=5)).problems
    assert (problem.key, problem.given) == ("secondary_tiers[1].board", "5")
    known = problem.allowed.removeprefix("only the keys ").split(", ")
    assert set(known) == {"path", "boards", "password", "raises", *TIER_KEYS}
    assert problem.remedy == 'Did you mean "boards"?'
    (problem,) = refusal_of(spec, shelf(path="/shelf", quux=5)).problems
    assert problem.remedy == 'Remove it; the tier "Shelf" has no such key'


def test_declared_keys_are_parsed_by_their_declaration(spec: OffloadingSpec) -> None:
    entry = declared(path="/shelf", boards=None, extra=4)
    tier = make(spec, entry)
    assert isinstance(tier, Declared)
    assert (tier.options, tier.extra) == (DeclaredOptions("/shelf", 3, "red"), 4)
    assert planned(entry).parse_options() == tier.options


def test_declared_keys_that_are_unknown_missing_or_misplaced(spec: OffloadingSpec) -> None:
    refused = refusal_of(spec, declared(board=1, directory="/x"))
    remedies = {problem.key.rpartition(".")[2]: problem.remedy for problem in refused.problems}
    assert remedies == {
        "path": 'The tier "Declared" needs this key: add it, such as "path": "/shelf"',
        "board": 'Did you mean "boards"?',
        "directory": 'Here it is "path"',
    }


@pytest.mark.parametrize(
    ("keys", "problems"),
    [
        ({"path": 3, "boards": 0, "color": None}, ["path", "boards", "color"]),
        ({"path": "/", "boards": 10}, ["boards"]),
    ],
)
def test_all_values_of_declared_keys_are_checked_before_and_at_the_start(
    spec: OffloadingSpec, keys: dict[str, Any], problems: list[str]
) -> None:
    refused = refusal_of(spec, declared(**keys))
    assert [problem.key for problem in refused.problems] == [
        f"secondary_tiers[1].{key}" for key in problems
    ]
    with pytest.raises(ConfigError) as early:
        planned(declared(**keys)).parse_options()
    assert early.value.problems == refused.problems


def test_a_subclass_with_its_own_parameters_does_not_take_declared_keys(
    spec: OffloadingSpec,
) -> None:
    entry = {"type": "TakesOtherKeys", "module_path": HERE, "depth": 2}
    assert isinstance(make(spec, entry), TakesOtherKeys)
    assert planned(entry).parse_options() is None
    (problem,) = refusal_of(spec, entry | {"boards": 5}).problems
    assert problem.key == "secondary_tiers[1].boards"


def test_a_tier_with_plain_parameters_declares_nothing() -> None:
    assert planned(shelf(path="/shelf")).parse_options() is None


def test_a_misspelled_key_of_every_tier(spec: OffloadingSpec) -> None:
    (problem,) = refusal_of(spec, shelf(path="/shelf", load_timeout=5)).problems
    assert problem.remedy == 'Did you mean "load_timeout_ms"?'


@pytest.mark.parametrize("key", ["offloading_spec", "primary_kv_view", "tier_type"])
@pytest.mark.parametrize("entry", [shelf(path="/x"), shelf(type="TakesAnything")])
def test_a_key_that_only_kvtier_gives(
    spec: OffloadingSpec, key: str, entry: dict[str, Any]
) -> None:
    (problem,) = refusal_of(spec, entry | {key: 1}).problems
    assert problem.key == f"secondary_tiers[1].{key}"


def test_a_number_as_key(spec: OffloadingSpec) -> None:
    entry: dict[Any, Any] = {"type": "TakesAnything", "module_path": HERE, 7: 1}
    (problem,) = refusal_of(spec, entry).problems
    assert problem.key == "secondary_tiers[1].7"


def test_a_key_that_is_missing(spec: OffloadingSpec) -> None:
    assert str(refusal_of(spec, shelf())) == (
        "secondary_tiers[1].path: got nothing; allowed: a value. "
        'The tier "Shelf" needs this key: add it.'
    )
    missing, unknown = refusal_of(spec, shelf(paht="/shelf")).problems
    assert (missing.key, missing.remedy) == (
        "secondary_tiers[1].path",
        'Is "paht" a misspelling of it?',
    )
    assert unknown.key == "secondary_tiers[1].paht"


def test_a_value_that_the_tier_refuses(spec: OffloadingSpec) -> None:
    refused = refusal_of(spec, shelf(path="/shelf", boards=10))
    assert str(refused) == (
        'secondary_tiers[1].boards: got 10; allowed: what the tier "Shelf" accepts. '
        "boards=10 do not fit on '/shelf': write 9 or less."
    )
    assert isinstance(refused.__cause__, ValueError)


@pytest.mark.parametrize("reason", ["path and boards do not go together", ""])
def test_a_value_that_is_not_named(spec: OffloadingSpec, reason: str) -> None:
    refused = refusal_of(spec, shelf(path="/shelf", boards=2, raises=ValueError(reason)))
    (problem,) = refused.problems
    assert problem.key == "secondary_tiers[1]"
    assert problem.given.startswith('{"type": "Shelf", "path": "/shelf", "boards": 2, ')
    assert problem.remedy == reason or (problem.remedy and not reason)


def test_a_value_that_the_example_tier_refuses(spec: OffloadingSpec) -> None:
    (problem,) = refusal_of(spec, {"type": "example", "max_blocks": 0}).problems
    assert (problem.key, problem.given) == ("secondary_tiers[1].max_blocks", "0")


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("boards", "secondary_tiers[1].boards"),
        ("path.first[0]", "secondary_tiers[1].path.first[0]"),
        ("Shelf.boards", "secondary_tiers[1].boards"),
        ("cache_namespace", "cache_namespace"),
        ("secondary_tiers[1].boards", "secondary_tiers[1].boards"),
    ],
)
def test_a_refusal_of_the_tiers_own_says_where(spec: OffloadingSpec, key: str, shown: str) -> None:
    own = ConfigError(Problem(key, "1", "2", "Write 2"), Problem("engine", "1", "2", "Write 2"))
    refused = refusal_of(spec, shelf(path="/shelf", raises=own))
    assert [problem.key for problem in refused.problems] == [shown, "engine"]
    assert str(refused).endswith("Write 2.")


def test_a_tier_that_cannot_start(spec: OffloadingSpec) -> None:
    with pytest.raises(TierStartError) as refused:
        make(spec, shelf(path="/shelf", raises=PermissionError(13, "Permission denied", "/shelf")))
    assert str(refused.value) == (
        'secondary_tiers[1]: the tier "Shelf" could not start: PermissionError: '
        "[Errno 13] Permission denied: '/shelf'. Fix that, or remove the tier"
    )
    assert isinstance(refused.value.__cause__, PermissionError)


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("/shelf: is full", ".path"),
        ("/shelf/board: is full", ".path"),
        ("/shelf2: is full", ""),
        ("nothing fits on /shelf", ""),
    ],
)
def test_a_refused_path_is_named_by_its_key(spec: OffloadingSpec, reason: str, key: str) -> None:
    with pytest.raises(TierStartError) as refused:
        make(spec, shelf(path="/shelf", raises=TierRefused(reason)))
    assert str(refused.value).startswith(f"secondary_tiers[1]{key}: ")


def start_error_of(spec: OffloadingSpec, name: str) -> str:
    memory = bytearray(4 * 64)
    view = memoryview(memory).cast("B", (4, 64))
    with pytest.raises(TierStartError) as refused:
        make(spec, {"type": name, "module_path": HERE}, view)
    view.release()
    memory.clear()  # which raises while anyone has a part of it, the error's frames included
    return str(refused.value)


def test_a_tier_that_forgets_its_base_class(spec: OffloadingSpec) -> None:
    Lonely.closed.clear()
    assert start_error_of(spec, "Lonely") == (
        'secondary_tiers[1]: the tier "Lonely" is not complete: call super().__init__('
        "offloading_spec, primary_kv_view, tier_type) in its constructor"
    )
    assert Lonely.closed == ["shut down"]


@pytest.mark.parametrize(
    ("name", "said", "remedy"),
    [
        ("OnADisk", 'medium = "disk"', "Medium.GPU, Medium.CPU, Medium.STORAGE or None"),
        ("Somewhere", 'locality = "LOCAL"', "Locality.LOCAL, Locality.REMOTE or None"),
    ],
)
def test_a_tier_that_no_filter_would_fit(
    spec: OffloadingSpec, name: str, said: str, remedy: str
) -> None:
    assert start_error_of(spec, name) == (
        f'secondary_tiers[1]: the tier "{name}" has {said}: set {remedy}'
    )


# ---------------------------------------------------------------------------------------------
# Several tiers
# ---------------------------------------------------------------------------------------------


def test_what_is_wrong_with_several_tiers_is_told_together() -> None:
    entries = [
        {"type": "exmaple"},
        {"type": "FromOldTimes", "module_path": HERE},
        shelf(path="/shelf"),
        shelf(boards=5, quux=1),
        {"type": "Shelf", "module_path": "not_here_at_all"},
    ]
    tiers = options_of({"secondary_tiers": entries}).secondary_tiers
    with pytest.raises(ConfigError) as refused:
        SecondaryTierFactory.plan_secondary_tiers(tiers)
    assert [problem.key for problem in refused.value.problems] == [
        "secondary_tiers[0].type",
        "secondary_tiers[1].type",
        "secondary_tiers[3].path",
        "secondary_tiers[3].quux",
        "secondary_tiers[4].module_path",
    ]


def test_a_single_refusal_keeps_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_module(tmp_path, "tiers_that_divide", "1 / 0")
    with pytest.raises(ConfigError) as refused:
        SecondaryTierFactory.plan_secondary_tiers(
            [TierConfig("Shelf", module_path="tiers_that_divide")]
        )
    assert isinstance(refused.value.__cause__, ZeroDivisionError)


def test_a_plan_starts_nothing_and_shows_no_secret(spec: OffloadingSpec) -> None:
    tiers = [TierConfig("Shelf", module_path=HERE, options={"path": "/x", "password": HIDDEN})]
    (planned,) = SecondaryTierFactory.plan_secondary_tiers(tiers)
    assert planned.tier_cls is Shelf
    assert HIDDEN not in repr(planned)
    assert isinstance(planned.start(new_view(), spec), Shelf)


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize(
    "text",
    [
        f"{HIDDEN} is no password",
        f"cannot reach valkey://me:{HIDDEN}@host",
        f"password={HIDDEN} is wrong",
    ],
)
def test_no_secret_is_shown(spec: OffloadingSpec, kind: type[Exception], text: str) -> None:
    entry = shelf(path=f"valkey://me:{HIDDEN}@host", password=HIDDEN, raises=kind(text))
    with pytest.raises((ConfigError, TierStartError)) as refused:
        make(spec, entry)
    printed = "".join(traceback.format_exception(refused.value))
    assert "***" in printed
    assert HIDDEN not in printed


def test_no_secret_is_shown_of_a_key_that_is_refused(spec: OffloadingSpec) -> None:
    refused = refusal_of(spec, shelf(path="/shelf", pasword=HIDDEN, secret_key=HIDDEN))
    assert len(refused.problems) == 2
    assert HIDDEN not in str(refused)


@pytest.mark.parametrize("kind", [ConfigError, ValueError, RuntimeError])
def test_a_refusal_lets_go_of_the_view(spec: OffloadingSpec, kind: type[Exception]) -> None:
    memory = bytearray(4 * 64)
    view = memoryview(memory).cast("B", (4, 64))
    with pytest.raises((ConfigError, TierStartError)) as refused:
        make(spec, shelf(path="/shelf", raises=kind()), view)
    view.release()
    memory.clear()  # which raises while anyone has a part of it
    assert refused.value.__traceback__ is not None


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda key: key not in TIER_KEYS)
        | st.sampled_from(["path", "boards", "password"]),
        st.integers(max_value=9),
        max_size=6,
    )
)
def test_every_key_is_taken_or_refused(options: dict[str, Any]) -> None:
    spec = SpecOfThisTest(make_config())
    entry = TierConfig("Shelf", module_path=HERE, options={"path": "/shelf"} | options)
    unknown = set(options) - {"path", "boards", "password"}
    problems: tuple[Problem, ...] = ()
    try:
        SecondaryTierFactory.create_secondary_tier(entry, new_view(), spec)
    except ConfigError as refused:
        problems = refused.problems
    assert {problem.key for problem in problems} == {f"secondary_tiers[0].{k}" for k in unknown}
