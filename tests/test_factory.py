"""Names to classes, and everything that can be wrong with a name."""

from __future__ import annotations

import logging
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from kvtier.base import OffloadingSpec
from kvtier.config import ConfigError
from kvtier.factory import ClassRegistry, OffloadingSpecFactory
from tests.config.sample import make_config, options_of
from tests.installed import install, write_module


class Animal(ABC):
    @abstractmethod
    def sound(self) -> str: ...


class Cat(Animal):
    def sound(self) -> str:
        return "meow"


class Stone:
    pass


class Silent(Animal):
    pass


NO_CLASS = 7

ANIMAL_SOURCE = """
    from tests.test_factory import Animal

    class {name}(Animal):
        def sound(self):
            return "{name} of " + __name__
"""


@pytest.fixture
def registry() -> ClassRegistry[Animal]:
    animals: ClassRegistry[Animal] = ClassRegistry(
        kind="animal",
        load_base=lambda: Animal,
        entry_point_group="zoo.animals",
        name_key="animal",
        module_path_key="animal_module_path",
    )
    animals.register("cat", "tests.test_factory", "Cat")
    return animals


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on `sys.path`."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refusal_of(
    registry: ClassRegistry[Animal], name: str, module_path: str | None = None, at: str = ""
) -> str:
    with pytest.raises(ConfigError) as refused:
        registry.resolve(name, module_path, at)
    assert len(refused.value.problems) == 1
    return str(refused.value)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# ---------------------------------------------------------------------------------------------
# Where a class comes from
# ---------------------------------------------------------------------------------------------


def test_a_registered_name(registry: ClassRegistry[Animal]) -> None:
    assert registry.resolve("cat")().sound() == "meow"


def test_a_module_path(registry: ClassRegistry[Animal], site: Path) -> None:
    write_module(site, "zoo_of_paths.birds", ANIMAL_SOURCE.format(name="Duck"))
    duck = registry.resolve("Duck", "zoo_of_paths.birds")
    assert duck().sound() == "Duck of zoo_of_paths.birds"


def test_an_installed_entry_point(registry: ClassRegistry[Animal], site: Path) -> None:
    write_module(site, "zoo_of_points", ANIMAL_SOURCE.format(name="Dog"))
    install(site, "zoo-of-points", "zoo.animals", {"dog": "zoo_of_points:Dog [fur]"})
    assert registry.resolve("dog")().sound() == "Dog of zoo_of_points"


def test_nothing_is_loaded_before_it_is_asked_for(
    registry: ClassRegistry[Animal], site: Path
) -> None:
    write_module(site, "zoo_of_fuses", "raise SystemError('loaded')")
    install(site, "zoo-of-fuses", "zoo.animals", {"fuse": "zoo_of_fuses:Fuse"})
    registry.register("other fuse", "zoo_of_fuses", "Fuse")
    registry.resolve("cat")
    assert "zoo_of_fuses" not in sys.modules


def test_the_factories_load_neither_numpy_nor_what_they_name() -> None:
    probe = (
        "import sys, kvtier.factory, kvtier.cpu.policies.factory, kvtier.tiering.factory\n"
        "unwanted = {'numpy', 'kvtier.base', 'kvtier.cpu.spec', 'kvtier.cpu.policies.lru',\n"
        "            'kvtier.tiering.base', 'kvtier.tiering.example.manager'}\n"
        "print(sorted(unwanted & {*sys.modules}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True
    )
    assert loaded.stdout == "[]\n"


# ---------------------------------------------------------------------------------------------
# Who goes first
# ---------------------------------------------------------------------------------------------


def test_an_entry_point_never_shadows_a_registered_name(
    registry: ClassRegistry[Animal], site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_module(site, "zoo_of_impostors", ANIMAL_SOURCE.format(name="Lion"))
    install(site, "zoo-of-impostors", "zoo.animals", {"cat": "zoo_of_impostors:Lion"})
    assert registry.resolve("cat") is Cat
    assert registry.resolve("cat") is Cat
    (warning,) = warnings_in(caplog)
    assert warning == (
        "The entry point 'zoo_of_impostors:Lion' of group zoo.animals has no effect: "
        "animal 'cat' is registered already. Give the entry point another name."
    )
    assert "zoo_of_impostors" not in sys.modules


def test_a_module_path_never_shadows_a_known_name(
    registry: ClassRegistry[Animal], site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_module(site, "zoo_of_twins", ANIMAL_SOURCE.format(name="Dog"))
    install(site, "zoo-of-twins", "zoo.animals", {"Dog": "zoo_of_twins:Dog"})
    assert registry.resolve("cat", "zoo_of_ghosts", at="cages[1]") is Cat
    assert registry.resolve("Dog", "zoo_of_ghosts")().sound() == "Dog of zoo_of_twins"
    about_cat, about_dog = warnings_in(caplog)
    assert about_cat == (
        'cages[1].animal_module_path = "zoo_of_ghosts" has no effect: '
        "animal 'cat' is registered as tests.test_factory.Cat."
    )
    assert about_dog == (
        'animal_module_path = "zoo_of_ghosts" has no effect: '
        "animal 'Dog' is the installed entry point 'zoo_of_twins:Dog' of group zoo.animals."
    )


def test_a_name_that_two_packages_claim_is_refused(
    registry: ClassRegistry[Animal], site: Path
) -> None:
    install(site, "zoo-north", "zoo.animals", {"wolf": "zoo_north:Wolf"})
    install(site, "zoo-south", "zoo.animals", {"wolf": "zoo_south:Wolf"})
    assert refusal_of(registry, "wolf") == (
        'animal: got "wolf"; allowed: a name that only one installed package uses, '
        "not zoo_north:Wolf and zoo_south:Wolf. "
        "Uninstall all but one of the packages with this animal."
    )


def test_a_name_has_one_meaning(registry: ClassRegistry[Animal]) -> None:
    with pytest.raises(ValueError, match=r"'cat' is already registered, as tests.test_factory.Cat"):
        registry.register("cat", "zoo", "Lion")
    assert registry.resolve("cat") is Cat


def test_the_same_registration_again_changes_nothing(registry: ClassRegistry[Animal]) -> None:
    registry.register("cat", "tests.test_factory", "Cat")
    assert registry.resolve("cat") is Cat


@pytest.mark.parametrize(
    ("name", "module_path", "class_name", "message"),
    [
        (
            "",
            "zoo",
            "Dog",
            'animal\'s name: got ""; allowed: a text without white space around it.',
        ),
        (" dog", "zoo", "Dog", 'animal\'s name: got " dog"; .* Remove the white space around it.'),
        (None, "zoo", "Dog", "animal's name: got null; "),
        ("dog", "zoo.py", "Dog", 'module_path: got "zoo.py"; .* as in an import statement: "zoo"'),
        ("dog", "", "Dog", 'module_path: got ""; '),
        ("dog", "zoo", None, "class_name: got null; allowed: the name of a class. Write the class"),
        ("dog", "zoo", "dogs.Dog", 'class_name: got "dogs.Dog"; '),
    ],
)
def test_what_cannot_be_registered(
    registry: ClassRegistry[Animal], name: Any, module_path: Any, class_name: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        registry.register(name, module_path, class_name)
    assert "known animal (cat)" in refusal_of(registry, "giraffe")


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


def test_an_unknown_name(registry: ClassRegistry[Animal], site: Path) -> None:
    install(site, "zoo-of-names", "zoo.animals", {"dog": "zoo:Dog"})
    assert refusal_of(registry, "cta", at="cages[1]") == (
        'cages[1].animal: got "cta"; allowed: a known animal (cat, dog), or a class\'s name '
        'together with cages[1].animal_module_path. Did you mean "cat"?'
    )
    assert refusal_of(registry, "xylophone").endswith(
        "Choose a known one, or set animal_module_path to the class's module."
    )


def test_a_module_that_is_not_there(registry: ClassRegistry[Animal]) -> None:
    assert refusal_of(registry, "Dog", "zoo_of_ghosts.dogs", at="cages[1]") == (
        'cages[1].animal_module_path: got "zoo_of_ghosts.dogs"; allowed: a module that can be '
        "imported. There is no module 'zoo_of_ghosts' here: install its package in the engine's "
        "environment, or add its folder to PYTHONPATH."
    )


def test_a_module_that_lacks_another(registry: ClassRegistry[Animal], site: Path) -> None:
    write_module(site, "zoo_of_needs", "import zoo_of_ghosts")
    assert refusal_of(registry, "Dog", "zoo_of_needs").endswith(
        "zoo_of_needs needs the module 'zoo_of_ghosts', which is not here: install its package in "
        "the engine's environment, or fix the import."
    )


def test_a_class_that_lacks_a_module_when_it_is_asked_for(
    registry: ClassRegistry[Animal], site: Path
) -> None:
    write_module(site, "zoo_at_ease", "def __getattr__(name):\n    import zoo_of_ghosts")
    assert refusal_of(registry, "Dog", "zoo_at_ease", at="cages[1]") == (
        'cages[1].animal_module_path: got "zoo_at_ease"; allowed: a module that can be imported. '
        "zoo_at_ease needs the module 'zoo_of_ghosts', which is not here: install its package in "
        "the engine's environment, or fix the import."
    )


def test_a_module_that_fails(registry: ClassRegistry[Animal], site: Path) -> None:
    write_module(site, "zoo_of_errors", "1 / 0")
    message = refusal_of(registry, "Dog", "zoo_of_errors")
    assert message.startswith('animal_module_path: got "zoo_of_errors"; allowed: ')
    assert message.endswith("fails with ZeroDivisionError (division by zero): fix that.")


def test_an_entry_point_whose_module_is_gone(registry: ClassRegistry[Animal], site: Path) -> None:
    install(site, "zoo-half-gone", "zoo.animals", {"dodo": "zoo_half_gone:Dodo"})
    message = refusal_of(registry, "dodo")
    assert message.startswith(
        "animal: got \"dodo\" (the installed entry point 'zoo_half_gone:Dodo' of group "
        "zoo.animals); allowed: a module that can be imported. There is no module 'zoo_half_gone'"
    )


def test_a_class_that_is_not_in_the_module(registry: ClassRegistry[Animal], site: Path) -> None:
    write_module(site, "zoo_of_others", ANIMAL_SOURCE.format(name="Duck"))
    assert refusal_of(registry, "Dcuk", "zoo_of_others") == (
        'animal: got "Dcuk" (to be found in zoo_of_others); allowed: the name of a subclass of '
        "tests.test_factory.Animal. There is no 'Dcuk' in zoo_of_others. Did you mean \"Duck\"?"
    )
    assert refusal_of(registry, "duck", "zoo_of_others").endswith('Did you mean "Duck"?')
    assert refusal_of(registry, "Hippo", "zoo_of_others").endswith(
        "There is no 'Hippo' in zoo_of_others; it has Duck."
    )
    write_module(site, "zoo_of_nobody", "")
    assert refusal_of(registry, "Duck", "zoo_of_nobody").endswith(
        "There is no 'Duck' in zoo_of_nobody: define it."
    )


def test_of_many_classes_in_the_module_some_are_named(
    registry: ClassRegistry[Animal], site: Path
) -> None:
    source = "from tests.test_factory import Cat\n"
    source += "".join(f"class Bird{number}(Cat): ...\n" for number in range(14))
    write_module(site, "zoo_of_many", source)
    assert refusal_of(registry, "Hippopotamus", "zoo_of_many").endswith(
        "in zoo_of_many; it has Bird0, Bird1, Bird2, Bird3, Bird4, and others."
    )


def test_an_entry_point_without_a_class(registry: ClassRegistry[Animal], site: Path) -> None:
    write_module(site, "zoo_unnamed", ANIMAL_SOURCE.format(name="Dog"))
    write_module(site, "zoo_empty", "")
    names = {"dog": "zoo_unnamed", "nobody": "zoo_empty"}
    install(site, "zoo-unnamed", "zoo.animals", names)
    message = refusal_of(registry, "dog")
    assert message.startswith("animal: got \"dog\" (the installed entry point 'zoo_unnamed' of")
    assert message.endswith(". Write the entry point as 'zoo_unnamed:Dog'.")
    assert refusal_of(registry, "nobody").endswith(" as 'zoo_empty:MyClass'.")


def test_an_entry_point_whose_class_is_gone(registry: ClassRegistry[Animal], site: Path) -> None:
    """The user cannot write another name: the package has to be corrected."""
    write_module(site, "zoo_renamed", ANIMAL_SOURCE.format(name="Hound"))
    install(site, "zoo-renamed", "zoo.animals", {"dog": "zoo_renamed:Hund"})
    message = refusal_of(registry, "dog")
    assert message.endswith("There is no 'Hund' in zoo_renamed; it has Hound.")


def test_a_registration_whose_class_is_gone(registry: ClassRegistry[Animal]) -> None:
    registry.register("dodo", "tests.test_factory", "Dodo")
    assert refusal_of(registry, "dodo").startswith(
        'animal: got "dodo" (registered as tests.test_factory.Dodo); allowed: the name of a sub'
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Stone", "Derive Stone from Animal."),
        ("NO_CLASS", "tests.test_factory.NO_CLASS is not a class: give the name of a class."),
        ("Silent", "Implement sound in Silent."),
        ("Animal", "Implement sound in Animal."),
    ],
)
def test_a_name_of_something_else(registry: ClassRegistry[Animal], name: str, remedy: str) -> None:
    message = refusal_of(registry, name, "tests.test_factory")
    assert message.startswith(f'animal: got "{name}" (to be found in tests.test_factory); allowed:')
    assert "tests.test_factory.Animal" in message
    assert message.endswith(remedy)


# ---------------------------------------------------------------------------------------------
# Specs
# ---------------------------------------------------------------------------------------------

SPEC_SOURCE = """
    from kvtier.base import OffloadingSpec

    class MySpec(OffloadingSpec):
        def get_manager(self):
            raise NotImplementedError

        def get_worker(self, kv_caches):
            raise NotImplementedError
"""


def test_a_spec_of_one_s_own_is_made_with_the_configuration(site: Path) -> None:
    write_module(site, "my_specs", SPEC_SOURCE)
    config = make_config({"spec_name": "MySpec", "spec_module_path": "my_specs"})
    spec = OffloadingSpecFactory.create_spec(config)
    assert isinstance(spec, OffloadingSpec)
    assert type(spec).__module__ == "my_specs"
    assert spec.config is config


def test_an_installed_spec_is_found(site: Path) -> None:
    write_module(site, "my_installed_specs", SPEC_SOURCE)
    install(site, "my-installed-specs", "kvtier.specs", {"mine": "my_installed_specs:MySpec"})
    found = OffloadingSpecFactory.get_spec_cls(options_of({"spec_name": "mine"}))
    assert found.__module__ == "my_installed_specs"


def test_a_spec_registered_under_a_name(site: Path) -> None:
    write_module(site, "my_registered_specs", SPEC_SOURCE)
    OffloadingSpecFactory.register_spec("test_factory", "my_registered_specs", "MySpec")
    found = OffloadingSpecFactory.get_spec_cls(options_of({"spec_name": "test_factory"}))
    assert found.__module__ == "my_registered_specs"


def test_the_default_spec_is_the_cpu_tier() -> None:
    found = OffloadingSpecFactory.get_spec_cls(options_of({}))
    assert (found.__module__, found.__name__) == ("kvtier.cpu.spec", "CPUOffloadingSpec")


def test_an_unknown_spec_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError) as refused:
        OffloadingSpecFactory.get_spec_cls(options_of({"spec_name": "CPUOfloadingSpec"}))
    message = str(refused.value)
    assert message.startswith('spec_name: got "CPUOfloadingSpec"; allowed: a known spec (')
    assert "spec_module_path" in message
    assert message.endswith('Did you mean "CPUOffloadingSpec"?')


def test_tiers_need_the_spec_that_has_them() -> None:
    tiers = {"secondary_tiers": [{"type": "example"}]}
    for named in ({}, {"spec_name": "TieringOffloadingSpec"}):
        found = OffloadingSpecFactory.get_spec_cls(options_of(tiers | named))
        assert (found.__module__, found.__name__) == (
            "kvtier.tiering.spec",
            "TieringOffloadingSpec",
        )


def test_tiers_go_to_a_spec_of_one_s_own(site: Path) -> None:
    write_module(site, "my_tiering", SPEC_SOURCE)
    tiers = {"secondary_tiers": [{"type": "known to MySpec alone"}]}
    named = {"spec_name": "MySpec", "spec_module_path": "my_tiering"}
    found = OffloadingSpecFactory.get_spec_cls(options_of(tiers | named))
    assert found.__module__ == "my_tiering"
