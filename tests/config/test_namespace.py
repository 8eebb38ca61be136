"""What a namespace is made of, as text that anybody may have written or damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import NamespaceDescription, OffloadingConfig, OffloadingModelConfig
from kvtier.config.namespace import DESCRIPTION_BYTES, short_value
from tests.config.sample import GROUP, make_config

SETTINGS = (("engine", "0.32.0"), ("max_model_len", 4096), ("rope", "#1"), ("rope.theta", 1e4))


def config_with(*changed: tuple[str, Any], **model: Any) -> OffloadingConfig:
    by_name: dict[str, Any] = dict(SETTINGS) | dict(changed)
    settings = tuple(by_name.items())
    sample = OffloadingModelConfig(
        "org/model", "bfloat16", "hub:1234", variant=repr(settings), settings=settings
    )
    return make_config(model=replace(sample, **model))


def test_a_description_comes_back_as_it_was_written() -> None:
    description = config_with(served_name="Our Model").describe()
    again = NamespaceDescription.decode(description.encode(), description.namespace)
    assert again == description
    assert again.model == "Our Model"
    assert again.summary() == (
        "Our Model, weights_revision hub:1234, engine 0.32.0, max_model_len 4096, rope #1, "
        "dtype bfloat16"
    )


def test_the_setting_that_differs_is_named_and_not_the_digest_of_all() -> None:
    before, now = config_with().describe(), config_with(("max_model_len", 2048)).describe()
    assert before.difference(now) == "max_model_len: 4096, now 2048"


def test_a_setting_within_another_is_named_instead_of_it() -> None:
    now = config_with(("rope", "#2"), ("rope.theta", 5e3)).describe()
    assert config_with().describe().difference(now) == "rope.theta: 10000.0, now 5000.0"


def test_if_no_setting_tells_the_difference_the_variant_is_named() -> None:
    now = config_with(variant="another").describe()
    assert config_with().describe().difference(now).endswith("now another")


def test_many_differences_are_counted() -> None:
    now = config_with(*((name, "x") for name, _ in SETTINGS), dtype="float16").describe()
    shown = config_with().describe().difference(now)
    assert shown.startswith("engine: 0.32.0, now x; max_model_len: 4096, now x; ")
    assert shown.count("; ") == 3
    several = make_config(
        {"cache_namespace": "v2", "blocks_per_chunk": 2}, worker_kv_bytes_per_block=1 << 20
    ).describe()
    assert config_with().describe().difference(several).endswith("more")


def test_the_closest_namespace_has_the_most_equal_ingredients() -> None:
    now = config_with(("max_model_len", 2048)).describe()
    near, far = config_with().describe(), make_config().describe()
    assert near.num_equal(now) > far.num_equal(now)
    assert now.num_equal(now) == len(now.ingredients)


def test_a_namespace_after_a_reset_is_told_from_the_one_before() -> None:
    config = make_config()
    fingerprint = config.fingerprint(b"epoch")
    after = config.describe(fingerprint)
    assert after.namespace == fingerprint.hex()
    assert after.differences(config.describe()) == [
        f"after_reset: {fingerprint.hex()[:8]}, now none"
    ]
    assert config.describe(config.fingerprint()) == config.describe()


def test_a_large_description_is_cut_to_its_limit() -> None:
    settings = (("config", "#1"), *((f"config.field {n}", "x" * 500) for n in range(200)))
    layers = tuple(f"model.layers.{number}.self_attn" for number in range(500))
    groups = tuple(replace(GROUP, group_id=number, layer_names=layers) for number in range(40))
    model = OffloadingModelConfig(
        "m" * 3000, "bfloat16", "r" * 3000, "v" * 3000, served_name="t" * 3000, settings=settings
    )
    config = make_config(
        {"cache_namespace": "n" * 3000}, groups=groups, model=model, kv_cache_layout="l" * 3000
    )
    content = config.describe().encode()
    assert len(content) <= DESCRIPTION_BYTES
    found = NamespaceDescription.decode(content, config.fingerprint().hex())
    assert found is not None
    assert found.model == config.describe().model
    assert found.differences(config.describe()) == []
    assert found.ingredients["dtype"] == "bfloat16"
    assert found.ingredients["config"] == "#1"
    other = replace(config, groups=groups[1:])
    assert "groups" in found.difference(other.describe())


def test_a_setting_with_the_name_of_an_ingredient_hides_nothing() -> None:
    settings = (("dtype", "float32"), ("model_name", "other"))
    model = OffloadingModelConfig("org/model", "bfloat16", settings=settings)
    made_of = make_config(model=model).describe().ingredients
    assert (made_of["dtype"], made_of["model_name"]) == ("bfloat16", "org/model")
    assert (made_of["engine's dtype"], made_of["engine's model_name"]) == ("float32", "other")


def test_settings_that_are_off_are_left_out_first() -> None:
    settings: tuple[tuple[str, Any], ...] = (
        ("config", "#1"),
        *((f"config.off {number}", False) for number in range(200)),
        ("config.on", True),
    )
    model = OffloadingModelConfig("m", "bfloat16", settings=settings)
    content = make_config(model=model).describe().encode()
    assert b'"config.on":true' in content
    assert b'"config.off 0":false' in content
    assert b'"config.off 199":false' not in content


def test_long_values_that_differ_at_their_ends_stay_different() -> None:
    assert short_value("x" * 100 + "a") != short_value("x" * 100 + "b")
    assert len(str(short_value("x" * 10_000))) <= 64


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": None},
        {"namespace": "0" * 32},
        {"model": 7},
        {"hash_root": None},
        {"made_of": ["dtype"]},
        {"made_of": {"dtype": ["bfloat16"]}},
        {"made_of": {"dtype": "x" * 1000}},
        {"made_of": {"x" * 1000: 1}},
        {"made_of": {str(n): 1 for n in range(513)}},
    ],
)
def test_what_another_program_wrote_is_no_description(change: dict[str, Any]) -> None:
    description = make_config().describe()
    document = json.loads(description.encode()) | change
    content = json.dumps(document, separators=(",", ":")).encode()
    assert NamespaceDescription.decode(content, description.namespace) is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 3000, b" " * (DESCRIPTION_BYTES + 1), b"1"]
)
def test_damage_is_no_description(content: bytes) -> None:
    assert NamespaceDescription.decode(content, "0" * 32) is None


@given(st.data())
def test_no_cut_or_changed_byte_raises(data: st.DataObject) -> None:
    description = config_with().describe()
    content = bytearray(description.encode())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (content, content[:cut]):
        found = NamespaceDescription.decode(bytes(damaged), description.namespace)
        if found is not None:
            assert found.difference(description).isprintable()
            assert found.summary().isprintable()


def test_no_description_writes_control_characters_to_a_terminal() -> None:
    description = make_config().describe()
    evil = replace(description, model="\x1b[2Jx\n", ingredients={"a\x07": "\x1b]0;x"})
    found = NamespaceDescription.decode(evil.encode(), description.namespace)
    assert found is not None
    assert found.summary().isprintable()
    assert found.difference(description).isprintable()
    assert (
        config_with(("max_model_len", "\x1b[2J"), served_name="\x1b")
        .describe()
        .summary()
        .isprintable()
    )


def test_no_secret_is_in_a_description(tmp_path: Any) -> None:
    config = make_config({"seal_key_file": str(tmp_path / "very-secret-place")})
    content = config.describe().encode()
    assert b"very-secret-place" not in content
    assert config.describe().ingredients["signed"] is True
