"""An engine whose weights are replaced while it runs; and broken engines that ignore such a change,
to show that the tests detect it."""

from __future__ import annotations

from typing import Any, Literal

from tests.e2e.vllm.scenarios.engine import Engine

Way = Literal["sleep", "pause and abort", "pause and keep", "reset"]


class EngineWithOtherWeights(Engine):
    """The ways in which vLLM replaces weights; each ends in a reset of the connector."""

    def update_weights(self, way: Way, path: str) -> None:
        """Load the weights in `path`, of the same architecture, in place."""
        llm = self._engine._llm
        core = llm.llm_engine.engine_core.engine_core
        if way == "sleep":
            llm.sleep(level=2)
            self._reload(path)
            llm.wake_up()
        elif way == "reset":
            self._reload(path)
            assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        else:
            core.pause_scheduler(mode=way.rpartition(" ")[2], clear_cache=True)
            self._reload(path)
            core.resume_scheduler()

    def update_weights_under_a_request(self, path: str) -> None:
        """Replace the weights without preempting requests. vLLM reports the reset as not done: the
        device keeps its blocks, and those of the request are offered for storing again."""
        self._reload(path)
        assert not self._engine.reset_all(running=False)

    def _reload(self, path: str) -> None:
        self._engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


class EngineThatIgnoresItsWeights(Engine):
    """An engine in which all models have the same identity."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from kvtier.integrations.vllm import config
        from kvtier.integrations.vllm.identity import ModelIdentity

        one = ModelIdentity(revision="hub:any", unknown_because=None, variant="any")
        vars(config)["identity_of"] = lambda *_, **__: one
        super().__init__(*args, **kwargs)


class EngineThatIgnoresResets(EngineWithOtherWeights):
    """An engine in which kvtier ignores resets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from kvtier.integrations.vllm.manager import ManagerAdapter

        def reset_nothing(self: ManagerAdapter) -> None:
            pass

        ManagerAdapter.reset_cache = reset_nothing  # type: ignore[method-assign]
        super().__init__(*args, **kwargs)
