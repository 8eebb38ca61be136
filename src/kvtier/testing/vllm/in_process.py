"""Runs stock vLLM in this process. The caller runs each engine step. The defaults suit vLLM's CPU
build.

The demo, the tests and the benchmarks use it. Importing this module does not import vLLM. Call
`contain`, or enter `contained_environment`, before vLLM is imported: then vLLM writes only into one
folder, which `contained_environment` removes at the end.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from kvtier.integrations.vllm import release_of

if TYPE_CHECKING:
    from kvtier.tiering.manager import TieringOffloadingManager

BLOCK_TOKENS = 32
"""Tokens of a device block. On the CPU, vLLM accepts only multiples of 32."""

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # One thread gives bit-identical results: with more, the order of sums varies.
    "OMP_NUM_THREADS": "1",
    # Otherwise vLLM compiles a few small functions, which takes seconds and needs a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
_FOLDERS = (
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "HF_HOME",
    "TMPDIR",
    "XDG_CACHE_HOME",
)


PlugIn = Literal["connector", "spec"]
"""How kvtier is plugged into vLLM: as a connector of its own, or as a spec in vLLM's connector."""


_LABELS_OF_VLLM = frozenset({"engine", "model_name"})


def contain(folder: Path, log_level: str = "ERROR") -> None:
    """Make vLLM write only into `folder`, in this process and in the processes it starts."""
    os.environ.update(_SETTINGS)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level)
    for variable in _FOLDERS:
        (folder / variable.lower()).mkdir()
        os.environ[variable] = str(folder / variable.lower())


@contextmanager
def contained_environment(log_level: str = "ERROR") -> Iterator[Path]:
    """Make vLLM write only into a temporary folder, yield the folder, and remove it."""
    with tempfile.TemporaryDirectory(prefix="kvtier-vllm-") as name:
        before = dict(os.environ)
        try:
            contain(Path(name), log_level)
            yield Path(name)
        finally:
            os.environ.clear()
            os.environ.update(before)


def _transfer_config(plug_in: PlugIn, kvtier: Mapping[str, Any]) -> dict[str, Any]:
    """The value of `--kv-transfer-config`, as a user would write it."""
    if plug_in == "connector":
        own: dict[str, Any] = {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.integrations.vllm",
        }
        return own | {"kv_role": "kv_both", "kv_connector_extra_config": dict(kvtier)}
    spec = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.integrations.vllm"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": spec | dict(kvtier),
    }


@dataclass(slots=True)
class Answer:
    """The result of one request."""

    tokens: list[int]
    logprobs: list[float]
    """Logprobs of the chosen tokens."""
    cached_tokens: int
    """Prompt tokens that came from a cache of any kind and were not computed."""
    time_to_first_token: float
    """Seconds since the request was added; infinite if there was no token."""


def _own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name not in _LABELS_OF_VLLM}


def _keep_all_figures(engine: Any) -> None:
    """Record the metrics of steps that return no token. vLLM before 0.28 drops them when it runs
    without a server."""

    def get_output() -> Any:
        outputs = get_any_output()
        if outputs.scheduler_stats is not None and not outputs.outputs:
            engine.logger_manager.record(outputs.scheduler_stats, iteration_stats=None)
        return outputs

    get_any_output = engine.engine_core.get_output
    engine.engine_core.get_output = get_output


class InProcessEngine:
    """One vLLM engine whose steps the caller runs. Use it as a context manager."""

    def __init__(
        self,
        model: Path,
        kvtier: Mapping[str, Any] | None = None,
        *,
        plug_in: PlugIn = "connector",
        device_blocks: int | None = 1024,
        max_requests: int = 8,
        **engine_args: Any,
    ) -> None:
        """Start an engine. `kvtier`: kvtier's extra config; None: vLLM alone.

        `device_blocks`: None for as many as fit. `engine_args` override the settings below.
        """
        from vllm import LLM, __version__
        from vllm.config import KVTransferConfig

        if kvtier is not None:
            engine_args["kv_transfer_config"] = KVTransferConfig(
                **_transfer_config(plug_in, kvtier)
            )
        own_args: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            # vLLM's default is a 16-bit type, whose rounding can turn a tiny difference into a
            # large one.
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": device_blocks,
            "max_num_seqs": max_requests,
            "enable_prefix_caching": True,
            "seed": 0,
            # Without this, vLLM has no metrics.
            "disable_log_stats": False,
        }
        self._llm = LLM(model=str(model), **(own_args | engine_args))
        self._engine = self._llm.llm_engine
        if release_of(__version__) < (0, 28):
            _keep_all_figures(self._engine)
        self._added_at: dict[str, float] = {}
        self._answers: dict[str, Answer] = {}
        self._unfinished: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and undo its changes to this process, so that another one can start."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine, self._llm
        cleanup_dist_env_and_memory()

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        hints: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue a request. `name` must be unique in this engine. `hints`: its
        kv_transfer_params."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": dict(hints)} if hints else None,
        )
        self._answers[name] = Answer([], [], 0, float("inf"))
        self._unfinished.add(name)
        self._added_at[name] = time.perf_counter()
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def abort(self, *names: str) -> None:
        """Abort requests in any state."""
        self._engine.abort_request(list(names))
        self._unfinished.difference_update(names)

    def step(self) -> None:
        """Run one engine step: schedule, compute, and collect the outputs."""
        outputs = self._engine.step()
        if not outputs:
            # Pause, as vLLM's server does if nothing was computed: threads that move blocks need
            # the interpreter lock.
            time.sleep(0.001)
        for output in outputs:
            answer = self._answers[output.request_id]
            chosen = output.outputs[0]
            answer.tokens = list(chosen.token_ids)
            answer.logprobs = [
                position[token].logprob
                for position, token in zip(chosen.logprobs, chosen.token_ids, strict=True)
            ]
            answer.cached_tokens = output.num_cached_tokens or 0
            if answer.tokens and answer.time_to_first_token == float("inf"):
                answer.time_to_first_token = time.perf_counter() - self._added_at[output.request_id]
            if output.finished:
                self._unfinished.discard(output.request_id)

    def answer(self, name: str) -> Answer:
        """The result of the request so far."""
        return self._answers[name]

    def run(self) -> None:
        """Step until every request has ended."""
        while self._unfinished:
            self.step()

    def settle(self, timeout: float = 120.0) -> None:
        """Step until all transfers have ended, including stores. After `timeout` seconds, raises
        `TimeoutError`, which names the work that is left.

        vLLM hands a store to the worker one step after the blocks were computed, and takes steps
        without requests only while the connector reports pending work. Tiers may work for longer,
        so this method then calls the manager's `on_schedule_end` itself.
        """
        from kvtier.base import ScheduleEndContext

        deadline = time.monotonic() + timeout
        # If vLLM schedules ahead, the last scheduled step waits in this queue.
        queue = self._engine.engine_core.engine_core.batch_queue
        tiering = self._tiering
        while True:
            must_step = self._scheduler.has_requests() or queue
            if not must_step and (tiering is None or not tiering.is_moving_blocks()):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout} s there are still {self._open_work()}")
            if must_step:
                self.step()
            else:
                self._scheduler.connector.connector_scheduler.manager.on_schedule_end(
                    ScheduleEndContext()
                )
                time.sleep(0.001)

    @property
    def _tiering(self) -> TieringOffloadingManager | None:
        """kvtier's manager, if there are tiers below host memory."""
        from kvtier.tiering.manager import TieringOffloadingManager

        ours = getattr(self._scheduler.connector, "connector_scheduler", None)
        manager = getattr(getattr(ours, "manager", None), "inner", None)
        return manager if isinstance(manager, TieringOffloadingManager) else None

    def _open_work(self) -> str:
        counts = {"unfinished requests": self._scheduler.get_num_unfinished_requests()}
        if self._tiering is not None:
            counts |= self._tiering.open_work()
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "steps"

    def generate(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 4,
        hints: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Run one request to its end."""
        self.add(name, prompt, max_tokens, hints)
        self.run()
        return self.answer(name)

    def change_model(self, change: Callable[[Any], None]) -> None:
        """Call `change` with the model, a torch module on the device."""
        self._llm.apply_model(change)

    def metrics(self) -> list[Any]:
        """The metrics that vLLM's endpoint would show."""
        return list(self._llm.get_metrics())

    def figures(self) -> dict[str, float]:
        """kvtier's counters and gauges among the metrics, such as `cpu_loaded_blocks`, by series
        (`metric_series`), without the labels that vLLM adds to each."""
        from kvtier.base import metric_series  # imports numpy, which starts threads: see `contain`

        return {
            metric_series(
                metric.name.removeprefix("vllm:kvtier_"), _own_labels(metric.labels)
            ): metric.value
            for metric in self.metrics()
            if metric.name.startswith("vllm:kvtier_") and hasattr(metric, "value")
        }

    def reset_device_cache(self) -> None:
        """Empty the device cache; host memory keeps its blocks."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache: some blocks are in use")

    def sleep(self) -> None:
        """Release the device's memory until `wake_up`; vLLM resets all caches. CUDA only."""
        self._llm.sleep(level=1)

    def wake_up(self) -> None:
        """Restore the device's memory as before `sleep`, with an empty device cache."""
        self._llm.wake_up()

    def reset_all(self, *, running: bool = False) -> bool:
        """Empty the device cache and every tier. `running`: preempt running requests first. Returns
        False if vLLM could not reset its cache."""
        return bool(
            self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
        )
